"""Answers that must fit a JSON schema: parsed and validated, or failed with the text kept."""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

import jsonschema
import referencing

from shared.messages.model import ModelResponse

_SHOWN = 200
_JSON_BEGINS = ("{", "[", '"')
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    # An empty registry: nothing is fetched from wherever a reference points.
    registry: Any = referencing.Registry()
    return jsonschema.Draft202012Validator(json.loads(schema), registry=registry)


def schema_problem(schema: dict[str, Any]) -> str | None:
    """What is wrong with a schema itself, or None."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        return str(error.message)
    return None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    """A number, unless it is larger than one can be: JSON knows no infinity."""
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text} is beyond all numbers")
    return found


def _fenced(text: str) -> str:
    """What stands in a code fence, if there is one alone: many models can't do without."""
    match = _FENCE.fullmatch(text.strip())
    if match is not None:
        return match.group(1)
    blocks = [] if text.lstrip()[:1] in _JSON_BEGINS else _FENCE.findall(text)
    return blocks[0] if len(blocks) == 1 else text


def fit(response: ModelResponse, schema: dict[str, Any] | None) -> ModelResponse:
    """The response with its text parsed, if a schema was asked for; else as it is."""
    if schema is None or response.error_kind:
        return response
    try:
        data = json.loads(_fenced(response.text), parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        cut = " (it was cut by the token limit)" if response.finish == "length" else ""
        response.error_kind = "schema"
        response.error = f"the answer is not JSON{cut}"
        return response
    try:
        problem = next(_validator(json.dumps(schema, sort_keys=True)).iter_errors(data), None)
        why = None if problem is None else problem.message
    except Exception as error:  # a pattern that Python does not know, a reference to nowhere
        why = f"the schema can't be followed ({type(error).__name__}: {error})"
    if why is not None:
        response.error_kind = "schema"
        response.error = f"the answer does not fit: {why[:_SHOWN]}"
        return response
    response.data = data
    return response
