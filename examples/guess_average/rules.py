"""The game itself: targets, and what a scenario file may set."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _fraction(value: Any) -> str:
    """A ratio as people write it: ``2/3``, ``0.51`` or ``51/100``."""
    try:
        ratio = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ValueError("must be a fraction such as 2/3, or a number") from None
    if not 0 < ratio <= 1:
        raise ValueError("must be above 0 and at most 1")
    return str(ratio)


class Target(BaseModel):
    """target = offset + ratio * mean."""

    model_config = ConfigDict(extra="forbid")

    offset: float = 0.0
    ratio: Annotated[str, BeforeValidator(_fraction)] = "2/3"

    @property
    def factor(self) -> float:
        """The ratio as a number."""
        return float(Fraction(self.ratio))

    def of(self, mean: float) -> float:
        """The target for a mean."""
        return self.offset + self.factor * mean

    def steps(self, start: float, count: int) -> list[float]:
        """What players of level 0, 1, 2, ... pick: each takes the others to be one level below.

        Nagel's steps (1995) for offset 0: start, start * ratio, start * ratio**2, ...
        """
        found = [start]
        for _ in range(count):
            found.append(self.of(found[-1]))
        return found

    @property
    def equilibrium(self) -> float | None:
        """The number that is its own target; None if the ratio is 1."""
        return self.offset / (1.0 - self.factor) if self.factor < 1.0 else None


class Players(BaseModel):
    """Who plays."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["llm", "level_k", "cognitive_hierarchy", "best_response"] = "llm"
    level: int = Field(default=1, ge=0, le=50)
    """Of ``level_k``."""
    tau: float = Field(default=1.5, gt=0, le=20)
    """Mean level of a ``cognitive_hierarchy`` (Poisson)."""


class Params(BaseModel):
    """What a scenario file may set."""

    model_config = ConfigDict(extra="forbid")

    target: Target = Target()
    range: tuple[float, float] = Field(default=(0.0, 100.0))
    style: Literal["at_once", "step_by_step"] = "at_once"
    """Whether players reply with the number alone, or think first."""
    notes: Literal["none", "rational", "adaptive"] = "none"
    """What the rules say of the other players' reason."""
    variation: bool = False
    """Whether players are told that this is a variation of a well-known game."""
    made_up_by: str | None = None
    """An attribute of the personas by which players are told how the population is made up."""
    one_expert: bool = False
    """Whether player 0 is told that it is the only expert in game theory, and the others too."""
    model: str = "default"
    """Which of the run's models players ask."""
    group_models: list[str] = Field(default_factory=list)
    """With groups: the models that their members ask, in turn; default: ``model``."""
    near: float = Field(default=0.5, gt=0)
    """How near to the winning number one must be to be counted as a winner."""
    players: Players = Players()

    @model_validator(mode="after")
    def _ordered(self) -> Params:
        if self.range[0] >= self.range[1]:
            raise ValueError("range must be [low, high] with low below high")
        return self
