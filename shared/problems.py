"""What is wrong with what somebody wrote, as one sentence."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError


def first_problem(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """A validation error's first complaint as a sentence: the key, and what is wrong.

    Args:
        error: what pydantic raised.
        model: which model it was; then an unknown key is told which ones there are.
    """
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        text = "is not a key that is known here"
        if model is not None:
            text += instead(str(first["loc"][-1]), _keys_at(model, first["loc"][:-1]))
    elif first["type"] == "missing":
        text = "is missing"
    elif first["type"] in ("model_type", "model_attributes_type", "dict_type"):
        text = "must be a mapping of keys"
    return f"{where}: {text}" if where else text


def instead(key: str, known: list[str]) -> str:
    """What may have been meant by an unknown key, as the end of a sentence."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f" (there are: {', '.join(known)})" if known else ""


def _keys_at(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The keys of the mapping at a place: parts that are no fields lead into containers."""
    models = [model]
    for part in place:
        inner = [
            found
            for one in models
            if part in one.model_fields
            for found in _models_in(one.model_fields[str(part)].annotation)
        ]
        models = inner or models
    return sorted({name for one in models for name in one.model_fields})


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
