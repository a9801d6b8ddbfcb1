"""Answers requests about populations, and takes part in writing them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel

from persona_service import crew as crew_
from persona_service.crew import Crew, Job
from persona_service.foreman import (
    Foreman,
    Superseded,
    kept_people,
    read_record,
    record_bytes,
)
from persona_service.sources import open_people, open_sampler, open_source
from populace.personas.fit import fit_report
from populace.personas.sampling import refuse_to_replace_texts, save
from shared.bus import Delivery, KeyValue, Message, keep_alive
from shared.codec import to_json
from shared.errors import InvalidInputError, PopulaceError, RevisionConflictError
from shared.ids import check_token, new_id
from shared.logs import get_logger
from shared.messages.control import CheckModel, ModelChecked
from shared.messages.model import pool_name
from shared.messages.persona import (
    EnrichRequest,
    FitReply,
    FitRequest,
    JobInfo,
    JobRecord,
    JobRequest,
    PeopleRequest,
    Sampled,
    SampleRequest,
)
from shared.service import ServiceContext, answer_request, ask
from shared.streams import (
    append_patiently,
    ensure_stream,
    ensure_streams,
    persona_work_stream,
    persona_written_stream,
)

_log = get_logger(__name__)

Request = TypeVar("Request", bound=BaseModel)

_CHECK_WITHIN = 120.0
_MODEL_SERVICE_WITHIN = 10.0
_FOREMEN = 8
_HEADROOM = 4096
_MOST_ROWS = 200_000
_ATTEMPTS = 5


class PersonaService:
    """One of the persona services of an installation."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._bus = context.bus
        self._settings = context.settings
        self._subjects = context.settings.subjects
        self._crew = Crew(self._bus, self._settings)
        self._foremen: set[asyncio.Task[None]] = set()
        self._in_hand: set[int] = set()
        self.sampled = 0

    # Requests
    async def sample(self, request: SampleRequest) -> Sampled:
        """Draw people."""
        if request.store is not None:
            check_token(request.store, "the name")
        answer = await asyncio.to_thread(self._sample, request)
        self.sampled += answer.count
        return answer

    def _sample(self, request: SampleRequest) -> Sampled:
        """In a thread: a large population must not hold up small questions."""
        source = open_source(request, self._settings)
        stop = source.size if request.stop is None else request.stop
        if not request.start <= stop <= source.size:
            raise InvalidInputError(
                f"start and stop: there are people 0 to {source.size}, "
                f"not {request.start} to {stop}"
            )
        answer = Sampled(count=stop - request.start)
        if request.store is None and answer.count > _MOST_ROWS:
            raise InvalidInputError(
                f"{answer.count:,} people are more than one message holds: ask for fewer with "
                "start and stop, or store them"
            )
        table = source.rows(request.start, stop)
        if source.sampler is not None and answer.count == source.size:
            answer.fit = fit_report(source.sampler, table).model_dump()
        if request.store is not None:
            path = self._settings.personas_dir.resolve() / f"{request.store}.parquet"
            refuse_to_replace_texts(path)
            save(table, path)
            answer.file = str(path)
            return answer
        answer.rows = table.to_pylist()
        size = len(to_json(answer.model_dump(mode="json")))
        if size > self._bus.max_payload - _HEADROOM:
            raise InvalidInputError(
                f"{answer.count:,} people make {size:,} bytes, more than one message holds "
                f"({self._bus.max_payload:,}): ask for fewer with start and stop, or store them"
            )
        return answer

    async def fit(self, request: FitRequest) -> FitReply:
        """Compare people with what a population asks for."""

        def compare() -> dict[str, Any]:
            sampler = open_sampler(request.population, self._settings)
            people = (
                PeopleRequest(people=request.people)
                if isinstance(request.people, str)
                else PeopleRequest(rows=request.people)
            )
            table, _ = open_people(people, self._settings)
            return fit_report(sampler, table).model_dump()

        return FitReply(fit=await asyncio.to_thread(compare))

    async def enrich(self, request: EnrichRequest) -> JobInfo:
        """Begin to have a population written, or say how far that is."""
        bucket = await self._bus.bucket(self._subjects.bucket_persona_jobs)
        for _ in range(_ATTEMPTS):
            found = await read_record(bucket, request.name)
            before = None if found is None else found[0]
            if before is not None and not before.info.over:
                if not _same(before.request, request):
                    raise InvalidInputError(
                        f"the population {request.name!r} is being written in another way; wait "
                        "for it, cancel it, or choose another name"
                    )
                if before.info.state == "writing":
                    await self._queue(before, only_if_gone=True)
                return before.info
            missing = await asyncio.to_thread(self._missing, request)
            if before is not None and before.info.state == "finished" and not missing:
                return before.info
            info = JobInfo(name=request.name, state="checking")
            fresh = JobRecord(
                request=request,
                info=info,
                generation=new_id("g"),
                rows_apart=request.rows is not None,
            )
            try:
                if request.rows is not None:
                    await bucket.put(f"{request.name}.rows", to_json(request.rows))
                revision = await bucket.write(
                    request.name, record_bytes(fresh), found[1] if found is not None else 0
                )
            except RevisionConflictError:
                continue  # someone else was first; look again
            return await self._begin(bucket, fresh, revision, before)
        raise PopulaceError(f"the population {request.name!r} is asked for by too many at once")

    async def _begin(
        self, bucket: KeyValue, record: JobRecord, revision: int, before: JobRecord | None
    ) -> JobInfo:
        """Check the model, then queue the population; a cancellation in between counts."""
        name = record.request.name
        try:
            await self._check_model(record.request)
        except PopulaceError as error:
            with contextlib.suppress(RevisionConflictError):
                if before is not None:
                    await bucket.write(name, record_bytes(before), revision)
                else:
                    record.info.state, record.info.reason = "failed", str(error)
                    await bucket.write(name, record_bytes(record), revision)
            raise
        record.info.state = "writing"
        try:
            await bucket.write(name, record_bytes(record), revision)
        except RevisionConflictError:
            found = await read_record(bucket, name)
            return record.info if found is None else found[0].info
        await self._queue(record, only_if_gone=False)
        return record.info

    async def _queue(self, record: JobRecord, *, only_if_gone: bool) -> None:
        """Put a population into the queue; with ``only_if_gone``, if it is not there."""
        subject = self._subjects.persona_job(record.request.name)
        work = self._subjects.stream_persona_work
        if only_if_gone and await self._bus.last(work, subject) is not None:
            return
        await append_patiently(
            self._bus, subject, record.request.name.encode(), headers={}, message_id=new_id("j")
        )

    def _missing(self, request: EnrichRequest) -> int:
        """How many people have no text yet; complains of whatever can be known beforehand."""
        Job(self._bus, self._settings, JobRecord(request=request, info=JobInfo(name="-")), "x")
        table, _ = open_people(request, self._settings)
        if table.num_rows == 0:
            raise InvalidInputError("there are no people to write")
        rows = table.to_pylist()
        return len(rows) - len(kept_people(request, rows, self._settings))

    async def _check_model(self, request: EnrichRequest) -> None:
        pools = await self._bus.bucket(self._subjects.bucket_pools)
        await pools.put(pool_name(request.model), request.model.model_dump_json().encode())
        if request.model.backend == "scripted":
            return
        checked = await ask(
            self._bus,
            self._subjects.model_check,
            CheckModel(spec=request.model),
            ModelChecked,
            timeout=_CHECK_WITHIN,
            patience=_MODEL_SERVICE_WITHIN,
        )
        if not checked.ok:
            raise InvalidInputError(f"model: {checked.error}")

    async def job(self, request: JobRequest) -> JobInfo:
        """Say how far the writing of a population is, or stop it."""
        bucket = await self._bus.bucket(self._subjects.bucket_persona_jobs)
        while True:
            entry = await bucket.get(request.name)
            if entry is None:
                raise InvalidInputError(f"no population named {request.name!r} was ever written")
            record = JobRecord.model_validate_json(entry.value)
            if request.action == "status" or record.info.over:
                return record.info
            record.info.state = "cancelled"
            try:
                await bucket.update(request.name, record_bytes(record), entry.revision)
            except RevisionConflictError:
                continue
            return record.info

    # Work
    async def _lead(self) -> None:
        """Take populations from the queue, and see each through."""
        consumer = await self._bus.consumer(
            self._subjects.stream_persona_work,
            durable="jobs",
            subjects=(self._subjects.persona_job(),),
            ack_wait=crew_.ACK_WAIT,
        )
        while not self._context.stopping.is_set():
            if len(self._foremen) >= _FOREMEN:
                await asyncio.wait(self._foremen, return_when=asyncio.FIRST_COMPLETED)
                continue
            for delivery in await consumer.fetch(1, timeout=2.0):
                if delivery.sequence in self._in_hand:
                    continue  # this process was too slow to say that it is still at work
                self._in_hand.add(delivery.sequence)
                task = asyncio.ensure_future(self._see_through(delivery))
                self._foremen.add(task)
                task.add_done_callback(self._foremen.discard)

    async def _see_through(self, delivery: Delivery) -> None:
        alive = asyncio.ensure_future(keep_alive(delivery, crew_.STILL_AT_WORK))
        try:
            await Foreman(self._bus, self._settings, delivery.data.decode()).run()
            await delivery.ack()
        except Superseded:
            # Not acknowledged: the entry is the other one's by now.
            _log.warning("another service sees to a population", name=delivery.data.decode())
        except PopulaceError as error:
            _log.warning("a population will be taken up again", error=str(error))
            with contextlib.suppress(PopulaceError):
                await delivery.nak(1.0)
        finally:
            alive.cancel()
            self._in_hand.discard(delivery.sequence)

    async def _always(self, work: Callable[[], Awaitable[None]]) -> None:
        while not self._context.stopping.is_set():
            try:
                await work()
            except PopulaceError as error:
                _log.warning("taking work starts anew", error=str(error))
                await asyncio.sleep(1.0)

    def _endpoint(
        self, model: type[Request], handler: Callable[[Request], Awaitable[BaseModel]]
    ) -> Callable[[Message], Awaitable[None]]:
        running: set[asyncio.Task[None]] = set()

        async def take(message: Message) -> None:
            # A task each: a large population must not hold up small questions.
            task = asyncio.ensure_future(answer_request(self._bus, message, model, handler))
            running.add(task)
            task.add_done_callback(running.discard)

        return take

    async def run(self) -> None:
        """Serve until told to stop."""
        await ensure_streams(self._bus, self._subjects)
        await ensure_stream(self._bus, persona_work_stream(self._subjects))
        await ensure_stream(self._bus, persona_written_stream(self._subjects))
        await self._context.announce(
            "Draws populations from distributions and has their people written",
            stats=lambda: {
                "sampled": self.sampled,
                "written": self._crew.written,
                "failed": self._crew.failed,
                "populations": len(self._foremen),
            },
            endpoints={
                "sample": (
                    self._subjects.persona("sample"),
                    self._endpoint(SampleRequest, self.sample),
                ),
                "fit": (self._subjects.persona("fit"), self._endpoint(FitRequest, self.fit)),
                "enrich": (
                    self._subjects.persona("enrich"),
                    self._endpoint(EnrichRequest, self.enrich),
                ),
                "job": (self._subjects.persona("job"), self._endpoint(JobRequest, self.job)),
            },
        )
        work = [
            asyncio.ensure_future(self._always(self._lead)),
            asyncio.ensure_future(self._always(self._crew.run)),
        ]
        _log.info("persona service is up")
        try:
            await self._context.stopping.wait()
        finally:
            self._crew.closing = True
            for task in (*work, *self._foremen):
                task.cancel()
            await asyncio.wait([*work, *self._foremen], timeout=5)
            await self._crew.close()


def _same(one: EnrichRequest, other: EnrichRequest) -> bool:
    def essence(request: EnrichRequest) -> str:
        text = request.model_dump_json(exclude={"again"})
        return hashlib.blake2b(text.encode()).hexdigest()

    return essence(one) == essence(other)


async def main(context: ServiceContext) -> None:
    """The persona service."""
    await PersonaService(context).run()
