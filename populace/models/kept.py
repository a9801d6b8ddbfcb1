"""Answers that the broker keeps: by run, and by what was asked."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from populace.models.serving import FINAL, Cache
from shared.bus import Bus, Message
from shared.codec import from_public, pack_plain
from shared.errors import BusError, CodecError
from shared.ids import new_id
from shared.logs import get_logger
from shared.messages.model import ModelRequest, ModelResponse
from shared.streams import append_patiently
from shared.subjects import Subjects

_log = get_logger(__name__)

Key = tuple[int, str, int, int, int]


class Part(Container[Key]):
    """Prompts of some agents: a worker wants the answers of those that it holds.

    Args:
        agents: their numbers, by population; None: all of all populations.
    """

    def __init__(self, agents: Mapping[str, Sequence[range]] | None = None) -> None:
        self._agents = agents

    def __contains__(self, key: object) -> bool:
        if self._agents is None:
            return True
        _, population, agent, _, _ = cast(Key, key)
        return any(agent in numbers for numbers in self._agents.get(population, ()))


EVERYBODY = Part()


def asks_the_same(one: ModelRequest, other: ModelRequest) -> bool:
    """Whether two prompts differ in nothing but their numbers."""
    return one == replace(other, number=one.number)


def fingerprint(request: ModelRequest) -> bytes:
    """Of a prompt, but for its number: two that ask the same have the same.

    Raises:
        CodecError: it holds what can't travel.
    """
    return hashlib.blake2b(pack_plain(request.columns()[1:]), digest_size=12).digest()


class KeptAnswers:
    """Answers in the order in which they came, with what was asked, by run and round.

    A message is a list of rows ``[key, model, request, response]``: the key as in
    ``ModelRequest.key``, request and response as their columns.
    """

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self._name = new_id("kept")
        self._numbers = 0

    async def keep(self, run: str, pairs: list[tuple[ModelRequest, ModelResponse]]) -> None:
        """Have answers of one run stored.

        Raises:
            BusError: the broker does not take them.
        """
        rounds: dict[int, list[Any]] = {}
        for request, response in pairs:
            row = [list(request.key), request.model, request.columns(), response.columns()]
            rounds.setdefault(request.key[3], []).append(row)
        for round_number, rows in rounds.items():
            await self._store(self._subjects.model_kept(run, round_number), rows)

    async def _store(self, subject: str, rows: list[Any]) -> None:
        data = pack_plain(rows)
        if len(data) > self._bus.max_payload - 1024 and len(rows) > 1:
            half = len(rows) // 2
            await self._store(subject, rows[:half])
            await self._store(subject, rows[half:])
            return
        if len(data) > self._bus.max_payload - 1024:
            _log.warning("an answer is too long to be kept", subject=subject, bytes=len(data))
            return
        self._numbers += 1
        name = f"{self._name}/{self._numbers}"
        await append_patiently(self._bus, subject, data, headers={}, message_id=name)

    async def find(
        self, run: str, wanted: Iterable[ModelRequest], newest: int = 0
    ) -> dict[Key, ModelResponse]:
        """Answers to these prompts that were kept before.

        Args:
            run: whose they are.
            wanted: the prompts; what else was asked under their keys does not count.
            newest: how many of the last messages to look into; 0: all of these rounds.

        Raises:
            BusError: the stream can't be read.
        """
        found: dict[Key, ModelResponse] = {}
        asked = {request.key: request for request in wanted}
        subjects = tuple({self._subjects.model_kept(run, key[3]) for key in asked})
        async for key, request, response in self._rows(subjects, asked, newest):
            same = asks_the_same(ModelRequest.from_columns(request), asked[key])
            if same and response.error_kind in FINAL:
                found.setdefault(key, response)
                if len(found) == len(asked):
                    break
        return found

    async def of_round(
        self, run: str, round_number: int, part: Part = EVERYBODY
    ) -> dict[Key, dict[bytes, ModelResponse]]:
        """What was kept of a round and stays so; of two answers to one prompt, the first.

        Returns:
            By key, and by ``fingerprint`` of what was asked under it.

        Raises:
            BusError: the stream can't be read.
        """
        found: dict[Key, dict[bytes, ModelResponse]] = {}
        subjects = (self._subjects.model_kept(run, round_number),)
        async for key, request, response in self._rows(subjects, part):
            if response.error_kind in FINAL:
                asked = fingerprint(ModelRequest.from_columns(request))
                found.setdefault(key, {}).setdefault(asked, response)
        return found

    async def asked_in(
        self, run: str, round_number: int, part: Part = EVERYBODY
    ) -> dict[Key, _Pairs]:
        """What came of a round, passing failures too, with what was asked.

        Returns:
            By key; several where the round was played again and something else was asked, the
            last at the end.

        Raises:
            BusError: the stream can't be read.
        """
        found: dict[Key, _Pairs] = {}
        subjects = (self._subjects.model_kept(run, round_number),)
        async for key, columns, response in self._rows(subjects, part):
            _add(found.setdefault(key, []), ModelRequest.from_columns(columns), response)
        return found

    async def of_agent(
        self, run: str, round_number: int, population: str, agent: int, until: float
    ) -> tuple[list[tuple[ModelRequest, ModelResponse]], bool]:
        """What one agent asked in a round, in order, and what was answered.

        All of the round is read for it, until that time (``time.monotonic``) has come.

        Returns:
            The pairs, and whether the round was read to its end.

        Raises:
            BusError: the stream can't be read.
        """
        found: dict[Key, _Pairs] = {}
        whole = True
        subjects = (self._subjects.model_kept(run, round_number),)
        own = Part({population: (range(agent, agent + 1),)})
        async for message in self._bus.read(self._subjects.stream_kept, subjects):
            for key, columns, response in _rows_of(message, own):
                _add(found.setdefault(key, []), ModelRequest.from_columns(columns), response)
            if time.monotonic() > until:
                whole = False
                break
        return [found[key][-1] for key in sorted(found, key=lambda k: k[4])], whole

    async def newest(self, messages: int) -> AsyncIterator[tuple[str, ModelRequest, ModelResponse]]:
        """What so many last messages hold, of all runs: run, request and response.

        Raises:
            BusError: the stream can't be read.
        """
        stream, everything = self._subjects.stream_kept, (self._subjects.model_kept(),)
        async for message in self._bus.read(stream, everything, newest=messages):
            run = self._subjects.run_of_kept(message.subject)
            for _, request, response in _rows_of(message, EVERYBODY):
                yield run, ModelRequest.from_columns(request), response

    async def _rows(
        self, subjects: tuple[str, ...], wanted: Container[Key], newest: int = 0
    ) -> AsyncIterator[tuple[Key, list[Any], ModelResponse]]:
        stream = self._subjects.stream_kept
        async for message in self._bus.read(stream, subjects, newest=newest):
            for row in _rows_of(message, wanted):
                yield row


_Pairs = list[tuple[ModelRequest, ModelResponse]]


def _add(pairs: _Pairs, request: ModelRequest, response: ModelResponse) -> None:
    """Take a pair to others of its key: the first answer to each prompt stays."""
    for place, (asked, held) in enumerate(pairs):
        if asks_the_same(asked, request):
            if held.error_kind not in FINAL:
                pairs[place] = request, response
            return
    pairs.append((request, response))


def _rows_of(
    message: Message, wanted: Container[Key]
) -> list[tuple[Key, list[Any], ModelResponse]]:
    try:
        return [
            (key, request, ModelResponse.from_columns(response))
            for key_, _, request, response in from_public(message.data)
            if (key := cast(Key, tuple(key_))) in wanted
        ]
    except (CodecError, ValueError, TypeError) as error:
        _log.error("kept answers can't be read", subject=message.subject, error=str(error))
        return []


class SharedCache(Cache):
    """Answers across runs, kept by the broker."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects

    async def get(self, key: str) -> ModelResponse | None:
        """See ``Cache.get``."""
        try:
            found = await self._bus.last(
                self._subjects.stream_cache, self._subjects.model_cache(key)
            )
            return None if found is None else ModelResponse.from_columns(from_public(found.data))
        except (BusError, CodecError) as error:
            _log.warning("a kept answer can't be had", error=str(error))
            return None

    async def put(self, key: str, response: ModelResponse) -> None:
        """See ``Cache.put``."""
        try:
            data = pack_plain(response.columns())
        except CodecError:
            return  # it can't be given out either, and whoever has it is told
        if len(data) > self._bus.max_payload - 1024:
            _log.warning("an answer is too long to be kept for other runs", bytes=len(data))
            return
        try:
            await append_patiently(
                self._bus,
                self._subjects.model_cache(key),
                data,
                headers={},
                message_id=f"{key}/{response.error_kind}",
            )
        except BusError as error:
            _log.warning("an answer can't be kept for other runs", error=str(error))
