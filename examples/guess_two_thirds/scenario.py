"""The guess game: pick a number; nearest to a target made of the average wins."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from typing import Annotated, Any, Literal

import prompts
from agents import Player
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from populace import Scenario, ScenarioError, each
from populace.environments import Group


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
        await self._make_groups()
        self.players = await self.population(Player, low, high, each(self.paths), name="players")
        self.rules = prompts.rules(
            players=self.agents,
            low=low,
            high=high,
            formula=prompts.formula(params.target.offset, params.target.ratio),
        )
        self.question = prompts.question(params.style)
        self.news: str | None = None

    async def _make_groups(self) -> None:
        """A group environment for each part of the players, within one for the whole game."""
        self.group_environments = []
        self.paths = [""] * self.agents
        if self.groups is None:
            return
        game = await self.environment(Group, "game", self.groups)
        start = 0
        for i in range(self.groups):
            # As even as can be; nobody is left over.
            size = self.agents // self.groups + (i < self.agents % self.groups)
            group = await game.child(Group, f"g{i + 1}", size)
            self.paths[start : start + size] = [group.path] * size
            self.group_environments.append(group)
            start += size

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
        if self.group_environments:
            await self._announce(n, winning)
        else:
            self.news = prompts.news(n, summary.mean, winning)

    async def _announce(self, n: int, winning: float) -> None:
        """Ask every group for its mean, and tell all groups all means, side by side."""
        groups = self.group_environments
        found = await asyncio.gather(*(group.summary(n) for group in groups))
        means = [row["mean"] for row in found]
        await asyncio.gather(
            *(
                group.announced(prompts.group_news(n, i, means, winning))
                for i, group in enumerate(groups)
            )
        )
        shown = ", ".join("-" if mean is None else f"{mean:.1f}" for mean in means)
        self.record(groups=shown)
