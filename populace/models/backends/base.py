"""The interface of a back end."""

from __future__ import annotations

import abc
import time
from collections.abc import Awaitable, Callable
from typing import Any

from shared.messages.model import ModelRequest, ModelResponse

Admit = Callable[[ModelRequest], Awaitable[None]]
"""Awaited before each request that leaves for an engine: it waits for the limits to allow it, and
raises if the request is not wanted any more."""


class SpentError(Exception):
    """A budget lets no more requests leave; the text is which. Raised by an ``Admit``."""


class NotWantedError(Exception):
    """Nobody waits for the answer to a prompt any more. Raised by an ``Admit``."""


async def let_in(request: ModelRequest) -> None:
    """The ``Admit`` that lets every request leave at once."""


class Backend(abc.ABC):
    """Answers prompts. One object serves many requests at once."""

    name: str
    """Stands in every result: "embedded", "openai:<model>", "scripted"."""
    slots: int | None = None
    """Requests that it serves side by side, where it knows; else the setting counts."""
    weights: str = ""
    """Which those are that it serves, where its name doesn't tell."""
    context: int | None = None
    """Tokens of prompt and answer together, where it knows."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Get ready.

        Raises:
            PopulaceError: it can't; one sentence says why.
        """

    @abc.abstractmethod
    async def check(self) -> dict[str, Any]:
        """Reach the model, as cheaply as can be; returns details to show.

        Raises:
            PopulaceError: it can't be reached; one sentence says why.
        """

    async def count(self, messages: list[dict[str, Any]]) -> int | None:
        """Tokens of a conversation by the model's own tokenizer; None if it doesn't tell."""
        return None

    async def timed_answer(self, request: ModelRequest, admit: Admit = let_in) -> ModelResponse:
        """``answer``, admitted, and how long it took from then on."""
        await admit(request)
        began = time.monotonic()
        response = await self.answer(request, admit)
        response.seconds = time.monotonic() - began
        return response

    @abc.abstractmethod
    async def answer(self, request: ModelRequest, admit: Admit = let_in) -> ModelResponse:
        """Answer one prompt, as it is. Failures are responses with an error kind, not exceptions.

        A schema is for guided decoding, where the engine has it; nothing is parsed here.

        Args:
            request: the prompt, admitted already.
            admit: for each further request that it takes.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of connections and memory."""
