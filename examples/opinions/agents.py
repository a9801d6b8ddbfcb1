"""People with an opinion from 0 to 100, who meet in pairs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from populace import Agent

_CLAIM = "Cities should ban private cars."


class Stance(BaseModel):
    """What a person says, and where it stands."""

    statement: str = Field(max_length=400)
    agreement: int = Field(ge=0, le=100)


class Person(Agent):
    """Talks it over with a neighbour, and may change its mind.

    Args:
        opinion: agreement with the claim at first, 0 to 100.
    """

    def __init__(self, opinion: float) -> None:
        self.opinion = opinion
        self.statement = ""

    def stand(self) -> float:
        """The opinion as it is."""
        return self.opinion

    async def meet(self, partner: str) -> dict[str, Any]:
        """Tell a neighbour what one thinks, hear what it says to that, and think again.

        Returns:
            Both opinions afterwards.
        """
        other = self.agents[partner]
        reply = await other.hear(self.opinion, await self._say())
        await self._consider(reply["opinion"], reply["statement"])
        return {"mine": self.opinion, "theirs": reply["after"]}

    async def hear(self, opinion: float, statement: str) -> dict[str, Any]:
        """Answer somebody who says what it thinks; then think again."""
        before, own = self.opinion, await self._say()
        await self._consider(opinion, statement)
        return {"opinion": before, "statement": own, "after": self.opinion}

    async def _say(self) -> str:
        if not self.statement:
            self.statement = await self.model.ask(
                f'Your agreement with "{_CLAIM}" is {self.opinion:.0f} of 100. Say why, in one '
                "sentence.",
                memory=False,
            )
        return self.statement

    async def _consider(self, opinion: float, statement: str) -> None:
        found = await self.model.ask(
            f'The claim: "{_CLAIM}" Your agreement so far is {self.opinion:.0f} of 100. A '
            f"neighbour, whose agreement is {opinion:.0f}, says: {statement!r} Where do you stand "
            "now, and what would you say?",
            returns=Stance,
            memory=False,
        )
        self.opinion, self.statement = float(found.agreement), found.statement


class Bounded(Person):
    """Moves toward whoever is not too far away (Deffuant, Neau, Amblard and Weisbuch 2000).

    Args:
        opinion: at first, 0 to 100.
        confidence: how far away an opinion may be to count.
        mu: which part of the way one moves; with 0.5 both meet in the middle.
    """

    def __init__(self, opinion: float, confidence: float, mu: float) -> None:
        super().__init__(opinion)
        self.confidence = confidence
        self.mu = mu

    async def _say(self) -> str:
        return ""

    async def _consider(self, opinion: float, statement: str) -> None:
        if abs(opinion - self.opinion) < self.confidence:
            self.opinion += self.mu * (opinion - self.opinion)
