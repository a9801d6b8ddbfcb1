"""YAML files whose complaints name file, line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shared.errors import PopulaceError

Key = tuple[Any, ...]


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


class YamlFile:
    """A YAML file that holds a mapping, and where each key stands in it.

    Args:
        path: the file.
        what: what it describes, with its article, such as "a scenario".
        error: the kind of error to raise.

    Raises:
        PopulaceError: of that kind: the file can't be read, or isn't such a mapping.
    """

    def __init__(self, path: Path, what: str, error: type[PopulaceError]) -> None:
        self.path = path
        self._lines: dict[Key, int] = {}
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise error(f"{path}: there is no such file") from None
        except (OSError, UnicodeDecodeError) as failure:
            raise error(f"{path}: can't be read: {failure}") from None
        try:
            node = yaml.compose(text, Loader=_Loader)
            raw = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
        except yaml.MarkedYAMLError as failure:
            mark = failure.problem_mark or failure.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise error(f"{path}{line}: is not valid YAML: {failure.problem}") from None
        except yaml.YAMLError as failure:
            raise error(f"{path}: is not valid YAML: {failure}") from None
        if not isinstance(raw, dict):
            raise error(f"{path}:1: {what} is a mapping of keys such as 'name: ...'")
        self.raw: dict[str, Any] = raw
        """What the file holds."""
        self._note_lines(node, ())

    def _note_lines(self, node: Any, key: Key) -> None:
        if isinstance(node, yaml.MappingNode):
            for key_node, value_node in node.value:
                inner = (*key, key_node.value)
                self._lines[inner] = key_node.start_mark.line + 1
                self._note_lines(value_node, inner)
        elif isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                self._lines[(*key, i)] = item.start_mark.line + 1
                self._note_lines(item, (*key, i))

    def override(self, dotted: str, value: Any) -> None:
        """Replace a value, as said on the command line."""
        *outer, last = dotted.split(".")
        raw = self.raw
        for key in outer:
            inner = raw.get(key)
            if not isinstance(inner, dict):
                inner = raw[key] = {}
            raw = inner
        raw[last] = value
        self._lines[tuple(dotted.split("."))] = 0

    def where(self, key: Key) -> str:
        """``file:line`` of a key, or of the nearest one around it."""
        for length in range(len(key), 0, -1):
            line = self._lines.get(tuple(key[:length]))
            if line == 0:
                return f"{self.path}, as the command line changes it"
            if line is not None:
                return f"{self.path}:{line}"
        return f"{self.path}:1"
