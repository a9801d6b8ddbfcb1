"""Agents for benchmarks; workers import them by path."""

from __future__ import annotations

import asyncio
import os
import time

from populace import Agent, Environment, Event, event


class Plain(Agent):
    """Answers at once."""

    def add(self, number: int) -> int:
        """One more than the number."""
        return number + 1

    def draw(self) -> float:
        """A random number of its own."""
        return self.random.random()


class Dummy(Agent):
    """The paper's dummy agent: waits, then returns a random number."""

    async def guess(self, wait: float) -> float:
        """A number from [0, 100), after ``wait`` seconds."""
        await self.sleep(wait)
        return self.random.random() * 100

    def pick(self) -> float:
        """The same without any waiting."""
        return self.random.random() * 100


class Guesser(Agent):
    """Asks its model."""

    async def guess(self, rules: str, question: str) -> str:
        """What the model says."""
        return await self.model.ask(question, system=rules)


class Node(Agent):
    """Combines what it is given; what it made so far is remembered as a sum."""

    MODULUS = (1 << 61) - 1

    def __init__(self) -> None:
        self.made = 0

    def combine(self, number: int, inputs: list[int]) -> int:
        """A number that depends on all inputs and on their order."""
        value = combine(number, inputs)
        self.made += value
        return value

    def total(self) -> int:
        """The sum of all numbers made here."""
        return self.made % self.MODULUS


def combine(number: int, inputs: list[int]) -> int:
    """What ``Node.combine`` gives."""
    value = number + 1
    for one in inputs:
        value = (value * 1_000_003 + one) % Node.MODULUS
    return value


class Player(Agent):
    """Plays ping-pong by calls, one in flight at a time."""

    async def rally(self, other: str, count: int) -> list[float]:
        """Seconds that each of ``count`` calls to the other took."""
        partner = self.agents[other]
        taken = []
        for i in range(count):
            began = time.perf_counter()
            if await partner.pong(i) != i:
                raise ValueError("a wrong ball came back")
            taken.append(time.perf_counter() - began)
        return taken

    def pong(self, ball: int) -> int:
        """The ball, back."""
        return ball

    def pid(self) -> int:
        """The process that it lives in."""
        return os.getpid()


class Worker(Agent):
    """Computes for a while, as agents with a model of their own or a solver do."""

    def compute(self, rounds: int) -> int:
        """A number that takes long to find."""
        return toil(self.number, rounds)

    def pid(self) -> int:
        """The process that it lives in."""
        return os.getpid()


def toil(number: int, rounds: int) -> int:
    """What ``Worker.compute`` gives for an agent's number."""
    value = number + 1
    for i in range(rounds):
        value = (value * 6364136223846793005 + i) % Node.MODULUS
    return value


class Person(Agent):
    """Holds a persona, as a text that equal ones share."""

    def __init__(self, persona: str) -> None:
        self.persona = persona

    def length(self) -> int:
        """Characters of the persona."""
        return len(self.persona)


class Slow(Agent):
    """Takes its time for each call, and counts them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.count = 0

    def add(self, number: int) -> int:
        """One more than the number, after computing for a while."""
        self.count += 1
        if self.seconds:
            end = time.perf_counter() + self.seconds
            while time.perf_counter() < end:
                pass
        return number + 1

    def handled(self) -> int:
        """How many calls came."""
        return self.count


class Counter(Environment):
    """Counts."""

    def __init__(self) -> None:
        self.count = 0


class Incrementer(Agent):
    """Adds to a counter, call by call."""

    async def add(self, path: str, times: int) -> int:
        """Add one, ``times`` times, all at once."""
        counter = self.environment(path)
        return len(await asyncio.gather(*(counter.increment("count") for _ in range(times))))

    async def add_in_turn(self, path: str, times: int) -> int:
        """The same, each after the answer to the one before."""
        counter = self.environment(path)
        for _ in range(times):
            await counter.increment("count")
        return times


class Square(Environment):
    """A place where things are said."""

    @event
    def say(self, text: str) -> None:
        """Say something."""


class Hearer(Agent):
    """Counts what it hears."""

    def __init__(self) -> None:
        self.count = 0

    async def hear(self, path: str) -> None:
        """Listen to a place."""
        await self.listen(path, "say", self.on_event)

    def on_event(self, told: Event) -> None:
        """Count."""
        self.count += 1

    def heard(self) -> int:
        """How much it heard."""
        return self.count
