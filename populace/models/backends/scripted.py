"""The scripted back end: no model, but answers that follow from the request's key and prompt.

For tests and benchmarks. Every result says "scripted".
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
from typing import Any

from populace._random import AgentRandom, mix, round_key, stream_key, stream_state
from populace.models.backends.base import Admit, Backend, let_in
from shared.messages.model import ModelRequest, ModelResponse
from shared.messages.scenario import ModelSpec, ScriptSpec

_DEPTH = 8
_PAUSES = 0x9E3779B9
_SO_MANY = 30
_WORDS = [f"{a}{b}{c}" for a in ("ba", "de", "ki", "lo", "mu") for b in "lnrst" for c in "aeiou"]
"""125 words that mean nothing."""
_stream_key = functools.lru_cache(maxsize=1024)(stream_key)


class ScriptedBackend(Backend):
    """Draws a number for each prompt, and fills schemas with draws."""

    def __init__(self, spec: ModelSpec) -> None:
        self.name = "scripted"
        self._script = spec.script or ScriptSpec()
        if spec.concurrency is None:
            self.slots = 100_000  # it only ever waits

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    async def check(self) -> dict[str, Any]:
        """Always at hand."""
        return {"model": "scripted"}

    async def answer(self, request: ModelRequest, admit: Admit = let_in) -> ModelResponse:
        """Answer from (seed, population, agent, round, number of the question)."""
        script = self._script
        seed, population, agent, round_number, question = request.key
        key = round_key(_stream_key(seed, f"model/{population}"), round_number)
        state = stream_state(key, agent)
        source = AgentRandom(mix(state + question))
        pause = _pause(script, AgentRandom(mix(state + question + _PAUSES)))
        if pause:
            await asyncio.sleep(pause)
        if source.random() < script.failures:
            return ModelResponse(
                request.number,
                backend=self.name,
                error_kind="refused",
                error="the script had this request fail",
            )
        number = round(source.uniform(script.low, script.high), 2)
        if request.schema is not None:
            filled = _fill(request.schema, request.schema, source, number, script, 0)
            text = json.dumps(filled)
        else:
            text = _answer(script, request, source, number)
        return ModelResponse(
            request.number,
            text=text,
            tokens_in=sum(len(str(m.get("content", ""))) for m in request.messages) // 4,
            tokens_out=max(1, len(text) // 4),
            backend=self.name,
        )


def _pause(script: ScriptSpec, source: AgentRandom) -> float:
    """Seconds until the answer; drawn apart, so that answers don't depend on it."""
    latency = script.latency
    if isinstance(latency, float):
        return latency
    return latency.median * math.exp(latency.sigma * source.gauss(0.0, 1.0))


def _answer(script: ScriptSpec, request: ModelRequest, source: AgentRandom, number: float) -> str:
    """A free answer: by the first rule that matches the last message, or the script's text."""
    last = str(request.messages[-1].get("content", "")) if request.messages else ""
    for rule in script.rules:
        match = re.search(rule.when, last)
        if match is not None:
            text = rule.text
            for number_ in range(1, match.re.groups + 1):
                text = text.replace(f"{{{number_}}}", match.group(number_) or "")
            return _text(script.model_copy(update={"text": text}), source, number)
    return _text(script, source, number)


def _text(script: ScriptSpec, source: AgentRandom, number: float) -> str:
    text = script.text.replace("{number}", f"{number:g}")
    while "{words}" in text:
        words = " ".join(source.choice(_WORDS) for _ in range(_SO_MANY))
        text = text.replace("{words}", words, 1)
    return text


def _fill(
    schema: dict[str, Any],
    root: dict[str, Any],
    source: AgentRandom,
    number: float,
    script: ScriptSpec,
    depth: int,
) -> Any:
    """Something that fits the schema, as far as the common keywords go."""
    schema = _resolved(schema, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return source.choice(schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object" or "properties" in schema:
        if depth > _DEPTH:
            return {}
        return {
            key: _fill(part, root, source, number, script, depth + 1)
            for key, part in schema.get("properties", {}).items()
        }
    if kind == "array":
        if depth > _DEPTH:
            return []
        length = max(1, int(schema.get("minItems", 1)))
        item = schema.get("items", {})
        return [_fill(item, root, source, number, script, depth + 1) for _ in range(length)]
    if kind in ("number", "integer"):
        low, high = _bounds(schema, script)
        value = number if low <= number <= high else source.uniform(low, high)
        if kind == "integer":
            return max(math.ceil(low), min(math.floor(high), round(value)))
        return value
    if kind == "boolean":
        return source.random() < 0.5
    if kind == "null":
        return None
    text = _text(script, source, number)
    while len(text) < schema.get("minLength", 0):
        text = f"{text} {_text(script, source, number)}"
    return text[: schema["maxLength"]] if "maxLength" in schema else text


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A schema without a reference or a choice at its top: the first choice counts."""
    for _ in range(_DEPTH):
        if "$ref" in schema:
            found: Any = root
            for name in str(schema["$ref"]).lstrip("#/").split("/"):
                found = found.get(name, {}) if isinstance(found, dict) else {}
            rest = {k: v for k, v in schema.items() if k != "$ref"}
            schema = {**found, **rest}
        elif choices := schema.get("anyOf") or schema.get("oneOf"):
            rest = {k: v for k, v in schema.items() if k not in ("anyOf", "oneOf")}
            schema = {**choices[0], **rest}
        elif "allOf" in schema:
            parts = schema["allOf"]
            schema = {k: v for k, v in schema.items() if k != "allOf"}
            for part in parts:
                schema = {**_resolved(part, root), **schema}
        else:
            break
    return schema


def _bounds(schema: dict[str, Any], script: ScriptSpec) -> tuple[float, float]:
    """From where to where a number may be: as the schema says, else as the script."""
    step = 1 if schema.get("type") == "integer" else 1e-6
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + step
    if high is None and "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - step
    span = script.high - script.low
    if low is None:
        low = script.low if high is None or script.low <= high else high - span
    if high is None:
        high = script.high if script.high >= low else low + span
    return low, high
