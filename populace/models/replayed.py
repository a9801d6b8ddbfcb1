"""Models of a run that is played again: their answers are those of the run before."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from populace.models.client import ModelClient
from populace.models.kept import KeptAnswers, Key, Part, asks_the_same
from shared.errors import BusError
from shared.logs import get_logger
from shared.messages.model import ModelRequest, ModelResponse
from shared.messages.scenario import ReplaySpec

if TYPE_CHECKING:
    from populace.models.client import QueuedModels

_log = get_logger(__name__)

_ROUNDS_HELD = 2
_SHOWN = 160
_PARTS = ("messages", "schema", "temperature", "top_p", "max_tokens", "model", "spare", "tools")
_Held = dict[Key, list[tuple[ModelRequest, ModelResponse]]]


class ReplayedModels(ModelClient):
    """Answers from what was kept of another run; nothing is asked.

    Scripts have no answers that were kept, as they give the same again.

    Args:
        queued: asks the scripts.
        kept: where answers are.
        replay: of which run, and how strictly.
    """

    def __init__(self, queued: QueuedModels, kept: KeptAnswers, replay: ReplaySpec) -> None:
        super().__init__(queued.models)
        self._queued = queued
        self._kept = kept
        self._replay = replay
        self._rounds: OrderedDict[int, tuple[Part, asyncio.Task[_Held]]] = OrderedDict()
        self._warned = False

    async def start(self) -> None:
        """See ``ModelClient.start``."""
        await self._queued.start()

    async def close(self) -> None:
        """See ``ModelClient.close``."""
        for _, task in self._rounds.values():
            task.cancel()
        await self._queued.close()

    def context(self, name: str) -> int | None:
        """See ``ModelClient.context``."""
        return self._queued.context(name)

    async def request(self, model: str, request: ModelRequest) -> ModelResponse:
        """See ``ModelClient.request``."""
        if self.spec(model).backend == "scripted":
            return await self._queued.request(model, request)
        number = request.key[3]
        if number not in self._rounds or request.key not in self._rounds[number][0]:
            part, run = self.part(), self._replay.run
            asked = asyncio.ensure_future(self._kept.asked_in(run, number, part))
            self._rounds[number] = part, asked
            while len(self._rounds) > _ROUNDS_HELD:
                self._rounds.popitem(last=False)
        part, reading = self._rounds[number]
        try:
            # Whoever gives up must not take it from the others.
            held = (await asyncio.shield(reading)).get(request.key)
        except BusError as error:
            if self._rounds.get(number) == (part, reading):
                del self._rounds[number]
            return self._refused(request, f"what was kept can't be read: {error}")
        _, population, agent, _, question = request.key
        who = f"{population}/{agent} in round {number}, question {question + 1}"
        if held is None:
            return self._refused(
                request,
                f"the run {self._replay.run!r} has no answer to {who}: it was never asked, or its "
                "answers are older than they are kept for",
            )
        same = (pair for pair in held if asks_the_same(pair[0], request))
        before, response = next(same, held[-1])
        difference = "" if asks_the_same(before, request) else _told(before, request)
        if difference and self._replay.strict:
            return self._refused(request, f"{who} is asked something else: {difference}")
        if difference and not self._warned:
            self._warned = True
            _log.warning("prompts differ from those of the run before", first=who, how=difference)
        details = {**response.details, "kept": True}
        return replace(response, number=request.number, details=details)

    @staticmethod
    def _refused(request: ModelRequest, text: str) -> ModelResponse:
        return ModelResponse(request.number, error_kind="not_kept", error=text)


def _told(before: ModelRequest, now: ModelRequest) -> str:
    """How two prompts differ, in a few words."""
    for part in _PARTS:
        old, new = _plain(getattr(before, part)), _plain(getattr(now, part))
        if old == new:
            continue
        if part != "messages":
            return f"{part} was {str(old)[:_SHOWN]} and is {str(new)[:_SHOWN]}"
        old, new = json.dumps(old, ensure_ascii=False), json.dumps(new, ensure_ascii=False)
        blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        _, i, i_end, j, j_end = next(block for block in blocks if block[0] != "equal")
        start = max(0, i - 20)
        return (
            f"the prompt had {old[start : i_end + 20][:_SHOWN]!r} where it has "
            f"{new[max(0, j - 20) : j_end + 20][:_SHOWN]!r}"
        )
    return ""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
