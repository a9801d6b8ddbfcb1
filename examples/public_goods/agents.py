"""Members of groups that pay into a common project, and may punish one another."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from populace import Agent, ModelFailure

ENDOWMENT = 20
RETURN = 0.4
MOST_POINTS = 5
"""Points that one may spend on punishing each of the others."""
HARM = 3
"""What a point costs whom it is for; it costs 1 whoever gives it (Fehr and Gaechter 2002)."""


class Payment(BaseModel):
    """How many tokens are paid in."""

    tokens: int = Field(ge=0, le=ENDOWMENT)


def _points(others: int) -> dict[str, Any]:
    """The schema of points against each of the others, in their order."""
    number = {"type": "integer", "minimum": 0, "maximum": MOST_POINTS}
    points = {"type": "array", "items": number, "minItems": others, "maxItems": others}
    return {"type": "object", "properties": {"points": points}, "required": ["points"]}


def rules(size: int, punishment: bool) -> str:
    """What everyone is told."""
    told = (
        f"You are in a group of {size}. In each period all get {ENDOWMENT} tokens and decide "
        "how many of them to pay into a common project; the others are kept. Each token in the "
        f"project gives {RETURN:g} tokens to every member, whoever paid it."
    )
    if punishment:
        told += (
            f" Then all see who paid what, and may spend up to {MOST_POINTS} points on each other "
            f"member. A point costs you 1 token, and whom you give it to {HARM} tokens."
        )
    return told


class Member(Agent):
    """Decides by asking a model.

    Args:
        project: path of its group's project.
        size: members of the group.
        punishment: whether there is any.
    """

    def __init__(self, project: str, size: int, punishment: bool) -> None:
        self.project = project
        self.size = size
        self.punishment = punishment

    async def period(self) -> dict[str, Any]:
        """Play one period.

        Returns:
            ``{"paid", "points", "income"}``.

        Raises:
            ModelFailure: the model gave no usable answer.
        """
        project = self.environment(self.project)
        paid: int | None = None
        points: dict[str, int] = {}
        failure: ModelFailure | None = None
        # Whoever fails takes part in both steps all the same, or the others would wait for ever.
        try:
            paid = await self.pay()
        except ModelFailure as error:
            failure = error
        payments = await project.pay(paid)
        others = {name: tokens for name, tokens in payments.items() if name != self.id}
        try:
            if self.punishment and failure is None:
                points = await self.punish(others)
        except ModelFailure as error:
            failure = error
        outcome = await project.punish(points)
        self.remember(payments, outcome)
        if failure is not None:
            raise failure
        return {"paid": paid, "points": sum(points.values()), "income": outcome["income"]}

    async def pay(self) -> int:
        """How many tokens to pay in."""
        found = await self.model.ask(
            "How many tokens do you pay into the project?",
            system=rules(self.size, self.punishment),
            returns=Payment,
        )
        return int(found.tokens)

    async def punish(self, others: dict[str, int]) -> dict[str, int]:
        """Points against the others, by name."""
        names = sorted(others)
        told = ", ".join(f"member {i + 1} paid {others[name]}" for i, name in enumerate(names))
        found = await self.model.ask(
            f"In this period {told}. Give {len(names)} numbers from 0 to {MOST_POINTS}: the points "
            "against each of them.",
            system=rules(self.size, self.punishment),
            returns=_points(len(names)),
        )
        return {name: n for name, n in zip(names, found["points"], strict=True) if n}

    def remember(self, payments: dict[str, int], outcome: dict[str, Any]) -> None:
        """Take in what the period came to."""
        told = ", ".join(str(tokens) for name, tokens in payments.items() if name != self.id)
        self.memory.add_user(
            f"Period {self.round}: the others paid {told}; you got {outcome['received']} points "
            f"against you; your income was {outcome['income']:.1f}."
        )


class Reciprocal(Member):
    """A rule in place of a model, one of two kinds.

    Three of ten ride free; the others pay what the others of their group paid on average in the
    period before (half of what they have, in the first), a tenth less, and give a point for each
    four tokens that somebody has paid less than they did. Shares roughly as Fischbacher, Gaechter
    and Fehr (2001) found them. Whoever was punished pays two tokens more the next time.
    """

    def __init__(self, project: str, size: int, punishment: bool) -> None:
        super().__init__(project, size, punishment)
        self.last: float | None = None
        self.received = 0
        self.paid = 0

    @property
    def rides_free(self) -> bool:
        """Which kind it is."""
        return self.number % 10 in (2, 5, 8)

    async def pay(self) -> int:
        """See ``Member.pay``."""
        if self.rides_free:
            wanted = self.paid + 4 if self.received else max(0, self.paid - 1)
        else:
            expected = ENDOWMENT / 2 if self.last is None else self.last
            wanted = round(0.9 * expected) + (2 if self.received else 0)
            if self.punishment and self.last is not None and not self.received:
                wanted += 2  # who sees free riders punished trusts the others more
        self.paid = max(0, min(ENDOWMENT, wanted))
        return self.paid

    async def punish(self, others: dict[str, int]) -> dict[str, int]:
        """See ``Member.punish``."""
        if self.rides_free:
            return {}
        less = {name: (self.paid - tokens) // 4 for name, tokens in others.items()}
        return {name: min(MOST_POINTS, points) for name, points in less.items() if points > 0}

    def remember(self, payments: dict[str, int], outcome: dict[str, Any]) -> None:
        """See ``Member.remember``."""
        others = [tokens for name, tokens in payments.items() if name != self.id]
        self.last = sum(others) / len(others) if others else 0.0
        self.received = outcome["received"]
