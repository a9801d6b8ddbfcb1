"""Answers of late: a prompt may come again though it was answered, and nobody says so."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Sequence

from populace.models.kept import KeptAnswers, Key, asks_the_same
from populace.models.serving import FINAL
from shared.errors import BusError, PopulaceError
from shared.logs import get_logger
from shared.messages.model import ModelRequest, ModelResponse

_log = get_logger(__name__)

_MOST = 10_000
_MOST_CHARACTERS = 64 << 20
_MESSAGES = 1000
"""Messages of kept answers that are read at a start; the broker writes down what it has given to
whom every 0.1 s, and few services keep as many in that time."""
_READ_WITHIN = 5.0
"""Seconds that prompts wait for that; the reading itself may take longer."""
_ALERT, _WATCHFUL = 10.0, 60.0
_CLOCKS = 1.0
"""Seconds by which the broker's clock may differ."""

_Found = dict[Key, ModelResponse]


class LateAnswers:
    """What was answered of late, by run and key, for prompts that would be asked again.

    Whoever asks looks into the kept answers first, but an answer that an earlier life of the run
    has asked for may come only then. And a broker that was killed may have forgotten to whom it has
    given a prompt, and that it was acknowledged: it gives it out as if for the first time.

    Args:
        kept: the answers that the broker keeps.
    """

    def __init__(self, kept: KeptAnswers) -> None:
        self._kept = kept
        self._held: OrderedDict[tuple[str, Key], tuple[ModelRequest, ModelResponse]] = OrderedDict()
        self._characters = 0
        self._reading: asyncio.Task[None] | None = None
        self._broke_at = float("-inf")
        self._wanted: dict[str, list[tuple[Sequence[ModelRequest], asyncio.Future[_Found]]]] = {}
        self._finding: dict[str, asyncio.Task[None]] = {}

    @property
    def watchful(self) -> bool:
        """Whether something broke a while ago: answers are remembered."""
        return time.monotonic() - self._broke_at < _WATCHFUL

    def doubts(self, stored_at: float) -> bool:
        """Whether a message may be in other hands: it is older than what broke a moment ago.

        Args:
            stored_at: when its stream took it, Unix time.
        """
        since = time.monotonic() - self._broke_at
        return since < _ALERT and stored_at < time.time() - since + _CLOCKS

    def read(self) -> None:
        """Begin to read what was kept last: this process starts, or the connection broke."""
        self._broke_at = time.monotonic()
        if self._reading is not None:
            self._reading.cancel()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while self.watchful:
            try:
                async for run, request, response in self._kept.newest(_MESSAGES):
                    self.put(run, request, response)
                return
            except PopulaceError as error:
                _log.warning("the last answers can't be read yet", error=str(error))
            await asyncio.sleep(1.0)

    async def ready(self) -> None:
        """Wait until what was kept last is read; with a bound."""
        if self._reading is not None and not self._reading.done():
            await asyncio.wait([self._reading], timeout=_READ_WITHIN)

    def close(self) -> None:
        """Stop reading."""
        for task in (self._reading, *self._finding.values()):
            if task is not None:
                task.cancel()
        for run in list(self._wanted):  # of readings that had not begun
            self._give_up(self._wanted.pop(run), "the service stops")

    async def find(self, run: str, wanted: Sequence[ModelRequest]) -> _Found:
        """What was answered of these prompts, however long ago.

        What is asked for while the kept answers are being read goes with the next reading: all of a
        round may have to be read.

        Raises:
            BusError: they can't be read.
        """
        future: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
        self._wanted.setdefault(run, []).append((wanted, future))
        if run not in self._finding:
            self._finding[run] = asyncio.ensure_future(self._find(run))
        return await future

    async def _find(self, run: str) -> None:
        asked: list[tuple[Sequence[ModelRequest], asyncio.Future[_Found]]] = []
        try:
            while asked := self._wanted.pop(run, []):
                found = await self._kept.find(run, [r for requests, _ in asked for r in requests])
                for requests, future in asked:
                    if not future.done():
                        keys = [request.key for request in requests]
                        future.set_result({key: found[key] for key in keys if key in found})
        except Exception as error:
            self._give_up([*asked, *self._wanted.pop(run, [])], str(error))
        finally:
            self._finding.pop(run, None)
            self._give_up([*asked, *self._wanted.pop(run, [])], "the service stops")

    @staticmethod
    def _give_up(
        asked: list[tuple[Sequence[ModelRequest], asyncio.Future[_Found]]], why: str
    ) -> None:
        for _, future in asked:
            with contextlib.suppress(asyncio.InvalidStateError):
                future.set_exception(BusError(f"kept answers can't be read: {why}"))

    def get(self, run: str, request: ModelRequest) -> ModelResponse | None:
        """The answer to a prompt, if it came of late: to this very one, not to another's key."""
        held = self._held.get((run, request.key))
        return held[1] if held is not None and asks_the_same(held[0], request) else None

    def put(self, run: str, request: ModelRequest, response: ModelResponse) -> None:
        """Remember an answer, or a failure of the prompt's own; the first to a prompt stays."""
        held = self._held.get((run, request.key))
        if response.error_kind not in FINAL or (held and asks_the_same(held[0], request)):
            return
        if held is not None:
            self._characters -= _size(*held)
        self._held[run, request.key] = request, response
        self._characters += _size(request, response)
        while len(self._held) > _MOST or self._characters > _MOST_CHARACTERS:
            self._characters -= _size(*self._held.popitem(last=False)[1])

    def forget(self, run: str) -> None:
        """A run begins that has the name of an earlier one, perhaps."""
        for held in [held for held in self._held if held[0] == run]:
            self._characters -= _size(*self._held.pop(held))


def _size(request: ModelRequest, response: ModelResponse) -> int:
    """Characters that are held for an answer, more or less."""
    texts = [response.text, response.error, str(response.details.get("reasoning") or "")]
    texts += [str(message.get("content") or "") for message in request.messages]
    return sum(map(len, texts))
