"""Scenario files: YAML in, a checked scenario out; every complaint names file, line and key."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from populace.errors import ScenarioError
from populace.scenario import Scenario
from shared.code import CodeLoader
from shared.errors import CodeError
from shared.messages.scenario import ScenarioSpec
from shared.service import first_problem

Key = tuple[Any, ...]

_NOT_IN_A_FILE = ("folder", "run", "results_format")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class ScenarioFile:
    """A scenario file that was read: its specification, and where each key stands."""

    def __init__(self, path: Path, spec: ScenarioSpec, lines: dict[Key, int]) -> None:
        self.path = path
        self.spec = spec
        self._lines = lines

    def where(self, key: Key) -> str:
        """``file:line`` of a key, or of the nearest one around it."""
        return _where(self.path, self._lines, key)


def read_scenario(path: str | Path, overrides: dict[str, Any] | None = None) -> ScenarioFile:
    """Read and check a scenario file; its class is not imported yet.

    Args:
        path: the file.
        overrides: dotted keys to values that replace those of the file.

    Raises:
        ScenarioError: one sentence with file, line and key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ScenarioError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: can't be read: {error}") from None
    raw, lines = _parse(path, text)
    for key in _NOT_IN_A_FILE:
        if key in raw:
            raise ScenarioError(
                f"{_where(path, lines, (key,))}: {key}: is set by whoever publishes, not in a file"
            )
    for dotted, value in (overrides or {}).items():
        _set(raw, dotted.split("."), value)
        lines[tuple(dotted.split("."))] = 0  # said on the command line
    try:
        spec = ScenarioSpec.model_validate(raw)
    except ValidationError as error:
        place = _where(path, lines, tuple(error.errors()[0]["loc"]))
        raise ScenarioError(f"{place}: {first_problem(error)}") from None
    spec.folder = str(path.resolve().parent)
    return ScenarioFile(path, spec, lines)


def _parse(path: Path, text: str) -> tuple[dict[str, Any], dict[Key, int]]:
    try:
        node = yaml.compose(text, Loader=_Loader)
        raw = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ScenarioError(f"{path}{line}: is not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}: is not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ScenarioError(f"{path}:1: a scenario is a mapping of keys such as 'name: ...'")
    lines: dict[Key, int] = {}
    _note_lines(node, (), lines)
    return raw, lines


def _note_lines(node: Any, key: Key, lines: dict[Key, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            inner = (*key, key_node.value)
            lines[inner] = key_node.start_mark.line + 1
            _note_lines(value_node, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            lines[(*key, i)] = item.start_mark.line + 1
            _note_lines(item, (*key, i), lines)


def _where(path: Path, lines: dict[Key, int], key: Key) -> str:
    for length in range(len(key), 0, -1):
        line = lines.get(key[:length])
        if line == 0:
            return f"{path}, as the command line changes it"
        if line is not None:
            return f"{path}:{line}"
    return f"{path}:1"


def _set(raw: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = raw.get(key)
        if not isinstance(inner, dict):
            inner = raw[key] = {}
        raw = inner
    raw[keys[-1]] = value


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
        raise ScenarioError(f"{place}params.{first_problem(error)}") from None
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
