"""Agents for benchmarks; workers import them by path."""

from __future__ import annotations

from populace import Agent


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
