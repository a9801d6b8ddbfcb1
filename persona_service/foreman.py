"""The writing of one population: who is missing, who is alike, when it is complete.

One of the persona services does this for a population; all of them write its people. What was
written is in a stream, so another can take over, and goes on with whoever is missing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from persona_service.sources import categories_of, open_people
from populace.personas.people import PROBLEM, TEXT, read_rows
from populace.personas.sampling import save
from populace.personas.writing.alike import alike
from shared.bus import Bus, Message
from shared.codec import from_public, pack_plain
from shared.errors import BusError, PopulaceError, RevisionConflictError
from shared.logs import get_logger
from shared.messages.persona import JobInfo, JobRecord
from shared.settings import Settings
from shared.streams import append_patiently

_log = get_logger(__name__)

PART = 4
"""People in one entry of the queue."""
_TELL_EVERY = 0.5
_IDLE = 0.25
_LOST_AFTER = 20.0
_ALL_FAIL = 20
_EXAMPLES = 5
_PUBLISHING = 32


class Cancelled(Exception):  # noqa: N818 - no error
    """The writing was cancelled."""


class Foreman:
    """Sees to it that all people of a population get written, and stores them.

    Args:
        bus: this service's connection.
        settings: of this service.
        name: the population's.
    """

    def __init__(self, bus: Bus, settings: Settings, name: str) -> None:
        self._bus = bus
        self._settings = settings
        self._subjects = settings.subjects
        self._name = name
        self._record: JobRecord
        self._revision = 0
        self._rows: list[dict[str, Any]] = []
        self._kept: dict[int, dict[str, Any]] = {}
        self._done: dict[int, dict[int, dict[str, Any]]] = {}
        """Turn to row to what was written."""
        self._told = 0.0
        self._heard = 0.0

    async def run(self) -> None:
        """Work until the population is stored, or its writing was cancelled or has failed."""
        bucket = await self._bus.bucket(self._subjects.bucket_persona_jobs)
        entry = await bucket.get(self._name)
        if entry is None:
            return
        self._record, self._revision = JobRecord.model_validate_json(entry.value), entry.revision
        if self._record.info.over:
            return
        try:
            await self._work()
        except Cancelled:
            await self._bus.purge(
                self._subjects.stream_persona_work, self._subjects.persona_part(self._name)
            )
            _log.info("writing was cancelled", population=self._name)
        except PopulaceError as error:
            if isinstance(error, BusError):
                raise  # another attempt, by this service or another
            await self._end("failed", str(error))

    async def _work(self) -> None:
        request = self._record.request
        table, _ = await asyncio.to_thread(open_people, request, self._settings)
        self._rows = await asyncio.to_thread(table.to_pylist)
        self._record.categories = categories_of(table)
        await asyncio.to_thread(self._find_kept)
        wanted = [i for i in range(len(self._rows)) if i not in self._kept]
        self._record.info = JobInfo(
            name=self._name,
            total=len(self._rows),
            to_write=len(wanted),
            created=self._record.info.created,
        )
        await self._tell(at_once=True)
        feed = self._bus.replay(
            self._subjects.stream_persona_written,
            (self._subjects.persona_written(self._name),),
            idle=_IDLE,
        )
        try:
            async for message in feed:  # what was written before this foreman came
                if message is None:
                    break
                self._take(message)
            await self._turn(feed, 0, dict.fromkeys(wanted))
            for turn in range(1, request.turns + 1):
                doubles = await self._find_alike()
                if not doubles:
                    break
                unlike = {row: self._latest(other)["background"] for row, other in doubles.items()}
                await self._turn(feed, turn, unlike)
        finally:
            await feed.aclose()  # type: ignore[attr-defined]
        self._record.info.alike = len(await self._find_alike())
        await self._store()

    def _find_kept(self) -> None:
        """People who have a text already: those that ``again`` doesn't ask to write anew."""
        if self._record.request.again:
            return
        path = self._settings.personas_dir / f"{self._name}.parquet"
        before = read_rows(path).to_pylist() if path.is_file() else []
        for i, row in enumerate(self._rows):
            if row.get(TEXT):
                self._kept[i] = row
            elif i < len(before) and before[i].get(TEXT):
                held = before[i]
                if all(held.get(k) == v for k, v in row.items() if k not in (TEXT, PROBLEM)):
                    self._kept[i] = held

    # One pass over the people
    async def _turn(self, feed: Any, turn: int, wanted: dict[int, str | None]) -> None:
        """Have these rows written, and wait until all of them are."""
        done = self._done.setdefault(turn, {})
        parts = list(_parts(sorted(set(wanted) - set(done))))
        await self._spread(parts, turn, wanted)
        self._heard = time.monotonic()
        async for message in _until(feed, lambda: wanted.keys() <= done.keys()):
            if message is not None:
                self._take(message)
                self._check_failures()
            elif time.monotonic() - self._heard > _LOST_AFTER:
                left = [p for p in parts if not done.keys() >= set(p)]
                await self._spread(left, turn, wanted)
                self._heard = time.monotonic()
            await self._tell()

    async def _spread(self, parts: list[list[int]], turn: int, unlike: dict[int, Any]) -> None:
        """Put people into the queue, unless they are there already."""
        slots = asyncio.Semaphore(_PUBLISHING)

        async def put(rows: list[int]) -> None:
            async with slots:
                part = f"{turn}-{rows[0]}"
                subject = self._subjects.persona_part(self._name, part)
                work = self._subjects.stream_persona_work
                if await self._bus.last(work, subject) is not None:
                    return
                people = [[row, self._plain(row), unlike[row]] for row in rows]
                body = [self._name, self._record.generation, turn, people]
                # No name for the message: the broker would refuse to queue it a second time.
                await append_patiently(
                    self._bus, subject, pack_plain(body), headers={}, message_id=""
                )

        await asyncio.gather(*(put(rows) for rows in parts))

    def _plain(self, row: int) -> dict[str, Any]:
        return {k: v for k, v in self._rows[row].items() if k not in (TEXT, PROBLEM)}

    def _take(self, message: Message) -> None:
        _, row, turn = message.subject.rsplit(".", 2)
        done = self._done.setdefault(int(turn), {})
        if int(row) in done:
            return
        self._heard = time.monotonic()
        written = from_public(message.data)
        done[int(row)] = written
        info = self._record.info
        info.requests += written["requests"]
        info.tokens_in += written["tokens_in"]
        info.tokens_out += written["tokens_out"]
        info.rewritten += written["rewrites"]
        info.backend = written.get("backend") or info.backend
        if int(turn) > 0:
            info.anew += 1
            return
        if written["text"]:
            info.written += 1
        else:
            info.failed += 1
            if len(info.examples) < _EXAMPLES:
                info.examples.append(f"{row}: {written['problem']}")

    def _check_failures(self) -> None:
        """Stop a work that only costs.

        Raises:
            PopulaceError: everybody has failed so far, and the model is to blame.
        """
        info = self._record.info
        if info.written or info.failed < min(_ALL_FAIL, info.to_write):
            return
        problems = [w["problem"] for w in self._done[0].values()]
        if all(p.startswith(("unreachable:", "refused:", "timeout:")) for p in problems):
            raise PopulaceError(f"the model answered none of {info.failed} requests: {problems[0]}")

    def _latest(self, row: int) -> dict[str, Any]:
        """A row as it was written last, if that could be used; else as it was before."""
        for turn in sorted(self._done, reverse=True):
            written = self._done[turn].get(row)
            if written is not None and written["text"]:
                return written
        return self._done[0].get(row) or {"text": None, "background": "", "problem": "is missing"}

    async def _find_alike(self) -> dict[int, int]:
        threshold = self._record.request.alike
        if threshold is None:
            return {}
        rows = sorted(self._done.get(0, {}))
        texts = [(row, found["background"]) for row in rows if (found := self._latest(row))["text"]]
        return await asyncio.to_thread(alike, texts, threshold)

    # Telling, storing
    async def _tell(self, *, at_once: bool = False) -> None:
        """Write down how far it is.

        Raises:
            Cancelled: someone wants it to end.
        """
        now = time.monotonic()
        if not at_once and now - self._told < _TELL_EVERY:
            return
        self._told = now
        self._record.info.updated = time.time()
        bucket = await self._bus.bucket(self._subjects.bucket_persona_jobs)
        try:
            self._revision = await bucket.update(
                self._name, self._record.model_dump_json().encode(), self._revision
            )
        except RevisionConflictError:
            raise Cancelled from None

    async def _end(self, state: str, reason: str = "") -> None:
        info = self._record.info
        info.state, info.reason = state, reason  # type: ignore[assignment]
        await self._bus.purge(
            self._subjects.stream_persona_work, self._subjects.persona_part(self._name)
        )
        await self._tell(at_once=True)
        await self._bus.purge(
            self._subjects.stream_persona_written, self._subjects.persona_written(self._name)
        )
        _log.info("writing has ended", population=self._name, state=state, reason=reason)

    async def _store(self) -> None:
        path = self._settings.personas_dir.resolve() / f"{self._name}.parquet"
        await asyncio.to_thread(save, self._table(), path)
        self._record.info.file = str(path)
        await self._end("finished")

    def _table(self) -> pa.Table:
        rows = []
        for i, row in enumerate(self._rows):
            kept = self._kept.get(i)
            if kept is not None:
                rows.append({**row, **kept, PROBLEM: None})
                continue
            found = self._latest(i)
            values = {k: v for k, v in row.items() if k not in (TEXT, PROBLEM)}
            problem = None if found["text"] else found["problem"]
            rows.append(
                {**found.get("values", {}), **values, TEXT: found["text"], PROBLEM: problem}
            )
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        request: dict[str, Any] = self._record.request.model_dump(mode="json", exclude={"rows"})
        told = {b"populace": pack_json({"written": request, "info": self._record.info})}
        return table.replace_schema_metadata(told)


def pack_json(value: dict[str, Any]) -> bytes:
    """What a stored population says of its making."""
    import json

    def plain(item: Any) -> Any:
        return item.model_dump(mode="json") if isinstance(item, JobInfo) else str(item)

    return json.dumps(value, ensure_ascii=False, default=plain).encode()


def _parts(rows: Iterable[int]) -> Iterable[list[int]]:
    left = iter(rows)
    while part := list(itertools.islice(left, PART)):
        yield part


async def _until(feed: Any, complete: Any) -> Any:
    """What the feed gives, until it is complete."""
    while not complete():
        yield await anext(feed)
