"""The guess game: pick a number; nearest to a target made of the average wins."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Literal

import prompts
from agents import Player
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from populace import Scenario, ScenarioError


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

    def of(self, mean: float) -> float:
        """The target for a mean."""
        return self.offset + float(Fraction(self.ratio)) * mean


class Params(BaseModel):
    """What a scenario file may set."""

    model_config = ConfigDict(extra="forbid")

    target: Target = Target()
    range: tuple[float, float] = Field(default=(0.0, 100.0))
    style: Literal["at_once", "step_by_step"] = "at_once"

    @model_validator(mode="after")
    def _ordered(self) -> Params:
        if self.range[0] >= self.range[1]:
            raise ValueError("range must be [low, high] with low below high")
        return self


class GuessTwoThirds(Scenario):
    """Every player guesses; the winning number is announced before the next round."""

    Params = Params

    async def setup(self) -> None:
        """Make the players."""
        params = self.params
        low, high = params.range
        self.players = await self.population(Player, low, high, name="players")
        self.rules = prompts.rules(
            players=self.agents,
            low=low,
            high=high,
            formula=prompts.formula(params.target.offset, params.target.ratio),
        )
        self.question = prompts.question(params.style)
        self.news: str | None = None

    async def round(self, n: int) -> None:
        """One round: guesses, their mean, the winning number."""
        guesses = self.players.guess(self.rules, self.question, self.news)
        summary = await guesses.reduce("mean", field="number")
        if summary.mean is None:
            raise ScenarioError(
                f"no answer of round {n} could be used; the first failure was "
                f"{summary.failure_example}"
            )
        winning = self.params.target.of(summary.mean)
        self.record(parsed=summary.numbers, mean=summary.mean, winning=winning)
        self.news = prompts.news(n, summary.mean, winning)
