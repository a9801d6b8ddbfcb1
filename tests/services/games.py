"""Scenarios for tests; the director's processes import them by path."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from populace import Agent, Environment, Failure, Scenario, event


class Member(Agent):
    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.times = 0

    async def act(self, n: int) -> float:
        self.times += 1
        if self.pause:
            await self.sleep(self.pause * (1 + self.number % 4))
        if self.number % 10 == 3:
            raise Failure("unlucky", f"number {self.number}")
        return float(self.number * n)

    def broken(self) -> float:
        return {}["nothing"]

    async def say(self) -> dict[str, object]:
        answer = await self.model.ask("Pick a number.")
        return {"text": answer, "round": self.round}


class Params(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pause: float = 0.0
    raises: str = ""
    marker: str = ""
    ask: bool = False


class Game(Scenario):
    Params = Params

    async def setup(self) -> None:
        if self.params.raises == "setup":
            raise RuntimeError("no board")
        self.members = await self.population(Member, self.params.pause, name="members")

    async def round(self, n: int) -> None:
        if self.params.raises == "half":
            self.record(said="half \ud83d")
            if n == 2:
                raise RuntimeError("half \ud83d")
            return
        if self.params.raises == f"round {n}":
            raise RuntimeError("the board fell over")
        if self.params.ask:
            await self.members.say()
            return
        if self.params.raises == "block":
            Path(self.params.marker).touch()
            time.sleep(100)
        if self.params.raises == "agents":
            await self.members.broken().reduce("mean")
            return
        if self.params.raises == "twice":
            first, second = self.members.act(1), self.members.act(2)
            await first
            await second.reduce("mean")
            return
        summary = await self.members.act(n).reduce("mean")
        self.record(mean=summary.mean)

    async def finish(self) -> None:
        await asyncio.sleep(0)


class Resident(Agent):
    """Tells who it is, and what its prompt holds."""

    def who(self) -> dict[str, Any]:
        assert self.persona is not None
        return {"number": float(self.persona.age), "education": self.persona["education"]}

    async def say(self) -> str:
        return await self.model.ask("Who are you?", system="Answer in one word.")


class Town(Scenario):
    async def setup(self) -> None:
        self.residents = await self.population(Resident)

    async def round(self, n: int) -> None:
        summary = await self.residents.who().reduce("mean", field="number")
        self.record(mean=summary.mean)


class Asker(Agent):
    """Asks its model, and passes on what it says."""

    async def say(self) -> str:
        return await self.model.ask("Say something.")

    async def say_at_length(self, letters: int) -> str:
        return await self.model.ask("word " * (letters // 5))


class Locker(Agent):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def act(self) -> int:
        return 1


class Locked(Scenario):
    """Its agents hold what can't be written down."""

    async def setup(self) -> None:
        self.lockers = await self.population(Locker, name="lockers")

    async def round(self, n: int) -> None:
        await self.lockers.act()


class Fragile(Agent):
    def act(self, n: int) -> int:
        if n == 2 and self.number == 3:
            os._exit(9)
        return n


class Suicidal(Scenario):
    """One of its agents ends its process, whoever plays it."""

    async def setup(self) -> None:
        self.people = await self.population(Fragile)

    async def round(self, n: int) -> None:
        await self.people.act(n)


class Clock(Agent):
    """What it answers can't be had again."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    async def look(self) -> float:
        await self.sleep(0.02 * self.number)
        self.seen.append(time.time())
        return self.seen[-1]

    async def ask_neighbour(self) -> float:
        await self.sleep(0.01 * self.number)
        if self.number % 2:
            return await self.agents[self.number - 1].last()
        return self.seen[-1]

    def last(self) -> float:
        return self.seen[-1]

    def all(self) -> list[float]:
        return self.seen


class Clocks(Scenario):
    async def setup(self) -> None:
        self.clocks = await self.population(Clock, name="clocks")

    async def round(self, n: int) -> None:
        first = await self.clocks.look()
        if n == 1:
            return
        await self.clocks.ask_neighbour()
        seen = await self.clocks.options(record=False).all()
        self.record(
            once=all(len(times) == n for times in seen.values),
            same=[times[-1] for times in seen.values] == list(first.values),
        )


class Tower(Environment):
    heard = 0

    @event
    def ring(self, times: int) -> None:
        pass


class Ringer(Agent):
    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.heard = 0

    async def pull(self, n: int) -> int:
        if self.pause:
            await self.sleep(self.pause * self.number)
        await self.environment("tower").ring(n)
        return n

    async def attend(self) -> None:
        await self.listen("tower", "ring", self.hear)

    async def hear(self, event: Any) -> None:
        self.heard += 1
        await self.environment("tower").get("heard")
        await self.environment("tower").increment("heard")

    def tally(self) -> int:
        return self.heard


class Bell(Scenario):
    Params = Params

    async def setup(self) -> None:
        self.tower = await self.environment(Tower, "tower")
        self.ringers = await self.population(Ringer, self.params.pause)
        self.told = 0
        if self.params.pause:
            await self.ringers.attend()
            await self.listen("tower", "ring", self.hear)

    def hear(self, event: Any) -> None:
        self.told += 1

    async def round(self, n: int) -> None:
        # What the rounds before have led to is all there by now.
        counts = await self.ringers.options(record=False).tally()
        self.record(heard=list(counts), told=self.told, total=await self.tower.get("heard"))
        await self.ringers.pull(n)


class Singer(Agent):
    async def sing(self, heard: str) -> str:
        return await self.model.ask(f"They sang: {heard}. And you?", model="both")


class Chorus(Scenario):
    """Each hears what all have sung."""

    async def setup(self) -> None:
        self.singers = await self.population(Singer)
        self.heard = "nothing"

    async def round(self, n: int) -> None:
        sung = await self.singers.sing(self.heard)
        self.heard = " ".join(sung)
