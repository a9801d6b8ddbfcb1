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
