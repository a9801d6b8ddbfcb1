"""Takes as many prompts as it has free slots, and answers them.

A prompt is acknowledged once its answer has left. If this process dies, the broker gives its
prompts to another after a while. Prompts of runs that are over are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from typing import Any

from populace.models.accounts import KEPT_FOR, BudgetKeeper, SharedBudget
from populace.models.backends import Backend, make_backend
from populace.models.kept import KeptAnswers, SharedCache
from populace.models.limits import RateLimiter, SharedPace, endpoint_key
from populace.models.serving import Serving
from services.models.late import LateAnswers
from services.models.peers import Peers
from services.models.pool import Pool
from shared.bus import Entry, KeyValue, Message
from shared.codec import from_public
from shared.errors import BusError, PopulaceError, RevisionConflictError
from shared.logs import get_logger
from shared.messages.control import CheckModel, ModelChecked
from shared.messages.model import pool_name
from shared.messages.scenario import ModelSpec, Status
from shared.service import ServiceContext, serve
from shared.streams import cache_stream, ensure_stream, ensure_streams, patiently

_log = get_logger(__name__)

_POOLS_EVERY = 0.5
_SERVERS_TTL = 6.0
_TOLD_EVERY = 2.0
_SHARED_EVERY = 0.5
_TURN = 6.0
"""Seconds for which a pool has a slot that others wait for."""
_END_WITHIN = 5.0
_FINISH_WITHIN = 8.0
"""Seconds that requests under way get to end, when the service is told to."""
_IDLE = 600.0
"""Seconds after which a pool that nobody uses is closed; clients register more often than that."""
_FAILED_AGAIN = 30.0
_CLOSED_WITHIN = 30.0
_LAST_WITHIN, _LAST_LOOK = 5.0, 0.03
"""Seconds that what is under way of a run gets when it ends early."""
_REMEMBERED_RUNS = 10_000
_REMEMBERED_PROMPTS = 100_000


class ModelServer:
    """Serves every pool that any run has asked for."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self.bus = context.bus
        self.settings = context.settings
        self.subjects = context.settings.subjects
        self.kept = KeptAnswers(context.bus, context.settings.subjects)
        self.late = LateAnswers(self.kept)
        self.peers = Peers(context.bus, context.settings.subjects, self._holds)
        self.over: OrderedDict[str, int] = OrderedDict()
        """Runs that have ended, and in which life; their prompts need no answer."""
        self._ending: OrderedDict[str, int] = OrderedDict()
        """Runs that ask nothing more, and the life in which: what is under way is still counted."""
        self._beside: set[asyncio.Task[None]] = set()
        self.gone: OrderedDict[tuple[str, int], None] = OrderedDict()
        """Prompts, by inbox and number, for whose answers nobody waits any more."""
        self.lives: dict[str, int] = {}
        """Of runs that were taken up again: which life they are in."""
        self._pools: dict[str, Pool] = {}
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._starting: dict[str, asyncio.Task[Pool]] = {}
        self._left: dict[str, Pool] = {}
        """Pools that are being closed, as nobody uses them."""
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._budgets: dict[str, BudgetKeeper] = {}
        self._shares: dict[str, list[str]] = {}
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
        pool = self._pools.get(name)
        if pool is None:
            starting = self._starting.get(name)
            if starting is None:  # one that takes long must not hold up the others
                starting = self._starting[name] = asyncio.ensure_future(self._start(name, spec))
                starting.add_done_callback(lambda _: self._starting.pop(name, None))
            pool = await asyncio.shield(starting)
        pool.used_at = time.monotonic()
        return pool

    async def _start(self, name: str, spec: ModelSpec) -> Pool:
        if name in self._closing:
            await asyncio.wait({self._closing[name]}, timeout=_CLOSED_WITHIN)
        backend = make_backend(spec, self.settings)
        try:
            await backend.start()
            serving = await self._serving(spec, backend)
        except BaseException:
            await backend.close()
            raise
        pool = self._pools[name] = Pool(self, name, spec, backend, serving)
        if spec.limits is not None and spec.limits.concurrency is not None:
            pool.gate.share(0)  # until it has something to do, and it is known who shares
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
        run = budget.get("account") or run
        held = self._budgets.get(run)
        if held is not None:
            held.allow(budget)
        else:
            bucket = await self.bus.bucket(self.subjects.bucket_budgets, ttl=KEPT_FOR)
            held = self._budgets.get(run)
            if held is None:
                store = SharedBudget(bucket, run)
                held = self._budgets[run] = BudgetKeeper(budget, store, self.bus.process)
        return held

    async def _pull(self, pool: Pool) -> None:
        while not self.stopping:
            try:
                await pool.pull()
                return
            except PopulaceError as error:
                _log.warning("pulling prompts starts anew", pool=pool.name, error=str(error))
            except Exception:  # whatever it was, prompts must go on being taken
                _log.exception("pulling prompts starts anew", pool=pool.name)
            await asyncio.sleep(1.0)

    async def check(self, request: CheckModel) -> ModelChecked:
        """Say whether a model can be reached from here."""
        try:
            pool = await self.pool(request.spec)
            details = await pool.backend.check() if request.attempt else {}
        except PopulaceError as error:
            return ModelChecked(ok=False, error=str(error))
        return ModelChecked(ok=True, details={"backend": pool.backend.name, **details})

    def hear_of(self, run: str, life: int) -> None:
        """A run is in this life at least: of what was told one may have heard nothing."""
        self.lives[run] = max(life, self.lives.get(run, 1))
        if self.over.get(run, life) < life:
            del self.over[run]

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done beside all else."""
        task = asyncio.ensure_future(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def is_over(self, run: str, life: int) -> bool:
        """Whether nobody waits for answers that this life of a run has asked for."""
        if life <= max(self.over.get(run, 0), self._ending.get(run, 0)):
            return True
        return life < self.lives.get(run, 1)

    def _last(self, message: Message) -> None:
        """A run asks nothing more: finish what is under way of it, and say so."""
        told = json.loads(message.data)
        run = str(told["run"])
        self._ending[run] = int(told["life"])
        while len(self._ending) > _REMEMBERED_RUNS:
            self._ending.popitem(last=False)
        self._begin(self._tell_last(run, message.reply))

    def _hear_gone(self, message: Message) -> None:
        inbox, numbers = from_public(message.data)
        for number in numbers:
            self.gone[inbox, number] = None
        while len(self.gone) > _REMEMBERED_PROMPTS:
            self.gone.popitem(last=False)

    def _holds(self, pool: str, message: int) -> bool:
        held = (self._pools.get(pool), self._left.get(pool))
        return any(one is not None and one.holds(message) for one in held)

    async def _tell_last(self, run: str, inbox: str) -> None:
        until = time.monotonic() + _LAST_WITHIN
        said = -1
        while True:
            left = sum(pool.under_way_of(run) for pool in self._pools.values())
            if said < 0 or not left or time.monotonic() > until:
                answer = {"service": self.bus.process, "left": left}
                with contextlib.suppress(BusError):  # it goes by what it has heard then
                    self.bus.send(inbox, json.dumps(answer).encode())
                said = left
            if not left or time.monotonic() > until:
                return
            await asyncio.sleep(_LAST_LOOK)

    def _status(self, message: Message) -> None:
        status = Status.model_validate_json(message.data)
        if status.kind == "accepted":
            # It may have the name of one that was deleted.
            self._ending.pop(status.run, None)
            self.over.pop(status.run, None)
            self.lives.pop(status.run, None)
            self.late.forget(status.run)
        if status.kind == "restored":
            self.hear_of(status.run, status.life or 1)
        if status.kind == "ended" and (status.life or 1) >= self.lives.get(status.run, 1):
            self.over[status.run] = status.life or 1
            self.over.move_to_end(status.run)
            self._close_budget(status.run)
            for pool in self._pools.values():
                pool.serving.accounts.pop(status.run, None)
            while len(self.over) > _REMEMBERED_RUNS:
                self.lives.pop(self.over.popitem(last=False)[0], None)

    def _close_budget(self, run: str) -> None:
        """What was paid last is told before the keeper goes: the run may be taken up again."""
        keeper = self._budgets.get(run)
        if keeper is None:
            return

        async def close() -> None:
            await keeper.close()
            if self._budgets.get(run) is keeper and run in self.over:
                del self._budgets[run]

        self._begin(close())

    def _event(self, event: str, _: str) -> None:
        if event == "reconnected":
            self.late.read()
            self.peers.reconnected()
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
                except Exception:
                    _log.exception("a queue can't be looked at", pool=name)
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
                # By endpoint: several pools may ask the same one, in one process or in many.
                for pool in limited:
                    await self._tell_slots(pool, bucket)
                if limited:
                    there = {e.key: int(e.value or 0) for e in await bucket.entries()}
                    for pool in limited:
                        self._share(pool, there)
            except (BusError, ValueError) as error:
                _log.warning("slots can't be shared for now", error=str(error))
            except Exception:  # a share of 0 must not stay for ever
                _log.exception("slots can't be shared for now")
            await asyncio.sleep(_SHARED_EVERY)

    async def _tell_slots(self, pool: Pool, bucket: KeyValue) -> None:
        """Say how many slots a pool holds, if it takes part: with nothing to do it needs none."""
        if not pool.gate.used and not pool.queued:
            queue = self.subjects.model_queue(pool.name)
            pool.queued, pool.oldest = await self.bus.held(self.subjects.stream_models, queue)
        was, pool.busy = pool.busy, bool(pool.queued or pool.gate.used)
        holds = max(pool.gate.cap or 0, pool.gate.under_way)
        key = f"{endpoint_key(pool.spec)}.{self.bus.process}.{pool.name}"
        if pool.busy or holds:
            await bucket.put(key, str(holds).encode())
        elif was:
            await bucket.delete(key)

    def _share(self, pool: Pool, there: dict[str, int]) -> None:
        """Give a pool its share of what may be under way at its endpoint.

        Where there are fewer slots than pools, they take turns.

        Args:
            pool: one whose specification says how much that is.
            there: how many slots each pool holds, by ``endpoint.process.pool``.
        """
        endpoint = endpoint_key(pool.spec)
        names = sorted(key for key in there if key.startswith(f"{endpoint}."))
        own = f"{endpoint}.{self.bus.process}.{pool.name}"
        if not pool.busy:
            pool.gate.share(0)
            self._shares.pop(pool.name, None)
            return
        if own not in names:
            return  # too slow to say that it is there; others may count on its share
        assert pool.spec.limits is not None
        most = pool.spec.limits.concurrency or 1
        turn = int(time.time() / _TURN) if most < len(names) else 0

        def share_of(name: str) -> int:
            place = (names.index(name) + turn) % len(names)
            return most // len(names) + (place < most % len(names))

        # The others must have heard of it, and have given back what they had beyond their shares,
        # before more are under way.
        share, known = share_of(own), self._shares.get(pool.name) == names
        left = most - sum(there[name] for name in names if name != own)
        pool.gate.share(min(share, max(left, 0) if known else pool.gate.cap or 0))
        self._shares[pool.name] = names

    async def _beat(self) -> None:
        """Have the shared budgets know that what is promised here is still under way.

        Write the accounts, too, that could not be written when answers left.
        """
        while not self.stopping:
            try:
                for budget in list(self._budgets.values()):
                    budget.beat()
                for pool in list(self._pools.values()):
                    await pool.count_rest()
            except Exception:
                _log.exception("budgets and accounts are looked after again")
            await asyncio.sleep(_TOLD_EVERY)

    async def _close_idle(self, bucket: KeyValue, revisions: Mapping[str, int]) -> None:
        """Close pools that nobody has used for long: a sweep makes very many.

        Args:
            bucket: where pools are registered.
            revisions: of what was read there; who registers one again meanwhile keeps it.
        """
        for name, pool in list(self._pools.items()):
            if pool.idle_for < _IDLE:
                continue
            if revision := revisions.get(name):
                try:
                    await bucket.delete(name, revision)
                except RevisionConflictError:
                    continue  # it is wanted again
            if pool.idle_for < _IDLE:
                continue  # it has begun to work meanwhile, and is registered again if need be
            _log.info("pool is closed, as nobody uses it", pool=name)
            self._left[name] = self._pools.pop(name)
            self._shares.pop(name, None)
            self._closing[name] = asyncio.ensure_future(self._close(name))

    async def _close(self, name: str) -> None:
        try:
            await self._finish({name: self._left[name]}, _END_WITHIN)
        except Exception:
            _log.exception("a pool could not be closed", pool=name)
        finally:
            del self._left[name], self._closing[name]

    async def _finish(self, pools: dict[str, Pool], within: float) -> None:
        """Stop taking for these pools, hand on what waits, finish what is under way."""
        for pool in pools.values():
            pool.gate.close()
        pulls = [self._pulls.pop(name) for name in pools if name in self._pulls]
        if pulls:
            # They end by themselves: one that is cancelled while it fetches loses what comes.
            _, late = await asyncio.wait(pulls, timeout=_END_WITHIN)
            for task in late:
                task.cancel()
        await asyncio.gather(*(pool.finish(within) for pool in pools.values()))
        for pool in pools.values():
            await pool.close()

    async def _watch_pools(self) -> None:
        """Serve pools that were registered, also by programs that asked for no check."""
        bucket = None
        seen: dict[str, int] = {}
        failed: dict[str, float] = {}
        while not self.stopping:
            try:
                bucket = bucket or await self.bus.bucket(self.subjects.bucket_pools)
                found = {entry.key: entry for entry in await bucket.entries()}
                for gone in (seen.keys() | failed.keys()) - found.keys():
                    seen.pop(gone, None)
                    failed.pop(gone, None)
                for name, entry in found.items():
                    if name in self._pools:
                        if seen.get(name) != entry.revision:  # registered again: it is in use
                            self._pools[name].used_at = time.monotonic()
                            seen[name] = entry.revision
                    elif name not in self._starting and time.monotonic() > failed.get(name, 0.0):
                        failed[name] = time.monotonic() + _FAILED_AGAIN
                        self._begin(self._serve_registered(entry))
                await self._close_idle(bucket, {n: entry.revision for n, entry in found.items()})
            except BusError as error:
                _log.warning("pools can't be read", error=str(error))
            except Exception:  # whatever it was, new pools must go on being served
                _log.exception("pools are looked at again")
            await asyncio.sleep(_POOLS_EVERY)

    async def _serve_registered(self, entry: Entry) -> None:
        try:
            await self.pool(ModelSpec.model_validate_json(entry.value))
        except (PopulaceError, ValueError) as error:
            _log.error("a pool can't be served here", pool=entry.key, error=str(error))
        except Exception:  # of whatever kind an engine likes
            _log.exception("a pool can't be served here", pool=entry.key)

    def stats(self) -> dict[str, Any]:
        """Counters by pool."""
        return {name: pool.stats() for name, pool in self._pools.items()}

    async def run(self) -> None:
        """Serve until told to stop."""
        await ensure_streams(self.bus, self.subjects)
        await ensure_stream(self.bus, cache_stream(self.subjects))
        self.usage = await patiently(
            lambda: self.bus.bucket(self.subjects.bucket_usage, ttl=KEPT_FOR), "the accounts"
        )
        self.late.read()
        self.bus.on_event(self._event)
        await self.bus.subscribe(self.subjects.run_status(), self._status)
        await self.bus.subscribe(self.subjects.model_last, self._last)
        await self.bus.subscribe(self.subjects.model_gone, self._hear_gone)
        await self.peers.start()
        await serve(self.bus, self.subjects.model_check, CheckModel, self.check, queue="models")
        await self.context.announce("Has prompts answered by language models", stats=self.stats)
        background = [
            asyncio.ensure_future(self._watch_pools()),
            asyncio.ensure_future(self._share_slots()),
            asyncio.ensure_future(self._watch_queues()),
            asyncio.ensure_future(self._beat()),
        ]
        _log.info("model service is up")
        try:
            await self.context.stopping.wait()
        finally:
            for task in background:
                task.cancel()
            # With a bound, and loops that look for themselves: the client's publish can swallow a
            # cancellation.
            await asyncio.wait(background, timeout=_END_WITHIN)
            for starting in list(self._starting.values()):
                starting.cancel()
            await self._finish(dict(self._pools), _FINISH_WITHIN)
            if self._closing:
                await asyncio.wait(self._closing.values(), timeout=_END_WITHIN)
            self.late.close()
            closing = [asyncio.ensure_future(b.close()) for b in self._budgets.values()]
            if closing:
                await asyncio.wait(closing, timeout=_END_WITHIN)


async def main(context: ServiceContext) -> None:
    """The model service."""
    await ModelServer(context).run()
