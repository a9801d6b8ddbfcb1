"""The writing of one population: who is missing, who is alike, when it is complete.

One of the persona services does this for a population; all of them write its people. What was
written is in a stream, so another can take over, and goes on with whoever is missing. A text counts
for a row only if it was written for that very row (its fingerprint), so that what an earlier work
of the same name left is used where it fits, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from persona_service.sources import categories_of, open_people
from populace.personas.people import PROBLEM, TEXT, attributes, read_rows
from populace.personas.sampling import save
from populace.personas.writing.alike import alike
from populace.personas.writing.writer import fingerprint
from shared.bus import Bus, KeyValue, Message
from shared.codec import from_public, pack_plain
from shared.errors import BusError, PopulaceError, RevisionConflictError
from shared.ids import new_id
from shared.logs import get_logger
from shared.messages.persona import EnrichRequest, JobInfo, JobRecord
from shared.settings import Settings
from shared.streams import append_patiently

_log = get_logger(__name__)

PART = 4
"""People in one entry of the queue."""
_TELL_EVERY = 0.5
_IDLE = 0.25
_LOST_AFTER = 20.0
_TIMES_LOST = 5
_ALL_FAIL = 20
_EXAMPLES = 5
_PUBLISHING = 32


class Cancelled(Exception):  # noqa: N818 - no error
    """The writing was cancelled."""


class Superseded(Exception):  # noqa: N818 - no error
    """Another service sees to it by now."""


async def read_record(bucket: KeyValue, name: str) -> tuple[JobRecord, int] | None:
    """What is known of a population's writing, rows included, and its revision."""
    entry = await bucket.get(name)
    if entry is None:
        return None
    record = JobRecord.model_validate_json(entry.value)
    if record.rows_apart:
        rows = await bucket.get(f"{name}.rows")
        record.request.rows = json.loads(rows.value) if rows is not None else []
    return record, entry.revision


def record_bytes(record: JobRecord) -> bytes:
    """A record as it is kept: without the rows, which have an entry of their own."""
    exclude = {"request": {"rows"}} if record.rows_apart else None
    return record.model_dump_json(exclude=exclude).encode()


