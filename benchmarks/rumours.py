"""A scenario of talk, in which what is lost or heard twice shows in sums.

Agents tell one another and a square, which all hear.
"""

from __future__ import annotations

from typing import Any

from populace import Agent, Environment, Scenario, event


class Square(Environment):
    """Where everybody calls out."""

    calls = 0

    @event
    def call_out(self, number: int) -> None:
        """Say a number to all who listen."""
        self.calls += 1


class Gossip(Agent):
    """Asks a model, tells its neighbour, calls out, and adds up what it hears."""

    def __init__(self) -> None:
        self.heard = 0
        self.told = 0
        self.known: list[int] = []

    async def attend(self) -> None:
        """Listen to the square; what is missed comes later."""
        await self.listen("square", "call_out", self.overhear, durable=True)

    async def talk(self, n: int) -> str:
        """Ask, tell, call out."""
        drawn = self.random.randrange(1000)
        text = await self.model.ask(f"Round {n} of {self.number}: {drawn}, {self.known}?")
        number = int(text, 16) % 1000
        # Nobody waits for it: those who wait for one another in a ring would wait for ever.
        self.agents[(self.number + 1 + drawn) % len(self.agents)].be_told(number)
        if self.number % 10 == 0:
            await self.environment("square").call_out(number)
        return text

    def be_told(self, number: int) -> int:
        """By another agent."""
        self.told += number
        return number

    async def overhear(self, told: Any) -> None:
        """From the square."""
        self.heard += told["number"]

    def tally(self) -> list[int]:
        """What it heard and was told so far; that is what it tells its model."""
        self.known = [self.heard, self.told]
        return self.known


class Rumours(Scenario):
    """A few rounds of talk."""

    async def setup(self) -> None:
        """Make them, and have them listen."""
        self.square = await self.environment(Square, "square")
        self.gossips = await self.population(Gossip, name="people")
        await self.gossips.options(record=False).attend()
        self.overheard = 0
        await self.listen("square", "call_out", self.overhear)

    def overhear(self, told: Any) -> None:
        """The scenario listens, too."""
        self.overheard += told["number"]

    async def round(self, n: int) -> None:
        """All count what the rounds before have brought, then talk."""
        sums = await self.gossips.tally()
        self.record(heard=sum(s[0] for s in sums), told=sum(s[1] for s in sums))
        self.record(overheard=self.overheard, calls=await self.square.get("calls"))
        await self.gossips.talk(n)
