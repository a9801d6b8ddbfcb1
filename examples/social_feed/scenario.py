"""A small-world network, and what a feed's ranking does to the most liked post."""

from __future__ import annotations

from typing import Literal

from agents import Member
from pydantic import BaseModel, ConfigDict

from populace import Scenario
from populace.environments import SocialGraph


class Params(BaseModel):
    """What a scenario file may set."""

    model_config = ConfigDict(extra="forbid")

    ranking: Literal["recent", "popular", "mixed"] = "mixed"


class Network(Scenario):
    """Each round is a day."""

    Params = Params

    async def setup(self) -> None:
        """Make the members, and have them follow one another."""
        self.members = await self.population(Member, name="member")
        self.net = await self.environment(SocialGraph, "net", order="agent", members=self.members)
        names = [f"member/{i}" for i in range(self.agents)]
        await self.net.connect(names, "watts_strogatz", 6)

    async def round(self, n: int) -> None:
        """Everyone spends a day."""
        read = await self.members.day(self.params.ranking).reduce("mean")
        found = await self.net.measures()
        self.record(posts=found["posts"], read=read.mean, clustering=round(found["clustering"], 3))
