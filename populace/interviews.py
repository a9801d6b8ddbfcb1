"""Interviews: questions to chosen agents of a run that is under way.

An agent answers between two of its calls, as who it is and with what it remembers. It does not
remember the interview, unless it is to; its other answers are those that it would have given.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from pydantic import Field

from populace.errors import AgentError
from shared.messages.scenario import Strict
from shared.service import serve

if TYPE_CHECKING:
    from populace.world import World

MOST_AT_ONCE = 1000
_PATIENCE = 600.0


class InterviewRequest(Strict):
    """Asks agents something."""

    agents: list[str] = Field(min_length=1, max_length=MOST_AT_ONCE)
    """By population and number, as in ``players/17``."""
    question: str = Field(min_length=1, max_length=20_000)
    remember: bool = False
    """Whether question and answer go into the agents' memories."""
    model: str = "default"
    """Which of the run's models answers."""


class InterviewAnswer(Strict):
    """What one agent said."""

    agent: str
    text: str | None = None
    error: str | None = None
    """Why there is no answer."""
    persona: dict[str, object] | None = None


class InterviewAnswers(Strict):
    """What they said, in the order in which they were named."""

    round: int
    """The round that was under way."""
    answers: list[InterviewAnswer]


class Interviews:
    """Takes requests for interviews with the agents of a world.

    Args:
        world: theirs.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    async def open(self) -> None:
        """Begin to take requests."""
        subject = self._world._subjects.run_owner(self._world.run, "interview")
        await serve(self._world._bus, subject, InterviewRequest, self.ask)

    async def ask(self, request: InterviewRequest) -> InterviewAnswers:
        """Ask, and wait for all answers.

        Raises:
            InvalidInputError: there is no such agent.
        """
        world = self._world
        proxies = [world.agent_named(name) for name in request.agents]
        round_number = world._caller.round

        async def one(name: str, proxy: object) -> InterviewAnswer:
            nonce = random.getrandbits(40)
            try:
                # By the caller, as the method is every agent's, and not of its class alone.
                said = await world._caller.call(
                    proxy._shard,  # type: ignore[attr-defined]
                    proxy._index,  # type: ignore[attr-defined]
                    name,
                    "interview",
                    (request.question,),
                    {"remember": request.remember, "model": request.model, "nonce": nonce},
                ).with_timeout(_PATIENCE)
            except AgentError as error:
                return InterviewAnswer(agent=name, error=f"{error.kind}: {error.message}")
            return InterviewAnswer(agent=name, text=said["text"], persona=said["persona"])

        found = await asyncio.gather(
            *(one(name, proxy) for name, proxy in zip(request.agents, proxies, strict=True))
        )
        return InterviewAnswers(round=round_number, answers=list(found))
