"""Writes people: takes a few at a time from the queue, whosoever's population they are of."""

from __future__ import annotations

import asyncio
from typing import Any

from persona_service.foreman import counts
from populace.models.client import QueuedModels
from populace.personas.writing.names import Names
from populace.personas.writing.template import WritingTemplate, load_template
from populace.personas.writing.writer import Writer, Written
from shared.bus import Bus, Delivery, keep_alive
from shared.codec import from_public, pack_plain
from shared.errors import BusError, CodecError, PopulaceError
from shared.logs import get_logger
from shared.messages.model import ModelRequest, ModelResponse
from shared.messages.persona import JobRecord
from shared.settings import Settings
from shared.streams import append_patiently

_log = get_logger(__name__)

_PARTS = 32
"""Entries of the queue that this process has under way at once."""
_MAX_DELIVERIES = 5
_TIDY_EVERY = 2.0
ACK_WAIT = 15.0
STILL_AT_WORK = 5.0


class Job:
    """What is needed to write people of one population."""

    def __init__(self, bus: Bus, settings: Settings, record: JobRecord, box: str) -> None:
        request = record.request
        self.record = record
        self.generation = record.generation
        self.model = request.model
        self.backend = ""
        self.closed = False
        self._client = QueuedModels(
            bus,
            settings.subjects,
            {"default": request.model},
            f"personas-{request.name}-{record.generation}",
            timeout=settings.model_queue_timeout,
            box=box,
        )
        template = (
            WritingTemplate.model_validate(request.template)
            if request.template is not None
            else load_template(request.language)
        )
        seed = request.seed or 0
        self.writer = Writer(
            template,
            self._ask,
            model=request.model,
            seed=seed,
            temperature=request.temperature,
            attempts=request.attempts,
            judge=request.judge,
            names=Names(request.names, seed) if request.names else None,
            categories=record.categories,
        )

    async def start(self) -> None:
        """Begin to hear answers."""
        await self._client.start()

    async def close(self) -> None:
        """Let go."""
        self.closed = True
        await self._client.close()

    async def _ask(self, request: ModelRequest) -> ModelResponse:
        request.number = self._client.next_number()
        response = await self._client.request("default", request)
        self.backend = response.backend or self.backend
        return response


class Crew:
    """The writers of one persona service."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._settings = settings
        self._subjects = settings.subjects
        self._jobs: dict[str, Job] = {}
        self._boxes = 0
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_PARTS)
        self._in_hand: set[int] = set()
        """Entries under way, by their numbers in the stream."""
        self.closing = False
        self.written = 0
        self.failed = 0

    async def run(self) -> None:
        """Take people from the queue for as long as this process lives."""
        consumer = await self._bus.consumer(
            self._subjects.stream_persona_work,
            durable="parts",
            subjects=(self._subjects.persona_part(),),
            ack_wait=ACK_WAIT,
            max_waiting_acks=100_000,
        )
        tidy = asyncio.ensure_future(self._tidy())
        try:
            while not self.closing:
                # One at a time, so that several services share what there is.
                await self._slots.acquire()
                taken = False
                try:
                    for delivery in await consumer.fetch(1, timeout=2.0):
                        if delivery.sequence in self._in_hand:
                            # This process was too slow to say that it is still at work.
                            continue
                        self._in_hand.add(delivery.sequence)
                        taken = True
                        task = asyncio.ensure_future(self._part(delivery))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
                finally:
                    if not taken:
                        self._slots.release()
        finally:
            tidy.cancel()

    async def close(self) -> None:
        """Give up what is under way: others will take it."""
        self.closing = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)
        for job in self._jobs.values():
            await job.close()

    async def _part(self, delivery: Delivery) -> None:
        alive = asyncio.ensure_future(keep_alive(delivery, STILL_AT_WORK))
        try:
            try:
                name, generation, turn, people = from_public(delivery.data)
                people = [(int(r), dict(v), u, str(p)) for r, v, u, p in people]
            except (CodecError, ValueError, TypeError) as error:
                _log.error("an entry of the queue can't be read", error=str(error))
                await delivery.term()
                return
            job = await self._job(name, generation)
            if job is not None:
                died = delivery.attempt - 1 if delivery.attempt > _MAX_DELIVERIES else 0
                await asyncio.gather(
                    *(
                        self._one(job, name, turn, row, values, unlike, row_print, died)
                        for row, values, unlike, row_print in people
                    )
                )
            await delivery.ack()
        except PopulaceError as error:
            # Not acknowledged: it comes again.
            _log.warning("people will be written again", error=str(error))
        finally:
            alive.cancel()
            self._in_hand.discard(delivery.sequence)
            self._slots.release()

    async def _job(self, name: str, generation: str) -> Job | None:
        """What is needed to write for a population; None if that is not wanted any more."""
        async with self._opening:
            held = self._jobs.get(name)
            if held is not None and held.generation == generation:
                return held
            record = await self._record(name)
            if record is None or record.info.over or record.generation != generation:
                return None
            if held is not None:
                await held.close()
            self._boxes += 1
            job = Job(self._bus, self._settings, record, f"p{self._boxes}")
            await job.start()
            self._jobs[name] = job
            return job

    async def _record(self, name: str) -> JobRecord | None:
        bucket = await self._bus.bucket(self._subjects.bucket_persona_jobs)
        entry = await bucket.get(name)
        return None if entry is None else JobRecord.model_validate_json(entry.value)

    async def _one(
        self,
        job: Job,
        name: str,
        turn: int,
        row: int,
        values: dict[str, Any],
        unlike: str | None,
        row_print: str,
        died: int,
    ) -> None:
        subject = self._subjects.persona_written(name, row, turn)
        before = await self._bus.last(self._subjects.stream_persona_written, subject)
        if before is not None and counts(from_public(before.data), job.record, row_print):
            return  # whoever had it before died after it was written
        if died:
            text = f"internal: {died} services died while writing it"
            written = Written(row, values, problem=text)
        else:
            try:
                written = await job.writer.write(row, values, turn=turn, unlike=unlike)
            except Exception as error:
                _log.exception("a person could not be written", population=name, row=row)
                text = f"internal: {type(error).__name__}: {error}"
                written = Written(row, values, problem=text)
            if job.closed:
                return  # nobody wants it any more, and its questions were broken off
        if written.text is None:
            self.failed += 1
        else:
            self.written += 1
        told = {
            **written.as_dict(),
            "backend": job.backend,
            "generation": job.generation,
            "fingerprint": row_print,
        }
        await append_patiently(
            self._bus,
            subject,
            pack_plain(told),
            headers={},
            message_id=f"{name}/{job.generation}/{row}/{turn}",
        )

    async def _tidy(self) -> None:
        """Let go of populations that are complete, or not wanted any more."""
        while not self.closing:
            await asyncio.sleep(_TIDY_EVERY)
            try:
                for name, job in list(self._jobs.items()):
                    record = await self._record(name)
                    if record is None or record.info.over or record.generation != job.generation:
                        self._jobs.pop(name, None)
                        await job.close()
            except BusError as error:
                _log.warning("jobs can't be read", error=str(error))
