"""Members of small rooms who discuss a proposal in turn, and their moderators."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from populace import Agent, ModelFailure

_NOTHING = "(says nothing)"


class Vote(BaseModel):
    """Support from 0 to 10, and why."""

    support: int = Field(ge=0, le=10)
    reason: str = Field(max_length=400)


def _heard(said: list[dict[str, Any]]) -> str:
    return "\n".join(f"{one['name']}: {one['text']}" for one in said)


class Member(Agent):
    """Votes, speaks in its turn, votes again."""

    async def vote(self, proposal: str) -> dict[str, Any]:
        """Say how far one supports a proposal."""
        found = await self.model.ask(
            f"The proposal: {proposal} How far do you support it, from 0 to 10, and why?",
            returns=Vote,
        )
        self.support = float(found.support)
        return {"support": found.support, "text": found.reason}

    async def speak(self, proposal: str, said: list[dict[str, Any]]) -> dict[str, Any]:
        """Say something to what the others before have said."""
        before = _heard(said) or "(nobody has spoken yet)"
        try:
            text = await self.model.ask(
                f"You discuss this proposal in a small room: {proposal}\nSo far:\n{before}\nNow it "
                "is your turn. Say what you think in two sentences."
            )
        except ModelFailure:
            text = _NOTHING  # the others need not fall silent as well
        return {"name": self.id, "text": text}

    def listen_to(self, summary: dict[str, Any]) -> None:
        """Remember how the moderator has summed up."""
        self.memory.add_user(f"The moderator sums up the discussion: {summary['text']}")


class Moderator(Agent):
    """Sums up what was said in a room."""

    async def sum_up(self, proposal: str, said: list[dict[str, Any]]) -> dict[str, Any]:
        """Sum up; waits until all have spoken, as what they say are placeholders."""
        try:
            text = await self.model.ask(
                f"You moderate a discussion of this proposal: {proposal}\n{_heard(said)}\nSum up "
                "the arguments for and against it, in three sentences.",
                memory=False,
            )
        except ModelFailure:
            text = _NOTHING
        return {"text": text}


class Steady(Member):
    """A rule in place of a model: moves a part of the way to the mean of what it has heard.

    Friedkin and Johnsen's model (1990) with one step, each speaker weighing the same.
    """

    OPENNESS = 0.3

    async def vote(self, proposal: str) -> dict[str, Any]:
        """See ``Member.vote``."""
        if not hasattr(self, "support"):
            self.support = self.random.uniform(0, 10)
        return {"support": self.support, "text": ""}

    async def speak(self, proposal: str, said: list[dict[str, Any]]) -> dict[str, Any]:
        """See ``Member.speak``."""
        return {"name": self.id, "text": "", "support": self.support}

    def listen_to(self, summary: dict[str, Any]) -> None:
        """See ``Member.listen_to``."""
        self.support += self.OPENNESS * (summary["mean"] - self.support)


class Counting(Moderator):
    """Sums up by a mean."""

    async def sum_up(self, proposal: str, said: list[dict[str, Any]]) -> dict[str, Any]:
        """See ``Moderator.sum_up``."""
        return {"text": "", "mean": sum(one["support"] for one in said) / len(said)}
