"""Deliberation in small rooms: a vote, a discussion in turn with a moderator, a vote again."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import Counting, Member, Moderator, Steady
from pydantic import BaseModel, ConfigDict, Field

from populace import Scenario
from populace.report import ReportSpec, Variable


class Params(BaseModel):
    """What a scenario file may set."""

    model_config = ConfigDict(extra="forbid")

    proposal: str = "The town should close its centre to cars on Sundays."
    room: int = Field(default=5, ge=2, le=20)
    """Members of a room."""
    turns: int = Field(default=1, ge=1, le=5)
    """How often each speaks."""
    members: Literal["llm", "steady"] = "llm"


class Deliberation(Scenario):
    """Round 1 is a vote before any discussion; each later one discusses, then votes."""

    Params = Params

    async def setup(self) -> None:
        """Find the members, and a moderator for each room."""
        llm = self.params.members == "llm"
        self.members = await self.population(Member if llm else Steady, name="members")
        self.rooms = [
            list(range(start, min(start + self.params.room, self.agents)))
            for start in range(0, self.agents, self.params.room)
        ]
        if len(self.rooms) > 1 and len(self.rooms[-1]) == 1:
            alone = self.rooms.pop()  # nobody sits alone
            self.rooms[-1] += alone
        self.moderators = await self.population(
            Moderator if llm else Counting, count=len(self.rooms), name="moderators", personas=""
        )

    async def round(self, n: int) -> None:
        """Discuss, unless it is the first round; then vote."""
        if n > 1:
            await asyncio.gather(*(self._discuss(i, room, n) for i, room in enumerate(self.rooms)))
        votes = await self.members.vote(self.params.proposal)
        good = [v["support"] for v in votes.values if v is not None]
        apart = [
            max(found) - min(found)
            for room in self.rooms
            if len(found := [votes.values[i]["support"] for i in room if votes.values[i]]) > 1
        ]
        self.record(
            mean=sum(good) / len(good) if good else None,
            range_within_rooms=sum(apart) / len(apart) if apart else None,
        )

    async def _discuss(self, number: int, room: list[int], n: int) -> None:
        """One room's discussion, as a graph: who speaks waits for all who spoke before.

        What was said are placeholders: it goes from worker to worker, and nothing waits here until
        the moderator has summed up.
        """
        proposal = self.params.proposal
        order = self.random_order(number, room, n)
        said: list[Any] = []
        for _ in range(self.params.turns):
            for member in order:
                said.append(self.members[member].speak(proposal, list(said)))
        summary = self.moderators[number].sum_up(proposal, said)
        await asyncio.gather(*(self.members[member].listen_to(summary) for member in room))

    def random_order(self, number: int, room: list[int], n: int) -> list[int]:
        """Who speaks when: another order in each round, that follows from the seed."""
        turn = (self.seed + 7 * number + n) % len(room)
        return [*room[turn:], *room[:turn]]

    def report(self) -> ReportSpec:
        """Support, before and after."""
        return ReportSpec(
            about=(
                f'"{self.params.proposal}" Votes from 0 to 10, in round 1 before any discussion, '
                f"then after discussions in rooms of {self.params.room} with a moderator."
            ),
            variables=[
                Variable(
                    name="support", label="support", method="vote", field="support", low=0, high=10
                )
            ],
            lines=["mean", "range_within_rooms"],
        )
