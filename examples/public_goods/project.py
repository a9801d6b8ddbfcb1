"""A group's common project: an environment in which members wait for one another."""

from __future__ import annotations

from typing import Any

from populace import Environment


class Project(Environment):
    """Takes payments, then points, of all members; each step ends when all have come.

    Args:
        size: members of the group.
        endowment: tokens of each in a period.
        returned: what each token in the project gives to everyone.
        harm: what a point costs whom it is for.

    Events: ``period_over(mean, points)``.
    """

    def __init__(self, size: int, endowment: int, returned: float, harm: int) -> None:
        self.size = size
        self.endowment = endowment
        self.returned = returned
        self.harm = harm
        self.periods = 0
        self.paid: dict[str, int] = {}
        self.absent = 0
        self.given: dict[str, dict[str, int]] = {}
        self.paying = self.punishing = 0
        """Steps that are complete."""
        self.payments: dict[str, int] = {}
        self.points: dict[str, dict[str, int]] = {}
        """Of the last complete steps."""

    async def pay(self, tokens: int | None) -> dict[str, int]:
        """Pay in (None: no decision, which pays nothing), and wait for all.

        Returns:
            What each has paid, by name.
        """
        step = self.paying + 1
        self.paid[self.caller] = tokens or 0
        if len(self.paid) == self.size:
            self.payments, self.paid = dict(sorted(self.paid.items())), {}
            self.paying = step
        await self.until(lambda: self.paying >= step)
        return self.payments

    async def punish(self, points: dict[str, int]) -> dict[str, Any]:
        """Give points against others, and wait for all.

        Returns:
            ``{"received": points against oneself, "income": tokens of the period}``; points of
            others take no more than there is, one's own are paid even so.
        """
        who = self.caller
        step = self.punishing + 1
        self.given[who] = points
        if len(self.given) == self.size:
            self.points, self.given = self.given, {}
            self.punishing = step
            total = sum(sum(p.values()) for p in self.points.values())
            mean = sum(self.payments.values()) / self.size
            self.emit("period_over", None, mean=mean, points=total)
        await self.until(lambda: self.punishing >= step)
        received = sum(given.get(who, 0) for given in self.points.values())
        kept = self.endowment - self.payments[who]
        shared = self.returned * sum(self.payments.values())
        harmed = max(0.0, kept + shared - self.harm * received)
        return {"received": received, "income": harmed - sum(self.points[who].values())}
