"""What a scenario is, for forms and for people: specification, parameters, and what they mean."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Any

from pydantic import BaseModel

from populace.scenario import Scenario
from shared.messages.scenario import ScenarioSpec


def describe(spec: ScenarioSpec, cls: type[Scenario], params: BaseModel) -> dict[str, Any]:
    """A scenario in plain values.

    Args:
        spec: the scenario.
        cls: its class.
        params: its parameters, defaults filled in.

    Returns:
        ``spec``; ``about`` (the class's docstring); ``params`` with ``values``, a JSON ``schema``,
        and ``about`` (what is written below each parameter).
    """
    return {
        "spec": spec.model_dump(mode="json", exclude_none=True),
        "about": inspect.getdoc(cls) or "",
        "params": {
            "values": params.model_dump(mode="json"),
            "schema": type(params).model_json_schema(),
            "about": attribute_docs(type(params)),
        },
    }


def attribute_docs(cls: type) -> dict[str, str]:
    """The texts that stand below the attributes of a class, by name; inherited ones too."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        if base is BaseModel:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue  # made at run time, say
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for attribute, text in itertools.pairwise(body):
            if (
                isinstance(attribute, ast.AnnAssign)
                and isinstance(attribute.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found[attribute.target.id] = inspect.cleandoc(text.value.value)
    return found
