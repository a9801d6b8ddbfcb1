"""Takes as many prompts as it has free slots, and answers them.

A prompt is acknowledged once its answer has left. If this process dies, the broker gives its
prompts to another after a while. Prompts of runs that are over are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import Any

from populace.models.backends import Backend, make_backend
from shared.bus import Consumer, Delivery, Message
from shared.codec import from_public, pack_plain
from shared.errors import BusError, CodecError, PopulaceError
from shared.logs import get_logger
from shared.messages.control import CheckModel, ModelChecked
from shared.messages.model import ModelRequest, ModelResponse, pool_name
from shared.messages.scenario import ModelSpec, Status
from shared.service import ServiceContext, serve
from shared.streams import ensure_streams

_log = get_logger(__name__)

_ACK_WAIT = 60.0
_STILL_AT_WORK = 20.0
_POOLS_EVERY = 0.5
_REMEMBERED_RUNS = 10_000
_MAX_DELIVERIES = 5


class Pool:
    """One model and its queue, as served by this process."""

    def __init__(self, server: ModelServer, name: str, spec: ModelSpec, backend: Backend) -> None:
        self._server = server
        self.name = name
        self.backend = backend
        self.slots = spec.concurrency or backend.slots or server.settings.model_concurrency
        self.answered = 0
        self.failed = 0
        self._free = self.slots
        self._freed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def pull(self) -> None:
        """Take prompts for as long as this process lives."""
        server = self._server
        consumer: Consumer = await server.bus.consumer(
            server.subjects.stream_models,
            durable=f"pool-{self.name}",
            subjects=(server.subjects.model_queue(self.name),),
            ack_wait=_ACK_WAIT,
            max_waiting_acks=100_000,
        )
        while True:
            while self._free <= 0:
                self._freed.clear()
                await self._freed.wait()
            # A message holds a few prompts; taking one at a time near the limit keeps this
            # worker from hoarding what others could answer.
            for delivery in await consumer.fetch(max(1, min(64, self._free // 8)), timeout=2.0):
                self._take(delivery)

    def _take(self, delivery: Delivery) -> None:
        try:
            inbox, run, rows = from_public(delivery.data)
            requests = [ModelRequest.from_columns(row) for row in rows]
        except (CodecError, ValueError, TypeError) as error:
            _log.error("a prompt can't be read and is dropped", error=str(error))
            self._start(delivery.term())
            return
        if run in self._server.over:
            self._start(delivery.ack())
            return
        if delivery.attempt > _MAX_DELIVERIES:
            text = f"its model worker died {delivery.attempt - 1} times while answering it"
            rows = [
                ModelResponse(r.number, error_kind="internal", error=text).columns()
                for r in requests
            ]
            self._server.bus.send(inbox, pack_plain(rows))
            self._start(delivery.term())
            return
        self._free -= len(requests)
        self._start(self._answer_all(delivery, inbox, requests))

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_all(
        self, delivery: Delivery, inbox: str, requests: list[ModelRequest]
    ) -> None:
        alive = asyncio.ensure_future(self._keep_alive(delivery))
        try:
            if self.backend.name == "scripted":
                answers = await asyncio.gather(*(self._answer(r) for r in requests))
                self._reply(inbox, answers)
            else:
                await asyncio.gather(*(self._answer_one(inbox, r) for r in requests))
            await delivery.ack()
        finally:
            alive.cancel()
            self._free += len(requests)
            self._freed.set()

    async def _answer_one(self, inbox: str, request: ModelRequest) -> None:
        self._reply(inbox, [await self._answer(request)])

    async def _answer(self, request: ModelRequest) -> ModelResponse:
        try:
            response = await self.backend.timed_answer(request)
        except Exception as error:
            _log.exception("a back end raised", pool=self.name)
            text = f"{type(error).__name__}: {error}"
            response = ModelResponse(
                request.number, backend=self.backend.name, error_kind="internal", error=text
            )
        if response.error_kind:
            self.failed += 1
        else:
            self.answered += 1
        return response

    def _reply(self, inbox: str, responses: list[ModelResponse]) -> None:
        bus = self._server.bus
        data = pack_plain([r.columns() for r in responses])
        if len(data) > bus.max_payload and len(responses) > 1:
            half = len(responses) // 2
            self._reply(inbox, responses[:half])
            self._reply(inbox, responses[half:])
            return
        try:
            bus.send(inbox, data)
        except BusError as error:
            _log.error("a model's answer could not be sent", inbox=inbox, error=str(error))

    @staticmethod
    async def _keep_alive(delivery: Delivery) -> None:
        while True:
            await asyncio.sleep(_STILL_AT_WORK)
            await delivery.in_progress()

    async def close(self) -> None:
        """Give up what is under way (the broker will give it to another), and close."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)
        await self.backend.close()


