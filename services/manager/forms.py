"""Forms made from a scenario's schema, and what people put into them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from shared.errors import InvalidInputError

_MODEL_KEYS = ("backend", "model", "base_url", "temperature", "max_tokens")
_LONGEST_TEXT = 256 << 10
_BACKENDS = ("embedded", "openai", "vllm", "scripted")


@dataclass
class Field:
    """An entry of a form."""

    key: str
    """Dotted, as in ``params.target.ratio``."""
    label: str
    kind: str
    """``int``, ``number``, ``bool``, ``choice``, ``text``, or ``yaml`` for whatever else."""
    value: str = ""
    choices: list[str] = field(default_factory=list)
    """In words; ``known`` holds what they stand for, in the same order."""
    known: list[Any] = field(default_factory=list)
    low: float | None = None
    high: float | None = None
    about: str = ""
    optional: bool = False
    """Whether it may be left empty, which means null."""


def form_of(described: dict[str, Any]) -> dict[str, list[Field]]:
    """The form of a scenario, in sections.

    Args:
        described: as ``populace.describing.describe`` gives it.
    """
    spec, params = described["spec"], described["params"]
    agents = spec["agents"]
    general = [
        Field("agents.count", "Agents", "int", str(agents["count"]), low=1),
        Field("rounds", "Rounds", "int", str(spec["rounds"]), low=1, high=1_000_000),
        Field("seed", "Seed", "int", str(spec["seed"]), about="Same seed, same result."),
        Field(
            "agents.personas",
            "Personas",
            "text",
            agents.get("personas") or "",
            about="A stored population, a template, or a file beside the scenario.",
            optional=True,
        ),
        Field(
            "agents.workers",
            "Workers",
            "int",
            "" if agents.get("workers") is None else str(agents["workers"]),
            low=1,
            about="Processes; empty: as many as the hosts give.",
            optional=True,
        ),
    ]
    models = [
        one
        for name, model in spec["models"].items()
        if not model.get("mixture")
        for one in _model_fields(name, model)
    ]
    schema = params["schema"]
    return {
        "Run": general,
        "Parameters": _fields(
            schema, schema, params["values"], "params", "", params.get("about", {})
        ),
        "Models": models,
    }


def _model_fields(name: str, model: dict[str, Any]) -> list[Field]:
    found = []
    for key in _MODEL_KEYS:
        value = model.get(key)
        if key == "base_url" and isinstance(value, list):
            continue  # several: as the file says
        kind = {"temperature": "number", "max_tokens": "int", "backend": "choice"}.get(key, "text")
        found.append(
            Field(
                f"models.{name}.{key}",
                f"{name}: {key.replace('_', ' ')}",
                kind,
                "" if value is None else str(value),
                choices=list(_BACKENDS) if kind == "choice" else [],
                known=list(_BACKENDS) if kind == "choice" else [],
                low=0 if kind == "number" else 1 if kind == "int" else None,
                high=5 if kind == "number" else None,
                optional=key in ("model", "base_url"),
            )
        )
    return found


def _fields(
    whole: dict[str, Any],
    schema: dict[str, Any],
    values: Mapping[str, Any],
    key: str,
    label: str,
    about: Mapping[str, str],
) -> list[Field]:
    found: list[Field] = []
    for name, raw in schema.get("properties", {}).items():
        part, optional = _resolved(whole, raw)
        value = values.get(name)
        dotted, shown = f"{key}.{name}", f"{label}{name.replace('_', ' ')}"
        if part.get("properties") and isinstance(value, dict):
            found += _fields(whole, part, value, dotted, f"{shown}: ", {})
            continue
        kind = _kind(part)
        known = list(part.get("enum", ()))
        if kind == "bool" and optional:  # yes, no, or nothing: a box has but two states
            kind, known = "choice", [True, False]
        found.append(
            Field(
                dotted,
                shown[:1].upper() + shown[1:],
                kind,
                _written(value, kind),
                choices=[_written(one, "choice") for one in known],
                known=known,
                low=part.get("minimum", part.get("exclusiveMinimum")),
                high=part.get("maximum", part.get("exclusiveMaximum")),
                about=(about.get(name, "") or part.get("description", "")).replace("``", ""),
                optional=optional,
            )
        )
    return found


def _resolved(whole: dict[str, Any], part: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A part of a schema without references, and whether it may be null."""
    optional = False
    choices = part.get("anyOf")
    if choices:
        solid = [one for one in choices if one.get("type") != "null"]
        optional = len(solid) < len(choices)
        if len(solid) == 1:
            part = {**solid[0], **{k: v for k, v in part.items() if k != "anyOf"}}
    for _ in range(8):
        reference = part.get("$ref", "")
        if not reference.startswith("#/$defs/"):
            break
        part = {
            **whole.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {}),
            **{k: v for k, v in part.items() if k != "$ref"},
        }
    return part, optional


def _kind(part: dict[str, Any]) -> str:
    if part.get("enum"):
        return "choice"
    kinds = {"integer": "int", "number": "number", "boolean": "bool", "string": "text"}
    return kinds.get(str(part.get("type")), "yaml")


def _written(value: Any, kind: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if kind == "yaml":
        return yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return str(value)


def overrides_of(form: dict[str, list[Field]], given: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the scenario file, by dotted key; the form's fields keep what was given.

    Raises:
        InvalidInputError: an entry can't be read; it is named.
    """
    found: dict[str, Any] = {}
    changed: list[tuple[Field, str]] = []
    for one in (entry for section in form.values() for entry in section):
        if one.kind == "bool":
            text = "true" if given.get(one.key) else "false"
        else:
            text = str(given.get(one.key, one.value))
        if not _same(text, one.value):  # browsers send line ends as they like
            changed.append((one, text))
            one.value = text  # shown again, whatever is wrong with another
    for one, text in changed:
        found[one.key] = _read(one, text)
    # A back end takes what goes with it alone: what another one needed is left out.
    for key in [k for k in found if k.endswith(".backend")]:
        model = key.removesuffix(".backend")
        if found[key] != "openai":
            found[f"{model}.base_url"] = None
        if found[key] in ("embedded", "scripted"):
            found[f"{model}.model"] = None
    return found


async def read_yaml(text: str, what: str) -> Any:
    """What somebody wrote as YAML.

    Raises:
        InvalidInputError: it is none, or too long.
    """
    if len(text) > _LONGEST_TEXT:
        raise InvalidInputError(f"{what} may have {_LONGEST_TEXT:,} characters, not {len(text):,}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one takes seconds
    try:
        return await asyncio.to_thread(yaml.load, text, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{what} is no YAML: {' '.join(str(error).split())}") from None


def _same(one: str, other: str) -> bool:
    return one.replace("\r\n", "\n").strip() == other.replace("\r\n", "\n").strip()


def _read(one: Field, text: str) -> Any:
    if not text.strip() and (one.optional or one.kind == "yaml"):
        return None
    try:
        if one.kind == "choice":
            return one.known[one.choices.index(text)]
        if one.kind == "text":
            return text.replace("\r\n", "\n").strip()
        if one.kind == "int":
            return int(text)
        if one.kind == "number":
            return float(text)
        if one.kind == "bool":
            return text == "true"
        if one.kind == "yaml":
            return yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        if one.kind == "choice":
            raise InvalidInputError(
                f"{one.label}: must be one of {', '.join(one.choices)}, not {text!r}"
            ) from None
        what = {"int": "a whole number", "number": "a number"}.get(one.kind, "YAML")
        raise InvalidInputError(f"{one.label}: {text!r} is not {what}") from None
    return text
