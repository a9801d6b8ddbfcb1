"""Environments for tests, and agents that act in them; workers import them by path."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from populace import Agent, Environment, Event, event, readonly


class Table(Environment):
    winning: float | None = None

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.log: list[Any] = []

    @event
    def announce(self, winning: float) -> str:
        self.winning = winning
        return f"winning is {winning}"

    def note(self, what: Any) -> int:
        self.log.append(what)
        return len(self.log)

    def fail(self, what: Any) -> None:
        self.log.append(what)
        raise ValueError("no such luck")

    def draw(self) -> float:
        return self.random.random()

    def seen(self) -> list[Any]:
        return self.log

    def pid(self) -> int:
        return os.getpid()

    async def slowly(self, what: Any, seconds: float) -> int:
        """Waits for time, so it can't be done again."""
        self.log.append(["begin", what])
        await self.sleep(seconds)
        self.log.append(["end", what])
        return len(self.log)

    @readonly
    def peek(self) -> int:
        return self.count

    async def meet(self, who: Any, size: int) -> int:
        """All who come wait for one another."""
        self.log.append(who)
        await self.until(lambda: len(self.log) >= size)
        return len(self.log)

    def unsendable(self) -> Any:
        return object()

    @event
    def trigger(self, number: int) -> int:
        return number


class Room(Environment):
    def __init__(self) -> None:
        self.said: list[str] = []

    @event
    def say(self, text: str) -> None:
        self.said.append(text)

    def heard(self) -> list[str]:
        return self.said

    async def open(self, name: str) -> str:
        made = await self.child(Room, name)
        return repr(made)

    async def tell_all(self, text: str) -> int:
        """Down to every room within, side by side."""
        children = self.children.values()
        counts = await asyncio.gather(*(child.tell_all(text) for child in children))
        self.said.append(text)
        return 1 + sum(counts)

    def where(self) -> tuple[str, str | None]:
        return self.path, None if self.parent is None else self.parent._label


class Actor(Agent):
    def __init__(self) -> None:
        self.events: list[tuple[str, str, Any]] = []

    async def add(self, path: str, times: int) -> None:
        table = self.environment(path)
        await asyncio.gather(*(table.increment("count") for _ in range(times)))

    async def add_slowly(self, path: str, times: int) -> int:
        table = self.environment(path)
        for _ in range(times):
            await table.increment("count")
        return times

    async def hear(self, path: str, name: str = "*", **more: Any) -> None:
        await self.listen(path, name, self.on_event, **more)

    def on_event(self, told: Event) -> None:
        self.events.append((told.name, told.path, told.arguments))

    def heard(self) -> list[tuple[str, str, Any]]:
        return self.events

    async def hear_and_raise(self, path: str) -> None:
        await self.listen(path, "announce", self.on_trouble)

    def on_trouble(self, told: Event) -> None:
        raise RuntimeError(f"I won't hear of {told['winning']}")

    async def echo_for_ever(self, path: str) -> None:
        await self.listen(path, "trigger", self.on_trigger)

    async def on_trigger(self, told: Event) -> None:
        self.events.append((told.name, told.path, told.arguments))
        await self.environment(told.path).trigger(told["number"] + 1)

    async def hear_once(self, path: str) -> None:
        self.listener = await self.listen(path, "announce", self.on_first)

    async def on_first(self, told: Event) -> None:
        self.events.append((told.name, told.path, told.arguments))
        await self.listener.remove()

    async def say(self, path: str, text: str) -> None:
        await self.environment(path).say(text)

    async def meet(self, path: str, size: int) -> int:
        return await self.environment(path).meet(self.number, size)

    async def note(self, path: str) -> int:
        return await self.environment(path).note(self.number)


class Queue(Environment):
    """Who comes first, is served first."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def take(self, who: int) -> int:
        self.order.append(who)
        return len(self.order)

    def taken(self) -> list[int]:
        return self.order


class Customer(Agent):
    async def shop(self, path: str, times: int) -> list[int]:
        """Comes in its own time, some never, some more often than others."""
        places = []
        for _ in range(self.random.randrange(times + 1)):
            # As long as the clock says: another order at each run, were they not put in order.
            await asyncio.sleep((time.perf_counter_ns() % 7) / 1000)
            places.append(await self.environment(path).take(self.number))
        return places

    async def shop_together(self, path: str, friend: int) -> int:
        if friend >= 0:
            return await self.agents[friend].shop_together(path, -1)
        return await self.environment(path).take(self.number)


class Ledger(Environment):
    """Does all that makes doing it again difficult."""

    def __init__(self) -> None:
        self.n = 0
        self.grants = 0
        self.x = 0
        self.big = b""
        self.heard: list[Any] = []
        self.clients: list[Any] = []

    def inc(self, by: int = 1) -> int:
        self.n += by
        return self.n

    def put(self, big: bytes) -> int:
        self.big = big
        return len(big)

    def size(self) -> int:
        return len(self.big)

    def register(self, who: Any) -> list[Any]:
        self.clients.append(who)
        return self.clients

    def notify(self, text: str) -> int:
        """Calls agents, and waits for none of them."""
        for client in self.clients:
            client.take(text)
        return len(self.clients)

    async def forward(self, path: str) -> int:
        """Calls another environment, and waits for it."""
        return await self.environment(path).inc()

    def forward_blindly(self, path: str) -> None:
        self.environment(path).inc()

    async def wait_for(self, x: int) -> int:
        await self.until(lambda: self.x == x)
        self.grants += 1
        return self.grants

    def set_x(self, x: int) -> None:
        self.x = x

    async def set_slowly(self, x: int) -> None:
        await self.sleep(0.01)
        self.x = x

    async def inc_slowly(self, by: int, seconds: float) -> int:
        self.n += by
        await self.sleep(seconds)
        return self.n

    @readonly
    def look(self) -> float:
        return self.random.random()

    @readonly
    def tell_secretly(self) -> None:
        self.emit("secret")

    def draw(self) -> float:
        return self.random.random()

    async def hear(self, path: str) -> None:
        await self.listen(path, "announce", self.on_announce)

    def on_announce(self, told: Event) -> None:
        self.heard.append(told["winning"])

    def all(self) -> dict[str, Any]:
        return {"n": self.n, "grants": self.grants, "x": self.x, "heard": list(self.heard)}

    def pid(self) -> int:
        return os.getpid()


class Client(Agent):
    def __init__(self, path: str = "", task: bool = False) -> None:
        self.texts: list[str] = []
        if path:
            self.environment(path).register(self.number)

    def take(self, text: str) -> None:
        self.texts.append(text)

    def taken(self) -> list[str]:
        return self.texts

    def register_in_a_task(self, path: str) -> None:
        async def register() -> None:
            await self.environment(path).register(self.number)

        self.task = asyncio.ensure_future(register())

    async def hear(self, path: str) -> None:
        await self.listen(path, "announce", self.on_announce)

    async def on_announce(self, told: Event) -> None:
        await self.environment("ledger").put(b"heard")
        await asyncio.sleep(told["winning"])
        await self.environment("ledger").inc()

    async def inc(self) -> int:
        return await self.environment("ledger").inc()
