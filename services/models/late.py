"""Answers of late: a prompt may come again though it was answered, and nobody says so."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from populace.models.kept import KeptAnswers, Key
from populace.models.serving import FINAL
from shared.errors import BusError
from shared.logs import get_logger
from shared.messages.model import ModelResponse

_log = get_logger(__name__)

_MOST = 10_000
_MOST_CHARACTERS = 64 << 20
_MESSAGES = 1000
"""Messages of kept answers that are read at a start; the broker writes down what it has given to
whom every 0.1 s, and few services keep as many in that time."""
_WATCHFUL = 60.0


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
        self._held: OrderedDict[tuple[str, Key], ModelResponse] = OrderedDict()
        self._characters = 0
        self._reading: asyncio.Task[None] | None = None
        self._watchful_until = 0.0
        self._wanted: dict[str, list[tuple[set[Key], asyncio.Future[dict[Key, ModelResponse]]]]]
        self._wanted = {}
        self._finding: dict[str, asyncio.Task[None]] = {}

    @property
    def watchful(self) -> bool:
        """Whether something broke a short while ago."""
        return time.monotonic() < self._watchful_until

    def read(self) -> None:
        """Begin to read what was kept last: this process starts, or the connection broke."""
        self._watchful_until = time.monotonic() + _WATCHFUL
        if self._reading is not None:
            self._reading.cancel()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for run, key, response in self._kept.newest(_MESSAGES):
                self.put(run, key, response)
        except BusError as error:
            _log.warning("the last answers can't be read", error=str(error))

    async def ready(self) -> None:
        """Wait until what was kept last is read."""
        while self._reading is not None and not self._reading.done():
            await asyncio.wait([self._reading])

    def close(self) -> None:
        """Stop reading."""
        for task in (self._reading, *self._finding.values()):
            if task is not None:
                task.cancel()

    async def find(self, run: str, wanted: set[Key]) -> dict[Key, ModelResponse]:
        """What was answered of these prompts, however long ago.

        What is asked for while the kept answers are being read goes with the next reading: all of a
        round may have to be read.

        Raises:
            BusError: they can't be read.
        """
        future: asyncio.Future[dict[Key, ModelResponse]]
        future = asyncio.get_running_loop().create_future()
        self._wanted.setdefault(run, []).append((wanted, future))
        if run not in self._finding:
            self._finding[run] = asyncio.ensure_future(self._find(run))
        return await future

    async def _find(self, run: str) -> None:
        try:
            while asked := self._wanted.pop(run, None):
                try:
                    found = await self._kept.find(run, set().union(*(keys for keys, _ in asked)))
                except BusError as error:
                    for _, future in asked:
                        if not future.done():
                            future.set_exception(BusError(str(error)))
                    continue
                for keys, future in asked:
                    if not future.done():
                        future.set_result({key: found[key] for key in keys if key in found})
        finally:
            del self._finding[run]

    def get(self, run: str, key: Key) -> ModelResponse | None:
        """The answer to a prompt, if it came of late."""
        return self._held.get((run, key))

    def put(self, run: str, key: Key, response: ModelResponse) -> None:
        """Remember an answer, or a failure of the prompt's own; the first to a prompt stays."""
        if response.error_kind not in FINAL or (run, key) in self._held:
            return
        self._held[run, key] = response
        self._characters += len(response.text)
        while len(self._held) > _MOST or self._characters > _MOST_CHARACTERS:
            self._characters -= len(self._held.popitem(last=False)[1].text)

    def forget(self, run: str) -> None:
        """A run begins that has the name of an earlier one, perhaps."""
        for held in [held for held in self._held if held[0] == run]:
            self._characters -= len(self._held.pop(held).text)
