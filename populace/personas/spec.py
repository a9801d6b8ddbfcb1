"""Population files: what each may say, checked, with complaints that name file, line and key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from populace.yaml_file import YamlFile
from shared.errors import InvalidInputError
from shared.messages.scenario import Strict
from shared.problems import first_problem

TEMPLATES = Path(__file__).parent / "templates"
"""Population files that come with Populace."""

_TOLERANCE = 1e-6


class PopulationError(InvalidInputError):
    """A population file, or a table that it names, can't be used."""


def _check_shares(shares: dict[str, float], what: str) -> dict[str, float]:
    if not shares:
        raise ValueError(f"{what} need at least one category")
    for name, share in shares.items():
        if not (share >= 0 and math.isfinite(share)):
            raise ValueError(f"the share of {name!r} must be 0 or more, not {share}")
    total = math.fsum(shares.values())
    if abs(total - 1) > _TOLERANCE:
        raise ValueError(f"{what} must add up to 1, not {total:.6g}")
    return {name: share / total for name, share in shares.items()}


def _texts(value: Any) -> Any:
    """YAML reads ``yes`` and ``18`` as other than texts; as categories they are texts."""
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else value


class Histogram(Strict):
    """Numbers by class: even within each class."""

    edges: list[float]
    """Bounds of the classes, rising; one more than there are shares."""
    shares: list[float]

    @model_validator(mode="after")
    def _fitting(self) -> Histogram:
        if len(self.edges) != len(self.shares) + 1:
            raise ValueError(
                f"{len(self.shares)} shares need {len(self.shares) + 1} edges, not "
                f"{len(self.edges)}"
            )
        if any(b <= a for a, b in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError("the edges must rise")
        checked = _check_shares({str(i): s for i, s in enumerate(self.shares)}, "the shares")
        self.shares = list(checked.values())
        return self


class Draw(Strict):
    """How values are drawn: exactly one of ``shares``, ``distribution``, ``histogram``."""

    shares: dict[str, float] | None = None
    """Category to probability; drawn independently."""
    distribution: str | None = None
    """A distribution's name in scipy.stats, such as "norm"."""
    params: dict[str, float] = Field(default_factory=dict)
    """Its parameters, as scipy names them: loc, scale, a, ..."""
    histogram: Histogram | None = None
    min: float | None = None
    max: float | None = None
    round: int | None = Field(default=None, ge=-12, le=12)
    """Decimals; 0 for whole numbers."""

    @field_validator("shares", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return _texts(value)

    @field_validator("shares")
    @classmethod
    def _whole(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        return None if value is None else _check_shares(value, "the shares")

    @model_validator(mode="after")
    def _checked(self) -> Draw:
        self.check_draw()
        return self

    def kinds(self) -> list[str]:
        """Which ways of drawing are given."""
        return [k for k in ("shares", "distribution", "histogram") if getattr(self, k) is not None]

    def check_draw(self) -> None:
        """Complain of what doesn't go together."""
        if len(self.kinds()) > 1:
            raise ValueError(f"give one of {' and '.join(self.kinds())}, not both")
        if self.params and self.distribution is None:
            raise ValueError("params belong to a distribution")
        numeric = self.distribution is not None or self.histogram is not None
        if not numeric and (self.min, self.max, self.round) != (None, None, None):
            raise ValueError("min, max and round belong to numbers")
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError(f"min {self.min:g} must be below max {self.max:g}")
        if self.distribution is not None:
            frozen(self.distribution, self.params)


def frozen(name: str, params: dict[str, float]) -> Any:
    """The distribution with its parameters.

    Raises:
        ValueError: scipy.stats has none of that name, or the parameters don't fit it.
    """
    try:
        from scipy import stats
    except ImportError:
        raise ValueError("distributions need scipy: pip install 'populace[personas]'") from None
    found = getattr(stats, name, None)
    if not isinstance(found, (stats.rv_continuous, stats.rv_discrete)):
        raise ValueError(f"scipy.stats has no distribution named {name!r}")
    try:
        made = found(**params)
        median = float(made.ppf(0.5))
    except TypeError as error:
        raise ValueError(f"the parameters don't fit {name!r}: {error}") from None
    if not math.isfinite(median):
        raise ValueError(f"{name!r} does not exist with these parameters: {params}")
    return made


class Rule(Draw):
    """A row of a conditional table: what is drawn where its conditions hold."""

    when: dict[str, str | list[str]] = Field(default_factory=dict)
    """Attribute to a category, or a list of them; none: all the rest."""

    @field_validator("when", mode="before")
    @classmethod
    def _named_conditions(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: [str(x) for x in v] if isinstance(v, list) else str(v) for k, v in value.items()}

    @model_validator(mode="after")
    def _one_kind(self) -> Rule:
        if len(self.kinds()) != 1:
            raise ValueError("a rule needs shares, a distribution, or a histogram")
        return self


class Attribute(Draw):
    """One attribute: drawn, drawn given others, or derived from them."""

    quotas: dict[str, float] | None = None
    """Category to its share of the population, met exactly (largest remainder)."""
    table: list[Rule] | None = None
    """Rules for what is drawn, given others; the first that fits counts."""
    derive: str | None = None
    """An expression over attributes before it."""

    @field_validator("quotas", mode="before")
    @classmethod
    def _named_quotas(cls, value: Any) -> Any:
        return _texts(value)

    @field_validator("quotas")
    @classmethod
    def _whole_quotas(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        return None if value is None else _check_shares(value, "the quotas")

    def kinds(self) -> list[str]:
        """Which ways of making values are given."""
        more = [k for k in ("quotas", "table", "derive") if getattr(self, k) is not None]
        return [*super().kinds(), *more]

    @model_validator(mode="after")
    def _one_kind(self) -> Attribute:
        if len(self.kinds()) != 1:
            raise ValueError(
                "an attribute needs one of shares, quotas, distribution, histogram, table, derive"
            )
        if self.table is not None and not self.table:
            raise ValueError("the table needs at least one rule")
        return self


class Joint(Strict):
    """A joint table, or records of people (microdata), from a file; rows are drawn by weight."""

    file: str
    """CSV or Parquet, beside the population file."""
    columns: list[str] | None = None
    """Which columns become attributes; default: all but the weight."""
    weight: str | None = None
    """The column of weights or counts; default: every row weighs the same."""
    exact: bool = False
    """Whether each row comes exactly as often as its weight says (largest remainder)."""
    margins: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Attribute to category to share: the weights are fitted to these (raking)."""

    @field_validator("margins", mode="before")
    @classmethod
    def _named_margins(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: _texts(shares) for name, shares in value.items()}

    @field_validator("margins")
    @classmethod
    def _whole_margins(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        return {
            name: _check_shares(shares, f"the shares of the margin {name!r}")
            for name, shares in value.items()
        }


class Households(Strict):
    """People who live together: some attributes are the same for all of them."""

    sizes: dict[int, float]
    """Number of people to the share of households that have so many."""
    shared: list[str] = Field(default_factory=list)
    """Attributes that all members of a household have in common."""
    roles: list[str] = Field(default_factory=list)
    """What the first, second, ... member is; the last one is repeated."""

    @field_validator("sizes")
    @classmethod
    def _real(cls, value: dict[int, float]) -> dict[int, float]:
        if any(size < 1 for size in value):
            raise ValueError("a household has at least 1 member")
        _check_shares({str(k): v for k, v in value.items()}, "the shares of the sizes")
        return value


class PopulationSpec(Strict):
    """A population, as a file describes it."""

    name: str = Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")
    about: str = ""
    source: str = ""
    """Where the figures come from, and of which year they are."""
    size: int = Field(default=1000, ge=1, le=100_000_000)
    seed: int = 0
    joint: list[Joint] = Field(default_factory=list)
    attributes: dict[str, Attribute] = Field(default_factory=dict)
    constraints: list[str] = Field(default_factory=list)
    """Expressions that hold for everyone."""
    households: Households | None = None

    @field_validator("attributes")
    @classmethod
    def _identifiers(cls, value: dict[str, Attribute]) -> dict[str, Attribute]:
        for name in value:
            if not name.isidentifier() or name.startswith("_"):
                raise ValueError(f"{name!r} can't be an attribute's name; use letters and '_'")
        return value

    @model_validator(mode="after")
    def _not_empty(self) -> PopulationSpec:
        if not self.attributes and not self.joint:
            raise ValueError("a population needs attributes, or a joint table")
        return self


class PopulationFile:
    """A population file that was read and checked.

    Args:
        source: the file, or what a file would hold.
        overrides: ``size`` and ``seed``, as the command line says.

    Raises:
        PopulationError: one sentence with file, line and key.
    """

    def __init__(
        self, source: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None
    ) -> None:
        self._file: YamlFile | None = None
        if isinstance(source, dict):
            raw = {"name": "population", **source}
            self.folder: Path | None = None
            """Where the tables that it names lie; None: it may name none."""
        else:
            self._file = YamlFile(Path(source), "a population", PopulationError)
            raw = self._file.raw
            self.folder = Path(source).resolve().parent
        for key, value in (overrides or {}).items():
            if self._file is not None:
                self._file.override(key, value)
            else:
                raw[key] = value
        try:
            self.spec = PopulationSpec.model_validate(raw)
        except ValidationError as error:
            place = self._where(tuple(error.errors()[0]["loc"]))
            raise PopulationError(f"{place}: {first_problem(error, PopulationSpec)}") from None

    def _where(self, key: tuple[Any, ...]) -> str:
        return "the population" if self._file is None else self._file.where(key)

    def complain(self, key: tuple[Any, ...], text: str) -> PopulationError:
        """An error that names the place of a key."""
        dotted = ".".join(str(part) for part in key)
        return PopulationError(f"{self._where(key)}: {dotted}: {text}")
