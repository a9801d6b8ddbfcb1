"""Takes as many prompts as it has free slots, and answers them.

A prompt is acknowledged once its answer has left. If this process dies, the broker gives its
prompts to another after a while. Prompts of runs that are over are dropped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from populace.models.accounts import BudgetKeeper, SharedBudget
from populace.models.backends import Backend, make_backend
from populace.models.kept import SharedCache
from populace.models.limits import RateLimiter, SharedPace, endpoint_key
from populace.models.serving import Serving
from services.models.pool import Pool
from shared.bus import KeyValue, Message
from shared.errors import BusError, PopulaceError
from shared.logs import get_logger
from shared.messages.control import CheckModel, ModelChecked
from shared.messages.model import pool_name
from shared.messages.scenario import ModelSpec, Status
from shared.service import ServiceContext, serve
from shared.streams import cache_stream, ensure_streams, kept_stream

_log = get_logger(__name__)

_POOLS_EVERY = 0.5
_SERVERS_TTL = 6.0
_TOLD_EVERY = 2.0
_END_WITHIN = 5.0
_REMEMBERED_RUNS = 10_000


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
        self._budgets: dict[str, BudgetKeeper] = {}
        self._shares: dict[str, int] = {}
        self.usage: KeyValue
        """The bucket of accounts."""

    @property
    def stopping(self) -> bool:
        """Whether the service is to end."""
        return self.context.stopping.is_set()

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
                serving = await self._serving(spec, backend)
                pool = self._pools[name] = Pool(self, name, spec, backend, serving)
                if spec.limits is not None and spec.limits.concurrency is not None:
                    pool.gate.share(0)  # until it is known how many share it
                self._pulls[name] = asyncio.ensure_future(self._pull(pool))
                _log.info("pool is served", pool=name, backend=backend.name, slots=pool.gate.most)
        return pool

    async def _serving(self, spec: ModelSpec, backend: Backend) -> Serving:
        limiter = None
        if spec.limits is not None:
            limits = await self.bus.bucket(self.subjects.bucket_limits)
            limiter = RateLimiter(spec.limits, SharedPace(limits, endpoint_key(spec)))
        return Serving(backend, spec, limiter, SharedCache(self.bus, self.subjects), self._budget)

    async def _budget(self, run: str, budget: dict[str, Any]) -> BudgetKeeper:
        """The keeper of a run's budget: one for all pools of this process."""
        held = self._budgets.get(run)
        if held is None:
            bucket = await self.bus.bucket(self.subjects.bucket_budgets)
            held = self._budgets.get(run)
            if held is None:
                store = SharedBudget(bucket, run)
                held = self._budgets[run] = BudgetKeeper(budget, store, self.bus.process)
        return held

    async def _pull(self, pool: Pool) -> None:
        while not self.stopping:
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
            self._budgets.pop(status.run, None)
            for pool in self._pools.values():
                pool.serving.accounts.pop(status.run, None)
            while len(self.over) > _REMEMBERED_RUNS:
                self.over.popitem(last=False)

    def _event(self, event: str, _: str) -> None:
        if event == "reconnected":
            for pool in self._pools.values():
                pool.send_again()

    async def _watch_queues(self) -> None:
        """How much waits in each pool's queue, and for how long: the sign that more are needed."""
        while not self.stopping:
            for name, pool in list(self._pools.items()):
                try:
                    pool.queued, pool.oldest = await self.bus.held(
                        self.subjects.stream_models, self.subjects.model_queue(name)
                    )
                except BusError as error:
                    _log.warning("a queue can't be looked at", pool=name, error=str(error))
            await asyncio.sleep(_TOLD_EVERY)

    async def _share_slots(self) -> None:
        """Divide what the whole installation may have under way by those who serve a pool."""
        bucket = None
        while not self.stopping:
            try:
                bucket = bucket or await self.bus.bucket(
                    self.subjects.bucket_servers, ttl=_SERVERS_TTL
                )
                limited = [
                    p for p in self._pools.values() if p.spec.limits and p.spec.limits.concurrency
                ]
                for pool in limited:
                    await bucket.put(f"{pool.name}.{self.bus.process}", b"1")
                if limited:
                    there = [entry.key.split(".") for entry in await bucket.entries()]
                    for pool in limited:
                        assert pool.spec.limits is not None
                        names = sorted(k[1] for k in there if k[0] == pool.name)
                        most = pool.spec.limits.concurrency or 1
                        mine = names.index(self.bus.process) if self.bus.process in names else 0
                        share = most // max(1, len(names)) + (mine < most % max(1, len(names)))
                        if self._shares.get(pool.name) == len(names):
                            pool.gate.share(share)
                        else:  # the others must have heard of it before more are under way
                            pool.gate.share(min(share, pool.gate.cap or 0))
                        self._shares[pool.name] = len(names)
            except BusError as error:
                _log.warning("slots can't be shared for now", error=str(error))
            await asyncio.sleep(_TOLD_EVERY)

    async def _watch_pools(self) -> None:
        """Serve pools that were registered, also by programs that asked for no check."""
        bucket = None
        failed: set[str] = set()
        while not self.stopping:
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
        return {name: pool.stats() for name, pool in self._pools.items()}

    async def run(self) -> None:
        """Serve until told to stop."""
        await ensure_streams(self.bus, self.subjects)
        await self.bus.ensure_stream(kept_stream(self.subjects))
        await self.bus.ensure_stream(cache_stream(self.subjects))
        self.usage = await self.bus.bucket(self.subjects.bucket_usage)
        self.bus.on_event(self._event)
        await self.bus.subscribe(self.subjects.run_status(), self._status)
        await serve(self.bus, self.subjects.model_check, CheckModel, self.check, queue="models")
        await self.context.announce("Has prompts answered by language models", stats=self.stats)
        background = [
            asyncio.ensure_future(self._watch_pools()),
            asyncio.ensure_future(self._share_slots()),
            asyncio.ensure_future(self._watch_queues()),
        ]
        _log.info("model service is up")
        try:
            await self.context.stopping.wait()
        finally:
            tasks = [*background, *self._pulls.values()]
            for task in tasks:
                task.cancel()
            # With a bound, and loops that look for themselves: the client's publish can swallow a
            # cancellation.
            await asyncio.wait(tasks, timeout=_END_WITHIN)
            for pool in self._pools.values():
                await pool.close()


async def main(context: ServiceContext) -> None:
    """The model service."""
    await ModelServer(context).run()
