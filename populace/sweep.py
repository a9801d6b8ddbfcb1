"""Sweeps: one scenario played many times, with other seeds and parameters."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from populace.errors import ScenarioError
from populace.scenario_file import ScenarioFile, read_scenario
from populace.yaml_file import YamlFile
from shared.ids import is_token
from shared.messages.scenario import Budget, Strict
from shared.problems import first_problem

_LONGEST = 40


class SweepSpec(Strict):
    """What a sweep's file holds."""

    name: str
    """Of the sweep, and the beginning of its runs' names."""
    scenario: str
    """A scenario file, beside this one."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of the scenario that all runs have otherwise, such as ``agents.count: 40``."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Keys and the values that each takes; every combination is a run."""
    runs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Variants by name, each with the keys that it has otherwise; each is played over the grid."""
    at_once: int = Field(default=2, ge=1, le=64)
    """Runs that are played side by side."""
    budget: Budget | None = None
    """What all runs may spend together."""

    @field_validator("name")
    @classmethod
    def _name_is_token(cls, value: str) -> str:
        if not is_token(value) or len(value) > _LONGEST:
            raise ValueError(f"must be 1 to {_LONGEST} characters of A-Z, a-z, 0-9, '_' and '-'")
        return value

    @model_validator(mode="after")
    def _something_varies(self) -> SweepSpec:
        if not self.grid and not self.runs:
            raise ValueError("needs a grid, or runs: what differs from one run to the next")
        for key, values in self.grid.items():
            if not values:
                raise ValueError(f"grid.{key} has no values")
        return self


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    """The run's name; the same values give the same name, so that a sweep can go on."""
    variant: str
    values: dict[str, Any]
    """What differs from the others, by key."""
    cell: dict[str, Any]
    """Of these, what the grid gives."""
    file: ScenarioFile


def read_sweep(
    path: Path, overrides: dict[str, Any] | None = None, only: list[str] | None = None
) -> tuple[SweepSpec, list[SweepRun]]:
    """Read a sweep's file, and all its runs' scenarios.

    Args:
        path: the file.
        overrides: keys that all runs have otherwise, as on a command line; they go last.
        only: variants to play, by name; default: all.

    Raises:
        ScenarioError: one sentence with file, line and key.
    """
    file = YamlFile(path, "a sweep", ScenarioError)
    try:
        spec = SweepSpec.model_validate(file.raw)
    except ValidationError as error:
        place = file.where(tuple(error.errors()[0]["loc"]))
        raise ScenarioError(f"{place}: {first_problem(error, SweepSpec)}") from None
    unknown = sorted(set(only or ()) - set(spec.runs))
    if unknown:
        known = ", ".join(spec.runs) or "none"
        raise ScenarioError(f"{path}: there is no run named {unknown[0]!r} (there are: {known})")
    varied = {*spec.grid, *(key for own in spec.runs.values() for key in own)}
    for key in overrides or {}:
        if key in varied:
            raise ScenarioError(
                f"{path}: {key} is what the runs of this sweep differ in; it can't be set for all"
            )
    base = path.parent / spec.scenario
    found: list[SweepRun] = []
    for variant, own in (spec.runs or {"": {}}).items():
        if only and variant not in only:
            continue
        for cells in itertools.product(*spec.grid.values()):
            values = dict(zip(spec.grid, cells, strict=True))
            keys = {**spec.set, **own, **values, **(overrides or {})}
            if spec.budget is not None:
                keys["budget"] = {
                    **spec.budget.model_dump(exclude_none=True),
                    "account": f"sweep-{spec.name}",
                }
            try:
                scenario = read_scenario(base, keys)
            except ScenarioError as error:
                where = ", ".join(f"{k}={v!r}" for k, v in {**own, **values}.items())
                raise ScenarioError(f"{path}: {variant or 'a run'} ({where}): {error}") from None
            told = json.dumps(
                scenario.spec.model_dump(mode="json", exclude={"folder", "budget"}), sort_keys=True
            )
            digest = hashlib.blake2b(told.encode(), digest_size=5).hexdigest()
            stem = f"{spec.name}-{variant}" if is_token(variant or "-") else spec.name
            name = f"{stem[:_LONGEST].rstrip('-')}-{digest}"
            scenario.spec.run = name
            shown = {**own, **values}
            found.append(SweepRun(name, variant, shown, values, scenario))
    twice = [name for name, count in Counter(run.name for run in found).items() if count > 1]
    if twice:
        raise ScenarioError(f"{path}: two runs of the sweep are the same ({twice[0]})")
    return spec, found