class ModelServer:
    """Serves every pool that any run has asked for."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self.bus = context.bus
        self.settings = context.settings
        self.subjects = context.settings.subjects
        self.over: OrderedDict[str, None] = OrderedDict()
        """Runs that have ended; their prompts need no answer."""
        self._pools: dict[str, Pool] = {}
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._starting = asyncio.Lock()

    async def pool(self, spec: ModelSpec) -> Pool:
        """The pool of a model, started if needed.

        Raises:
            PopulaceError: its back end can't be started here.
        """
        name = pool_name(spec)
        async with self._starting:
            pool = self._pools.get(name)
            if pool is None:
                backend = make_backend(spec, self.settings)
                await backend.start()
                pool = self._pools[name] = Pool(self, name, spec, backend)
                self._pulls[name] = asyncio.ensure_future(self._pull(pool))
                _log.info("pool is served", pool=name, backend=backend.name, slots=pool.slots)
        return pool

    async def _pull(self, pool: Pool) -> None:
        while True:
            try:
                await pool.pull()
            except PopulaceError as error:
                _log.warning("pulling prompts starts anew", pool=pool.name, error=str(error))
                await asyncio.sleep(1.0)

    async def check(self, request: CheckModel) -> ModelChecked:
        """Say whether a model can be reached from here."""
        try:
            pool = await self.pool(request.spec)
            details = await pool.backend.check() if request.attempt else {}
        except PopulaceError as error:
            return ModelChecked(ok=False, error=str(error))
        return ModelChecked(ok=True, details={"backend": pool.backend.name, **details})

    def _status(self, message: Message) -> None:
        status = Status.model_validate_json(message.data)
        if status.kind == "ended":
            self.over[status.run] = None
            while len(self.over) > _REMEMBERED_RUNS:
                self.over.popitem(last=False)

    async def _watch_pools(self) -> None:
        """Serve pools that were registered, also by programs that asked for no check."""
        bucket = None
        failed: set[str] = set()
        while True:
            try:
                bucket = bucket or await self.bus.bucket(self.subjects.bucket_pools)
                for entry in await bucket.entries():
                    if entry.key in self._pools or entry.key in failed:
                        continue
                    try:
                        await self.pool(ModelSpec.model_validate_json(entry.value))
                    except (PopulaceError, ValueError) as error:
                        failed.add(entry.key)
                        _log.error("a pool can't be served here", pool=entry.key, error=str(error))
            except BusError as error:
                _log.warning("pools can't be read", error=str(error))
            await asyncio.sleep(_POOLS_EVERY)

    def stats(self) -> dict[str, Any]:
        """Counters by pool."""
        return {
            name: {
                "backend": pool.backend.name,
                "slots": pool.slots,
                "answered": pool.answered,
                "failed": pool.failed,
            }
            for name, pool in self._pools.items()
        }

    async def run(self) -> None:
        """Serve until told to stop."""
        await ensure_streams(self.bus, self.subjects)
        await self.bus.subscribe(self.subjects.run_status(), self._status)
        await serve(self.bus, self.subjects.model_check, CheckModel, self.check, queue="models")
        await self.context.announce("Has prompts answered by language models", stats=self.stats)
        watch = asyncio.ensure_future(self._watch_pools())
        _log.info("model service is up")
        try:
            await self.context.stopping.wait()
        finally:
            for task in (watch, *self._pulls.values()):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            for pool in self._pools.values():
                await pool.close()


async def main(context: ServiceContext) -> None:
    """The model service."""
    await ModelServer(context).run()
