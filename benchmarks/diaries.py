"""A scenario in which everything follows from what was before: state that is lost shows.

What its agents ask and answer depends on all earlier rounds, on random numbers, on a model, and on
an environment that all share.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from populace import Agent, Environment, Scenario, readonly


class Params(BaseModel):
    """What a scenario file may say."""

    model_config = ConfigDict(extra="forbid")
    pause: float = 0.0
    """Seconds for which each agent waits, between its model and the ledger."""
    mark: str = ""
    """Goes into every prompt."""


class Diarist(Agent):
    """Writes a page a day."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.days = 0
        self.sum = 0

    async def write(self, mark: str) -> dict[str, Any]:
        """Ask a model, remember what it said, and enter a page."""
        self.days += 1
        drawn = self.random.randrange(1000)
        self.sum += drawn
        text = await self.model.ask(
            f"Day {self.days} of {self.number}: {drawn}, {self.sum}?{mark}", remember=True
        )
        if self.pause:
            await self.sleep(self.pause)
        page = await self.environment("ledger").note(self.number, drawn)
        return {"text": text, "days": self.days, "sum": self.sum, "page": page}


class Ledger(Environment):
    """Counts the pages of all."""

    def __init__(self) -> None:
        self.notes = 0
        self.total = 0
        self.pages: dict[str, int] = {}

    def note(self, who: int, drawn: int) -> int:
        """Enter a page; gives how many that one has."""
        self.notes += 1
        self.total += drawn
        page = self.pages[str(who)] = self.pages.get(str(who), 0) + 1
        return page

    @readonly
    def look(self) -> list[int]:
        """How many pages there are, and the sum of what was drawn."""
        return [self.notes, self.total]


class Diaries(Scenario):
    """A few days."""

    Params = Params

    async def setup(self) -> None:
        """Open the ledger, and make the diarists."""
        self.ledger = await self.environment(Ledger, "ledger")
        self.people = await self.population(Diarist, self.params.pause, name="people")
        self.history: list[int] = []

    async def round(self, n: int) -> None:
        """All write; the scenario keeps a diary of its own."""
        await self.people.write(self.params.mark)
        notes, total = await self.ledger.look()
        self.history.append(total + self.random.randrange(1000))
        self.record(notes=notes, history=self.history)


class Sleeper(Agent):
    """A dummy: waits, and draws a number; keeps how often it did."""

    def __init__(self) -> None:
        self.times = 0
        self.last = 0.0

    async def pick(self, wait: float) -> float:
        """Wait, and draw."""
        if wait:
            await self.sleep(wait)
        self.times += 1
        self.last = self.random.random() * 100
        return self.last


class Sleepers(Scenario):
    """Very many dummies."""

    Params = Params

    async def setup(self) -> None:
        """Make them."""
        self.people = await self.population(Sleeper, name="people")

    async def round(self, n: int) -> None:
        """All draw."""
        summary = await self.people.pick(self.params.pause).reduce("mean")
        self.record(mean=summary.mean)
