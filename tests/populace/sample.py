"""Agents for tests; workers import them by path."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from typing import Any

from pydantic import BaseModel, Field

from populace import Agent, AgentError, AgentProxy, Failure, Placeholder

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


class Vote(BaseModel):
    choice: str
    weight: float = 1.0


class Unsendable:
    pass


class Echo(Agent):
    """The paper's figure 2: adds its name to what it is told, after a while."""

    def __init__(self, name: str, pause: float = 0.0) -> None:
        self.name = name
        self.pause = pause
        self.started = self.ended = 0.0

    async def reply(self, message: str) -> str:
        self.started = time.time()
        await self.sleep(self.pause)
        self.ended = time.time()
        return f"{message}>{self.name}"

    def span(self) -> tuple[float, float]:
        return self.started, self.ended

    async def peek(self, message: Placeholder[str]) -> tuple[float, str]:
        """Starts though the message isn't there yet; says when."""
        began = time.time()
        text = await message
        return began, f"{text}!"

    def joined(self, parts: list[Any], more: dict[str, Any]) -> str:
        return "+".join([*parts, *(more["deep"])])


class Counter(Agent):
    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.order: list[int] = []

    async def add(self, by: int = 1) -> int:
        held = self.count
        await asyncio.sleep(0)
        await self.sleep(0.001)
        self.count = held + by
        return self.count

    def note(self, number: int) -> None:
        self.order.append(number)

    async def note_slowly(self, number: int) -> None:
        await self.sleep(0.02 if number % 3 == 0 else 0.0)
        self.order.append(number)

    def seen(self) -> list[int]:
        return self.order

    def total(self) -> int:
        return self.count

    async def forever(self, witness: Any = None) -> None:
        if witness is not None:
            await witness.note(0)
        try:
            await asyncio.Event().wait()
        finally:
            self.order.append(-1)


class Odd(Agent):
    """Goes wrong in every way."""

    def __init__(self, broken: bool = False) -> None:
        if broken:
            raise ValueError("born broken")

    def plain(self) -> None:
        raise KeyError("plain trouble")

    async def later(self) -> None:
        await self.sleep(0.001)
        raise RuntimeError("later trouble")

    def failing(self) -> None:
        raise Failure("no_opinion", "I would rather not say")

    def unsendable(self) -> Any:
        return Unsendable()

    def leave(self) -> None:
        raise SystemExit(3)

    def huge(self, size: int) -> bytes:
        return b"x" * size

    def size_of(self, data: bytes) -> int:
        return len(data)

    def same(self, data: bytes) -> bytes:
        return data

    def die(self) -> None:
        os._exit(9)

    def half(self, number: int) -> float:
        if number % 2:
            raise Failure("odd", f"{number} is odd")
        return number / 2

    async def ask(self, other: AgentProxy) -> Any:
        return await other.later()

    def _secret(self) -> str:
        return "hidden"


class Ring(Agent):
    """Calls the next one, which calls the next one."""

    def __init__(self) -> None:
        self.visits = 0

    def set(self, following: AgentProxy) -> None:
        self.following = following

    async def go(self, hops: int) -> list[str]:
        self.visits += 1
        if hops == 0:
            return [self.id]
        await self.sleep(0.005)
        return [self.id, *await self.following.go(hops - 1)]

    async def ask_next(self) -> str:
        await self.sleep(0.02)
        return str(await self.following.name())

    def name(self) -> str:
        return self.id

    async def ask_next_slowly(self) -> str:
        await self.sleep(0.02)
        return str(await self.following.slow_name())

    async def slow_name(self) -> str:
        await self.sleep(0.01)
        return self.id

    async def rounds(self, hops: int) -> list[tuple[int, float]]:
        seen = (self.round, self.random.random())
        if hops == 0:
            return [seen]
        return [seen, *[tuple(x) for x in await self.following.rounds(hops - 1)]]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


class Stubborn(Agent):
    """Breaks what the platform itself does with agents."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"nothing may be set, {name!r} least of all")


class Renamed(BaseModel):
    """Travels as its fields' names, and can't be made from them again."""

    size: int = Field(alias="grösse")


class Picky(Agent):
    def __init__(self, log: list[Any] | None = None) -> None:
        self.log = [] if log is None else log

    def raises(self) -> None:
        raise Unspeakable

    def grow(self, items: list[int]) -> int:
        items.append(1)
        return len(items)

    def log_length(self) -> int:
        self.log.append(1)
        return len(self.log)

    def renamed(self) -> Renamed:
        return Renamed(**{"grösse": 3})

    def thing(self) -> Any:
        return Unsendable()

    def number(self, n: int) -> int:
        return n

    def row(self) -> dict[str, int]:
        return {"a": 1}

    async def reach(self, other: AgentProxy) -> str:
        try:
            return str(await other.reply("x"))
        except AgentError as error:
            return error.kind


class Voter(Agent):
    def __init__(self, age: int = 0, city: str = "") -> None:
        self.age = age
        self.city = city

    def row(self) -> tuple[int, int, str]:
        return self.number, self.age, self.city

    def vote(self, question: str, weight: float = 1.0) -> Vote:
        return Vote(choice=f"{question}?" + "yes" * (self.number % 2), weight=weight)

    def draw(self) -> float:
        return self.random.random()

    async def wait(self, seconds: float) -> int:
        await self.sleep(seconds)
        return self.number

    def some_fail(self) -> int:
        if self.number % 10 == 3:
            raise Failure("unlucky", f"number {self.number}")
        return self.number

    def identity(self) -> tuple[int, int]:
        return os.getpid(), id(self.city)

    def pid(self) -> int:
        return os.getpid()

    def text(self) -> str:
        return "even" if self.number % 2 == 0 else "odd"


class Gate(Agent):
    """Waits until it is opened, by its number, from wherever."""

    open_now = False

    def __init__(self, slow: float = 0.0) -> None:
        self.slow = slow
        self.order: list[int] = []

    async def wait(self) -> int:
        while not Gate.open_now:
            await self.sleep(0.01)
        return self.number

    def open(self, value: bool = True) -> None:
        Gate.open_now = value

    def work(self, number: int, load: bytes = b"") -> int:
        if self.slow:
            time.sleep(self.slow)
        self.order.append(number)
        return number

    def seen(self) -> list[int]:
        return self.order


class Friend(Agent):
    """Knows others by name, from the beginning on."""

    def __init__(self, population: str = "", step: int = 1) -> None:
        self.step = step
        self.next = self.agents[(self.number + step) % len(self.agents)]

    def name(self) -> str:
        return self.id

    async def greet(self) -> str:
        return await self.next.name()

    async def visit(self, names: list[str]) -> list[str]:
        return [await self.agents[name].name() for name in names]

    async def hop(self, left: int) -> list[str]:
        return [self.id, *(await self.next.hop(left - 1) if left else [])]