def kept_people(
    request: EnrichRequest, rows: list[dict[str, Any]], settings: Settings
) -> dict[int, dict[str, Any]]:
    """Who has a text already, by number: in the people themselves, or stored under the name."""
    if request.again:
        return {}
    path = settings.personas_dir / f"{request.name}.parquet"
    before = read_rows(path).to_pylist() if path.is_file() else []
    kept: dict[int, dict[str, Any]] = {}
    for i, row in enumerate(rows):
        if row.get(TEXT):
            kept[i] = row
        elif i < len(before) and before[i].get(TEXT):
            held = before[i]
            if all(held.get(k) == v for k, v in attributes(row).items()):
                kept[i] = held
    return kept


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
        self._me = f"{bus.process}/{new_id('f')}"
        self._bucket: KeyValue
        self._record: JobRecord
        self._revision = 0
        self._rows: list[dict[str, Any]] = []
        self._fingerprints: list[str] = []
        self._kept: dict[int, dict[str, Any]] = {}
        self._done: dict[int, dict[int, dict[str, Any]]] = {}
        """Turn to row to what was written."""
        self._told = 0.0
        self._heard = 0.0

    async def run(self) -> None:
        """Work until the population is stored, or its writing was cancelled or has failed.

        Raises:
            Superseded: another service took it over meanwhile.
            BusError: the broker can't be reached; the work is to be taken up again.
        """
        self._bucket = await self._bus.bucket(self._subjects.bucket_persona_jobs)
        found = await read_record(self._bucket, self._name)
        if found is None or found[0].info.over:
            return
        self._record, self._revision = found
        self._record.owner = self._me
        try:
            await self._work()
        except Cancelled:
            await self._purge_parts()
            _log.info("writing was cancelled", population=self._name)
        except (BusError, Superseded, asyncio.CancelledError):
            raise
        except PopulaceError as error:
            await self._end("failed", str(error))
        except Exception as error:
            _log.exception("the writing of a population failed", population=self._name)
            await self._end("failed", f"internal error: {type(error).__name__}: {error}")

    async def _work(self) -> None:
        request = self._record.request
        await asyncio.to_thread(self._read)
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
        if wanted and not self._record.info.written:
            raise PopulaceError(
                f"none of {len(wanted):,} people could be written, the first since "
                f"{self._record.info.examples[0]}"
            )
        await self._store()

    def _read(self) -> None:
        request = self._record.request
        table, _ = open_people(request, self._settings)
        self._rows = table.to_pylist()
        self._fingerprints = [fingerprint(self._plain(i)) for i in range(len(self._rows))]
        self._record.categories = categories_of(table)
        self._kept = kept_people(request, self._rows, self._settings)

    # One pass over the people
    async def _turn(self, feed: Any, turn: int, wanted: dict[int, str | None]) -> None:
        """Have these rows written, and wait until all of them are.

        Raises:
            PopulaceError: some never came back, however often they were queued.
        """
        done = self._done.setdefault(turn, {})
        parts = list(_parts(sorted(set(wanted) - set(done))))
        await self._spread(parts, turn, wanted)
        self._heard = time.monotonic()
        lost = 0
        async for message in _until(feed, lambda: wanted.keys() <= done.keys()):
            if message is not None:
                self._take(message)
                self._check_failures()
            elif time.monotonic() - self._heard > _LOST_AFTER:
                left = [p for p in parts if not done.keys() >= set(p)]
                if await self._spread(left, turn, wanted):
                    lost += 1
                    if lost > _TIMES_LOST:
                        raise PopulaceError(f"{len(left) * PART} people never came back")
                self._heard = time.monotonic()
            await self._tell()

    async def _spread(self, parts: list[list[int]], turn: int, unlike: dict[int, Any]) -> int:
        """Put people into the queue, unless they are there already; gives how many parts."""
        slots = asyncio.Semaphore(_PUBLISHING)
        work = self._subjects.stream_persona_work

        async def put(rows: list[int]) -> int:
            async with slots:
                subject = self._subjects.persona_part(
                    self._name, self._record.generation, f"{turn}-{rows[0] // PART}"
                )
                if await self._bus.last(work, subject) is not None:
                    return 0
                people = [
                    [row, self._plain(row), unlike[row], self._fingerprints[row]] for row in rows
                ]
                body = [self._name, self._record.generation, turn, people]
                # No name for the message: the broker would refuse to queue it a second time.
                await append_patiently(
                    self._bus, subject, pack_plain(body), headers={}, message_id=""
                )
                return 1

        return sum(await asyncio.gather(*(put(rows) for rows in parts)))

    def _plain(self, row: int) -> dict[str, Any]:
        return attributes(self._rows[row])

    def _take(self, message: Message) -> None:
        _, row_, turn_ = message.subject.rsplit(".", 2)
        row, turn = int(row_), int(turn_)
        written = from_public(message.data)
        if not counts(written, self._record, self._print_of(row)):
            return
        done = self._done.setdefault(turn, {})
        if row in done:
            return
        self._heard = time.monotonic()
        done[row] = written
        info = self._record.info
        info.requests += written["requests"]
        info.tokens_in += written["tokens_in"]
        info.tokens_out += written["tokens_out"]
        info.rewritten += written["rewrites"]
        info.backend = written.get("backend") or info.backend
        if turn > 0:
            info.anew += 1
            return
        if written["text"]:
            info.written += 1
        else:
            info.failed += 1
            if len(info.examples) < _EXAMPLES:
                info.examples.append(f"{row}: {written['problem']}")

    def _print_of(self, row: int) -> str:
        return self._fingerprints[row] if row < len(self._fingerprints) else ""

    def _check_failures(self) -> None:
        """Stop a work that only costs.

        Raises:
            PopulaceError: everybody has failed so far, and the model is to blame.
        """
        info = self._record.info
        if info.written or info.failed < min(_ALL_FAIL, info.to_write):
            return
        problems = [w["problem"] for w in self._done[0].values()]
        blamed = ("unreachable:", "refused:", "timeout:", "rate_limit:", "internal:")
        if all(p.startswith(blamed) for p in problems):
            raise PopulaceError(f"the model answered none of {info.failed} requests: {problems[0]}")

    def _latest(self, row: int) -> dict[str, Any]:
        """A row as it was written last, if that could be used; else as it was before."""
        for turn in sorted(self._done, reverse=True):
            written = self._done[turn].get(row)
            if written is not None and written["text"]:
                return written
        return self._done[0].get(row) or {"text": None, "background": "", "problem": "is missing"}

    async def _find_alike(self) -> dict[int, int]:
        """Who is nearly the same as someone with a lower number, or as someone kept."""
        threshold = self._record.request.alike
        if threshold is None:
            return {}

        def find() -> dict[int, int]:
            texts = [
                (row, str(held[TEXT]).partition("\n")[2] or str(held[TEXT]))
                for row, held in self._kept.items()
            ]
            for row in sorted(self._done.get(0, {})):
                found = self._latest(row)
                if found["text"]:
                    texts.append((row, found["background"]))
            doubles = alike(texts, threshold)
            return {row: other for row, other in doubles.items() if row not in self._kept}

        return await asyncio.to_thread(find)

    # Telling, storing
    async def _tell(self, *, at_once: bool = False) -> None:
        """Write down how far it is.

        Raises:
            Cancelled: someone wants it to end.
            Superseded: another service sees to it by now.
        """
        now = time.monotonic()
        if not at_once and now - self._told < _TELL_EVERY:
            return
        self._told = now
        self._record.info.updated = time.time()
        try:
            self._revision = await self._bucket.update(
                self._name, record_bytes(self._record), self._revision
            )
        except RevisionConflictError:
            entry = await self._bucket.get(self._name)
            held = None if entry is None else JobRecord.model_validate_json(entry.value)
            mine = held is not None and held.generation == self._record.generation
            if held is not None and mine and held.info.state == "cancelled":
                raise Cancelled from None
            raise Superseded from None

    async def _purge_parts(self) -> None:
        await self._bus.purge(
            self._subjects.stream_persona_work,
            self._subjects.persona_part(self._name, self._record.generation),
        )

    async def _end(self, state: str, reason: str = "") -> None:
        """Say that it is over. What was written stays unless it is stored: it was paid for."""
        info = self._record.info
        info.state, info.reason = state, reason  # type: ignore[assignment]
        with contextlib.suppress(Cancelled):
            await self._tell(at_once=True)
        await self._purge_parts()
        if state == "finished":
            await self._bus.purge(
                self._subjects.stream_persona_written, self._subjects.persona_written(self._name)
            )
        _log.info("writing has ended", population=self._name, state=state, reason=reason)

    async def _store(self) -> None:
        path = self._settings.personas_dir.resolve() / f"{self._name}.parquet"
        await self._tell(at_once=True)  # whoever was superseded must not store
        await asyncio.to_thread(lambda: save(self._table(), path))
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
            problem = None if found["text"] else found["problem"]
            rows.append(
                {**found.get("values", {}), **self._plain(i), TEXT: found["text"], PROBLEM: problem}
            )
        names = list(dict.fromkeys(name for row in rows for name in row))
        names = [*attributes(dict.fromkeys(names)), TEXT, PROBLEM]
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        told = {
            "written": self._record.request.model_dump(mode="json", exclude={"rows"}),
            "info": self._record.info.model_dump(mode="json"),
        }
        metadata = {b"populace": json.dumps(told, ensure_ascii=False).encode()}
        return table.replace_schema_metadata(metadata)


def counts(written: dict[str, Any], record: JobRecord, row_print: str) -> bool:
    """Whether what was written once is of use for a row now."""
    own = written.get("generation") == record.generation
    if written.get("fingerprint") != row_print:
        return False  # of another row that had this number
    return own or (bool(written["text"]) and not record.request.again)


def _parts(rows: Iterable[int]) -> Iterable[list[int]]:
    """Rows by entries of the queue; which rows share one never changes."""
    for _, part in itertools.groupby(rows, lambda row: row // PART):
        yield list(part)


async def _until(feed: Any, complete: Any) -> Any:
    """What the feed gives, until it is complete."""
    while not complete():
        yield await anext(feed)
