"""A group: members report, wait for one another, and hear what is announced to them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from populace.environment import Environment, event, readonly

_MOST_SHOWN = 200


class Group(Environment):
    """A part of a larger whole, with a pace of its own; groups may hold groups.

    Members (agents, or groups within this one) ``report`` a value once per step; whoever wants to
    go on only with the others uses ``arrive``, which waits until all have reported. The whole asks
    each group for its ``summary``, and speaks to all by ``announce``, which goes down level by
    level.

    Args:
        size: how many members report in a step.

    Events: ``complete(step, mean, count)`` when all have reported; ``announced(news)``.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a group needs at least 1 member, not {size}")
        self.size = size
        self.step = 0
        """Steps completed so far."""
        self.values: list[float | None] = []
        """Reports of the step under way."""
        self.means: list[float | None] = []
        """The mean of each completed step; None where nobody had a value."""
        self.counts: list[int] = []
        self.news: list[Any] = []

    def report(self, value: float | None) -> int:
        """Tell one's value (None: there is none); returns the number of the step, from 1."""
        step = self.step + 1
        self.values.append(value)
        if len(self.values) == self.size:
            good = [v for v in self.values if v is not None]
            # The exact sum, so that the order in which members report makes no difference.
            self.means.append(math.fsum(good) / len(good) if good else None)
            self.counts.append(len(good))
            self.values = []
            self.step = step
            self.emit("complete", None, step=step, mean=self.means[-1], count=len(good))
        return step

    async def arrive(self, value: float | None) -> float | None:
        """Report, and wait for all others; returns the group's mean of the step."""
        step = self.report(value)
        await self.until(lambda: self.step >= step)
        return self.means[step - 1]

    async def summary(self, step: int = 0) -> dict[str, Any]:
        """What a step came to: path, step, mean, count; waits until it is complete.

        Args:
            step: its number, from 1; 0: the last completed one, without waiting.
        """
        if step:
            await self.until(lambda: self.step >= step)
        number = step or self.step
        mean = self.means[number - 1] if number else None
        count = self.counts[number - 1] if number else 0
        return {"path": self.path, "step": number, "mean": mean, "count": count}

    @event
    def announced(self, news: Any) -> None:
        """Hear something from above; members listen to this event."""
        self.news.append(news)

    async def announce(self, news: Any) -> int:
        """Tell this group and all groups within it, side by side; returns how many heard it."""
        children = self.children.values()
        counts: list[int] = await asyncio.gather(*(child.announce(news) for child in children))
        self.announced(news)
        return 1 + sum(counts)

    def view(self) -> dict[str, Any]:
        """See ``Environment.view``."""
        rows = list(zip(range(1, self.step + 1), self.means, self.counts, strict=True))
        return {
            "kind": "table",
            "columns": ["step", "mean", "count"],
            "rows": rows[-_MOST_SHOWN:],
        }

    @readonly
    def latest(self) -> Any:
        """What was announced last; None if nothing was."""
        return self.news[-1] if self.news else None
