"""Walkers in a town with a market and a park."""

from __future__ import annotations

from agents import Walker
from pydantic import BaseModel, ConfigDict, Field

from populace import Event, Scenario
from populace.environments import Map


class Params(BaseModel):
    """What a scenario file may set."""

    model_config = ConfigDict(extra="forbid")

    size: float = Field(default=100.0, gt=0)
    stride: float = Field(default=10.0, gt=0)
    sight: float = Field(default=5.0, gt=0)


class Town(Scenario):
    """In each round everyone walks a little; who enters the market is counted."""

    Params = Params

    async def setup(self) -> None:
        """Draw the map, and let everyone arrive."""
        size = self.params.size
        self.town = await self.environment(Map, "town", size, size)
        await self.town.zone("market", 0.4 * size, 0.4 * size, 0.6 * size, 0.6 * size)
        await self.town.zone("park", 0.0, 0.0, 0.3 * size, 0.3 * size)
        self.entered = {"market": 0, "park": 0}
        await self.listen(self.town, "entered", self.count)
        self.walkers = await self.population(Walker, "town", size)
        await self.walkers.arrive()

    def count(self, event: Event) -> None:
        """Count who enters."""
        self.entered[event["zone"]] += 1

    async def round(self, n: int) -> None:
        """Everyone walks; then, with all in their places, everyone looks around."""
        await self.walkers.options(record=False).walk(self.params.stride)
        seen = await self.walkers.look(self.params.sight).reduce("mean")
        self.record(
            in_sight=seen.mean,
            at_the_market=len(await self.town.in_zone("market")),
            in_the_park=len(await self.town.in_zone("park")),
        )
