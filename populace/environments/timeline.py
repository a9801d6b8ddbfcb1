"""A timeline: a simulated clock, and things that happen when their time has come."""

from __future__ import annotations

import heapq
from typing import Any

from populace.environment import Environment, readonly

_MOST_SHOWN = 200


class Timeline(Environment):
    """A clock that stands until it is advanced, and then does what was planned, in order.

    Args:
        start: what the clock shows at first, in units of the scenario's choice.

    Events: ``due(name, at, data, plan)`` for each thing planned, when the clock reaches it, and
    ``advanced(now)`` after each advance.
    """

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        self.planned = 0
        """Plans made so far, which numbers them."""
        self.plans: list[list[Any]] = []
        """A heap of [time, number, name, data, interval or None]."""

    def plan(self, name: str, at: float, data: Any = None, every: float | None = None) -> int:
        """Have something happen at a time, and perhaps again at an interval.

        Returns:
            The plan's number, from 1, to call it off.

        Raises:
            ValueError: the time has passed, or the interval isn't above 0.
        """
        if at < self.now:
            raise ValueError(f"{name!r} can't be planned for {at:g}: it is {self.now:g} already")
        if every is not None and not every > 0:
            raise ValueError(f"an interval must be above 0, not {every!r}")
        self.planned += 1
        heapq.heappush(self.plans, [at, self.planned, name, data, every])
        return self.planned

    def plan_in(self, name: str, delay: float, data: Any = None, every: float | None = None) -> int:
        """The same, so much from now."""
        return self.plan(name, self.now + delay, data, every)

    def call_off(self, number: int) -> bool:
        """Drop a plan; returns whether there was one."""
        left = [plan for plan in self.plans if plan[1] != number]
        dropped = len(left) < len(self.plans)
        self.plans = left
        heapq.heapify(self.plans)
        return dropped

    def advance(self, to: float) -> int:
        """Move the clock, and have happen what falls due; returns how much did.

        Raises:
            ValueError: the clock would go back.
        """
        if to < self.now:
            raise ValueError(f"the clock can't go back from {self.now:g} to {to:g}")
        happened = 0
        while self.plans and self.plans[0][0] <= to:
            at, number, name, data, every = heapq.heappop(self.plans)
            self.now = at
            happened += 1
            self.emit("due", None, name=name, at=at, data=data, plan=number)
            if every is not None:
                heapq.heappush(self.plans, [at + every, number, name, data, every])
        self.now = to
        self.emit("advanced", None, now=to)
        return happened

    def advance_by(self, delay: float) -> int:
        """Move the clock by so much; see ``advance``."""
        return self.advance(self.now + delay)

    def next(self) -> int:
        """Move the clock to the next thing planned; returns how much happened, 0 if nothing is."""
        return self.advance(self.plans[0][0]) if self.plans else 0

    def view(self) -> dict[str, Any]:
        """See ``Environment.view``."""
        names = ["time", "number", "name", "data"]
        return {"kind": "table", "columns": names, "rows": self.upcoming(_MOST_SHOWN)}

    @readonly
    def upcoming(self, most: int = 20) -> list[list[Any]]:
        """What is planned, soonest first: time, number, name, data."""
        return [plan[:4] for plan in sorted(self.plans, key=lambda p: (p[0], p[1]))[:most]]
