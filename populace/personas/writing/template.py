"""The meta prompt: template files, one per language, of which users may write their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from pydantic import Field, ValidationError, field_validator

from populace.personas.people import told
from populace.yaml_file import YamlFile
from shared.errors import InvalidInputError
from shared.messages.scenario import Strict
from shared.problems import first_problem

_HERE = Path(__file__).parent

_MAY_NAME = {
    "facts": {"name", "facts"},
    "facts_unnamed": {"facts"},
    "system": set(),
    "draft": {"facts", "angle"},
    "again": {"facts", "angle", "text", "problem"},
    "different": {"other"},
    "judge": {"facts", "text"},
    "named": {"name"},
}
"""Which placeholders each part may have."""


class TemplateError(InvalidInputError):
    """A template of persona prompts can't be used."""


class WritingTemplate(Strict):
    """What a model is told when it writes personas; ``$name`` and the like are put in."""

    language: str
    facts: str
    """What goes before each written background: name and row, so that they are always right."""
    facts_unnamed: str
    no_facts: str = "-"
    system: str
    draft: str
    again: str
    different: str
    judge: str
    named: str
    angles: list[str] = Field(default_factory=lambda: [""])
    """One of them goes into each person's prompt, so that backgrounds differ."""

    @field_validator(*_MAY_NAME)
    @classmethod
    def _known_placeholders(cls, value: str, info: Any) -> str:
        template = Template(value)
        if not template.is_valid():
            raise ValueError("has a '$' that begins no placeholder; write '$$' for the sign")
        unknown = sorted(set(template.get_identifiers()) - _MAY_NAME[info.field_name])
        if unknown:
            may = ", ".join(f"${n}" for n in sorted(_MAY_NAME[info.field_name])) or "none"
            raise ValueError(f"knows no ${unknown[0]} (it may have: {may})")
        return value

    @field_validator("angles")
    @classmethod
    def _some(cls, value: list[str]) -> list[str]:
        return value or [""]

    def fill(self, part: str, **values: str) -> str:
        """One part with its placeholders put in."""
        return Template(getattr(self, part)).substitute(values)

    def told(self, row: Mapping[str, Any]) -> str:
        """A row's attributes as one text: ``age: 34; education: high school``."""
        return told(row) or self.no_facts


def languages() -> list[str]:
    """The languages that come with Populace."""
    return sorted(path.stem for path in _HERE.glob("*.yaml"))


def load_template(name: str) -> WritingTemplate:
    """A template by its language ("en", "zh"), or by the path of a file.

    Raises:
        TemplateError: there is none, or it can't be used; one sentence with file, line and key.
    """
    path = _HERE / f"{name}.yaml" if name in languages() else Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise TemplateError(
            f"there is no template {name!r}: give a YAML file, or one of {', '.join(languages())}"
        )
    file = YamlFile(path, "a template", TemplateError)
    try:
        return WritingTemplate.model_validate(file.raw)
    except ValidationError as error:
        place = file.where(tuple(error.errors()[0]["loc"]))
        raise TemplateError(f"{place}: {first_problem(error, WritingTemplate)}") from None
