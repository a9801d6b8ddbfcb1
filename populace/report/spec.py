"""What a scenario says of its answers, for the report."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shared.messages.scenario import Strict


class Reference(Strict):
    """A figure that others have published, or that theory gives, to be drawn beside ours."""

    label: str
    value: float
    kind: Literal["human", "paper", "theory"]
    source: str
    """Who says so, where."""
    round: int | None = None
    """The round that it is about; None: all."""
    of: Literal["mean", "median", "mark"] = "mean"
    """What it is to be compared with; "mark": the figure that the variable's mark names."""


class Share(Strict):
    """A part of all answers that is of interest, such as those that are 0."""

    label: str
    low: float
    high: float
    """Both ends belong to it."""


class Level(Strict):
    """A value that a theory expects of some, such as a step of reasoning."""

    label: str
    value: float


class Variable(Strict):
    """One thing that was asked."""

    name: str
    """A word of letters, digits and ``_``."""
    label: str
    """In words."""
    field: str | None = None
    """The key of the answers that holds it, where they are dicts; None: the answer's number."""
    method: str | None = None
    """The method whose answers hold it; None: all that were recorded."""
    kind: Literal["number", "category", "text"] = "number"
    categories: list[str] = Field(default_factory=list)
    """All that may be answered, in their order; default: what was."""
    low: float | None = None
    high: float | None = None
    """Ends of the scale; default: those of the answers."""
    mark: str | None = None
    """Name of the recorded figure that each round's histogram shows, such as the winning number."""
    mark_label: str = ""
    shares: list[Share] = Field(default_factory=list)
    levels: list[Level] = Field(default_factory=list)
    """Each answer is counted for the nearest of them, if that is near enough."""
    level_width: float = Field(default=0.0, ge=0)
    """How far from a level an answer may lie."""
    references: list[Reference] = Field(default_factory=list)

    @model_validator(mode="after")
    def _of_one_kind(self) -> Variable:
        numbers = self.shares or self.levels or self.references or self.mark
        if self.kind != "number" and numbers:
            raise ValueError(f"{self.name}: shares, levels, marks and references are for numbers")
        if not self.name.isidentifier():
            raise ValueError(f"{self.name!r}: a name is a word of letters, digits and '_'")
        return self


class ReportSpec(Strict):
    """What a report shows besides what it shows of every run.

    A scenario's method ``report`` gives one; it stands in the manifest of its runs.
    """

    about: str = ""
    """What was played, in a sentence or two."""
    variables: list[Variable] = Field(default_factory=list)
    """Default: the numbers that were answered."""
    by: list[str] = Field(default_factory=list)
    """Columns of the personas by which answers are divided; default: those of few values."""
    lines: list[str] = Field(default_factory=list)
    """Recorded figures to draw over the rounds; default: all that are numbers."""
    series: list[str] = Field(default_factory=list)
    """Recorded dicts of numbers (or lists), each of whose entries is a line over the rounds."""
