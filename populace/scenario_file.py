"""Scenario files: YAML in, a checked scenario out; every complaint names file, line and key."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from populace.errors import ScenarioError
from populace.scenario import Scenario
from populace.yaml_file import YamlFile
from shared.code import CodeLoader
from shared.errors import CodeError
from shared.messages.scenario import ScenarioSpec
from shared.problems import first_problem

_NOT_IN_A_FILE = ("folder", "run", "results_format", "replay")
_OF_A_SWEEP = ("grid", "runs")


class ScenarioFile:
    """A scenario file that was read: its specification, and where each key stands."""

    def __init__(self, file: YamlFile, spec: ScenarioSpec) -> None:
        self.path = file.path
        self.spec = spec
        self.where = file.where
        """``file:line`` of a key, or of the nearest one around it."""


def read_scenario(path: str | Path, overrides: dict[str, Any] | None = None) -> ScenarioFile:
    """Read and check a scenario file; its class is not imported yet.

    Args:
        path: the file.
        overrides: dotted keys to values that replace those of the file.

    Raises:
        ScenarioError: one sentence with file, line and key.
    """
    path = Path(path)
    file = YamlFile(path, "a scenario", ScenarioError)
    for key in _NOT_IN_A_FILE:
        if key in file.raw:
            raise ScenarioError(
                f"{file.where((key,))}: {key}: is set by whoever publishes, not in a file"
            )
    for key in _OF_A_SWEEP:
        if key in file.raw:
            raise ScenarioError(
                f"{file.where((key,))}: {key}: is for sweeps; play one by 'populace sweep {path}'"
            )
    for dotted, value in (overrides or {}).items():
        file.override(dotted, value)
    try:
        spec = ScenarioSpec.model_validate(file.raw)
    except ValidationError as error:
        place = file.where(tuple(error.errors()[0]["loc"]))
        raise ScenarioError(f"{place}: {first_problem(error, ScenarioSpec)}") from None
    spec.folder = str(path.resolve().parent)
    return ScenarioFile(file, spec)


def load_class(
    spec: ScenarioSpec, loader: CodeLoader, file: ScenarioFile | None = None
) -> tuple[type[Scenario], BaseModel]:
    """Import a scenario's class and check its parameters.

    Args:
        spec: the scenario.
        loader: finds the class.
        file: where the scenario was read, so that complaints can name the line.

    Raises:
        ScenarioError: the class can't be had, or the parameters don't fit it.
    """
    place = f"{file.where(('scenario',))}: " if file else ""
    try:
        if spec.folder is not None and not loader.is_installed(spec.scenario):
            loader.add_folder(spec.folder)
        cls: type[Scenario] = loader.load(spec.scenario, Scenario)
    except CodeError as error:
        raise ScenarioError(f"{place}scenario: {error}") from None
    if cls.round is Scenario.round or not inspect.iscoroutinefunction(cls.round):
        raise ScenarioError(
            f"{place}scenario: {spec.scenario} needs a method  async def round(self, n)"
        )
    try:
        params = cls.Params.model_validate(spec.params)
    except ValidationError as error:
        key = ("params", *error.errors()[0]["loc"])
        place = f"{file.where(key)}: " if file else ""
        raise ScenarioError(f"{place}params.{first_problem(error, cls.Params)}") from None
    return cls, params


def overrides_from(pairs: list[str]) -> dict[str, Any]:
    """``key=value`` pairs of a command line; values are read as YAML.

    Raises:
        ScenarioError: a pair has no ``=``, or its value isn't YAML.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ScenarioError(f"--set {pair!r}: write it as key=value, such as rounds=3")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ScenarioError(f"--set {pair!r}: the value can't be read") from None
    return found
