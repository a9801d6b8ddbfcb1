"""Worlds: where agents live. ``connect()`` to the services, or ``local()`` in this process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from populace._runtime.caller import Caller
from populace._runtime.listening import Listener, Listening, path_of
from populace._runtime.open_calls import Column
from populace._runtime.profile import Meter, TimedCodec, summarise
from populace._runtime.saving import StateStore
from populace._runtime.shard import CREATE
from populace._runtime.worker import Worker
from populace.agent import Agent
from populace.answers import Answers
from populace.directory import shard_name, shard_sizes
from populace.environment import Environment, EnvironmentProxy
from populace.errors import AgentError, PlacementError, StateError, error_from_wire
from populace.events import Event
from populace.keeping import Keeping
from populace.models.accounts import Accounts, PriceTable
from populace.models.client import DirectModels
from populace.personas.people import find_people
from populace.population import Made, Population
from populace.proxy import AgentProxy, register_proxies
from populace.stack.state import broker_url
from populace.workers.pool import WorkerPool
from shared.bus import Bus, MemoryBroker, NatsBus
from shared.code import CodeLoader, LocalLoader, import_path
from shared.codec import Codec, pack_plain
from shared.errors import BusError, InvalidInputError, RemoteError
from shared.ids import check_token, new_id
from shared.logs import get_logger
from shared.messages.control import (
    AcquireWorkers,
    Assignment,
    OpenShard,
    PlacedShard,
    Placement,
    Populations,
    SavedPart,
    SaveShards,
    Settled,
    ShardOpened,
    ShardsLost,
    ShardsSaved,
    WorkerStats,
)
from shared.messages.model import Terms, pool_name
from shared.messages.scenario import ModelSpec, ReplaySpec
from shared.service import ask
from shared.settings import Settings, load_settings
from shared.streams import ensure_streams, patiently

_log = get_logger(__name__)

Reply = TypeVar("Reply", bound=BaseModel)

SINGLE = "single"
"""Name of the population that agents made one by one belong to."""

_PATIENCE = 10.0
_SAVE_WITHIN = 300.0
_SETTLED_WITHIN = 10.0
_SINGLES = f"-{SINGLE}"


class World:
    """Holds the agents of one run; made by ``connect()`` or ``local()``."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        loader: CodeLoader,
        run: str,
        seed: int,
        call_timeout: float,
        *,
        profile: bool = False,
        life: int = 1,
        durable: bool = False,
    ) -> None:
        self._bus = bus
        self.life = life
        """Which life of the run: one more each time that it is taken up again after a crash."""
        self.durable = durable
        """Whether the loss of a process breaks the world, to be taken up again from what was saved,
        rather than fails what it held."""
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once a durable run has lost processes that it can't do without."""
        self._scope = settings.subjects.scope(run, life)
        self._settings = settings
        self._subjects = settings.subjects
        self._loader = loader
        self._meter = Meter() if profile else None
        measured = None if self._meter is None else self._meter.profile
        self._codec = Codec(loader) if measured is None else TimedCodec(loader, measured)
        self._caller = Caller(
            bus, self._codec, self._subjects, self._scope, timeout=call_timeout, profile=measured
        )
        register_proxies(self._codec, self._caller)
        self._states = StateStore(bus, self._subjects, run, life)
        self._parts: dict[str, SavedPart] = {}
        """Where the state of each shard lies that was written down."""
        self._made: dict[str, Made] = {}
        """Populations, with how they were made."""
        self._workers: list[tuple[str, str]] = []
        self._isolated: list[tuple[str, str]] = []
        """Workers that hold one agent each."""
        self._pool: WorkerPool | None = None
        self._keeping = Keeping(self)
        self._listening = Listening(bus, self._subjects, run, life)
        self._request: AcquireWorkers
        self._local: list[Worker] = []
        self._shards_of: dict[str, list[str]] = {}
        self._names: set[str] = {SINGLE}
        self._known: dict[str, tuple[int, int]] = {}
        """Populations, with their numbers of agents and shards."""
        self._lost_shards: list[str] = []
        self._takes_up = False
        """Whether what listens now listened before, in an earlier life."""
        self._replaced: list[tuple[str, SavedPart]] = []
        self._singles = 0
        self._creations: set[asyncio.Task[None]] = set()
        self._records = False
        self._recorded: list[Answers[Any]] = []
        self._recorded_calls = 0
        self.run = run
        """Name of the run."""
        self.seed = seed
        """What all random streams of its agents follow from."""
        self.lost: list[str] = []
        """Why workers were lost, if any were."""

    @property
    def workers(self) -> list[tuple[str, str]]:
        """Workers that hold agents, each with its host."""
        return [*self._workers, *self._isolated]

    @property
    def listeners(self) -> list[Listener]:
        """What the scenario listens to."""
        return self._listening.listeners

    def agent_named(self, name: str) -> AgentProxy:
        """The agent of a population by its name, such as ``players/17``.

        Raises:
            InvalidInputError: there is none.
        """
        population, _, number = name.rpartition("/")
        made = self._made.get(population)
        if made is None or not number.isdecimal() or int(number) >= made.population.count:
            known = ", ".join(
                f"{n}/0 to {n}/{m.population.count - 1}" for n, m in self._made.items()
            )
            raise InvalidInputError(
                f"there is no agent {name!r} in this run (there are: {known or 'none'})"
            )
        return made.population[int(number)]

    @property
    def accounts(self) -> Accounts:
        """What models were asked and what it cost, in a local world."""
        found = Accounts()
        models = {id(w.models): w.models for w in self._local}
        for one in models.values():
            if isinstance(one, DirectModels):
                found.merge(one.accounts)
        return found

    # Opening and closing
    async def _open_distributed(
        self,
        workers: int | None,
        at_most: int | None,
        models: dict[str, ModelSpec],
        folders: list[str],
        results_format: str,
        call_timeout: float | None,
        terms: Terms,
        recall: list[int],
        replay: ReplaySpec | None,
        by_call: bool,
        record_messages: bool,
    ) -> None:
        await self._caller.start()
        await ensure_streams(self._bus, self._subjects)
        if models:
            pools = await self._bus.bucket(self._subjects.bucket_pools)
            for spec in models.values():
                if spec.mixture is not None:
                    continue
                name, told = pool_name(spec), spec.model_dump_json().encode()
                await patiently(partial(pools.put, name, told), "a pool")
        self._pool = WorkerPool(
            self._bus,
            self._settings,
            self.run,
            self._subjects.bucket_hosts,
            "no agent host is up; start one with 'populace up' (or python -m agent_host)",
            life=self.life,
        )
        if self.life > 1:
            # What earlier lives asked of models and is not under way yet is asked anew.
            queues = self._subjects.model_queue("*", self.run)
            await self._bus.purge(self._subjects.stream_models, queues)
        self._request = AcquireWorkers(
            run=self.run,
            life=self.life,
            recall=recall,
            replay=replay,
            by_call=by_call,
            record_messages=record_messages,
            count=1,
            seed=self.seed,
            folders=folders,
            models=models,
            results_format=results_format,
            call_timeout=call_timeout,
            terms=terms,
            profile=self._meter is not None,
        )
        self._workers = await self._pool.acquire(workers, at_most, self._request, self._worker_lost)
        await asyncio.gather(*(self._open_single_shard(w) for w, _ in self._workers))

    async def _open_local(
        self, broker: MemoryBroker, models: DirectModels, workers: int, results_format: str
    ) -> None:
        await self._caller.start()
        await ensure_streams(self._bus, self._subjects)

        async def start() -> str:
            bus = broker.connect(new_id("w"))
            assignment = Assignment(
                worker=bus.process,
                host="local",
                run=self.run,
                seed=self.seed,
                results_format=results_format,
                profile=self._meter is not None,
            )
            worker = Worker(
                bus,
                self._subjects,
                assignment,
                self._loader,
                models,
                call_timeout=self._caller.timeout,
            )
            await worker.start()
            self._local.append(worker)
            return bus.process

        self._keeping = Keeping(self, start)
        for _ in range(workers):
            self._workers.append((await start(), "local"))
        await asyncio.gather(*(self._open_single_shard(w) for w, _ in self._workers))

    async def _open_single_shard(self, worker: str) -> None:
        await self._open_shard(worker, OpenShard(shard=f"{worker}-{SINGLE}", population=SINGLE))

    async def _open_shard(self, worker: str, request: OpenShard) -> None:
        self._shards_of.setdefault(worker, []).append(request.shard)
        await ask(
            self._bus,
            self._subjects.worker(worker, "open"),
            request,
            ShardOpened,
            timeout=30 if request.saved is None else _SAVE_WITHIN,
            patience=_PATIENCE,
        )

    def _worker_lost(self, worker: str, reason: str) -> None:
        self.lost.append(reason)
        if self.durable:
            self._break(reason)
            return
        self._shards_are_lost(self._shards_of.get(worker, []), reason)
        self._workers = [(name, host) for name, host in self._workers if name != worker]
        self._isolated = [(name, host) for name, host in self._isolated if name != worker]

    def leave(self, reason: str) -> None:
        """Break a durable world, so that its run goes on in another."""
        if self.durable:
            self.lost.append(reason)
            self._break(reason)

    def _break(self, reason: str) -> None:
        if not self.broken.done():
            self.broken.set_result(reason)

    def _shards_are_lost(self, shards: list[str], reason: str) -> None:
        if self.durable:
            self._break(reason)
            return
        self._caller.shards_lost(shards, reason)
        self._lost_shards.extend(shards)
        told = ShardsLost(shards=shards, reason=reason)
        with contextlib.suppress(BusError):
            self._bus.send(
                self._subjects.run_lost(self._scope), pack_plain(told.model_dump(mode="json"))
            )

    async def _close(self) -> None:
        self._caller.close("the world is closed")
        for task in self._creations:
            task.cancel()
        await self._listening.close()
        broken = self.broken.done()
        await self._keeping.close(kill=broken)
        if self._pool is not None:
            await self._pool.release(kill=broken)
        for worker in reversed(self._local):
            await worker.stop()
            await worker.bus.drain()
        await self._bus.drain()

    def _next_recorded(self) -> int:
        self._recorded_calls += 1
        return self._recorded_calls

    # Kept and taken up again
    async def save(self, round_number: int) -> None:
        """Write down what all agents and environments hold, where it has changed.

        What that replaces is in ``replaced``, to be dropped once the round is committed.

        Raises:
            StateError: one holds something that can't be written down; it is named.
            BusError: a worker does not answer, or the broker does not take it.
        """
        await self._keeping.settled()
        workers = [w for w, _ in self.workers] + self._keeping.workers
        if self._keeping.known:
            await self._settle(workers, round_number)
        outcomes = await self._ask_all(workers, "save", round_number, ShardsSaved)
        problems = [o.problem for o in outcomes if o.problem]
        if problems:
            raise StateError(problems[0])
        unquiet = sum(o.unquiet for o in outcomes)
        if unquiet:
            _log.warning(
                "calls were under way at the round's end; if the run has to go on from here after "
                "a crash, they are not made again",
                run=self.run,
                round=round_number,
                shards=unquiet,
            )
        self._replaced = []
        for outcome in outcomes:
            for shard, part in outcome.parts.items():
                before = self._parts.get(shard)
                if before is not None:
                    self._replaced.append((shard, before))
                self._parts[shard] = part

    async def _ask_all(
        self, workers: list[str], verb: str, round_number: int, reply: type[Reply]
    ) -> list[Reply]:
        """Ask workers for something at the end of a round."""
        request = SaveShards(round=round_number)
        return await asyncio.gather(
            *(
                ask(
                    self._bus,
                    self._subjects.worker(worker, verb),
                    request,
                    reply,
                    timeout=_SAVE_WITHIN,
                )
                for worker in workers
            )
        )

    async def _settle(self, workers: list[str], round_number: int) -> None:
        """Wait until no event is on its way any more, nor what it leads to; with a bound."""
        before = -1
        until = time.monotonic() + _SETTLED_WITHIN
        while time.monotonic() < until:
            outcomes = await self._ask_all(workers, "settle", round_number, Settled)
            await self._bus.flush()  # the scenario may listen as well
            await self._listening.caught_up(until)
            await asyncio.sleep(0)
            now = sum(outcome.activity for outcome in outcomes)
            if now == before:
                return
            before = now
        _log.warning("events went on after the round's end", run=self.run, round=round_number)

    def replaced(self) -> list[tuple[str, SavedPart]]:
        """What the last ``save`` has replaced, by shard; it can be dropped after the commit."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def kept(self) -> dict[str, Any]:
        """What has to be known, besides the parts, to make this world again; plain values."""
        singles = [s for shards in self._shards_of.values() for s in shards if s.endswith(_SINGLES)]
        return {
            "parts": {shard: part.model_dump() for shard, part in self._parts.items()},
            "populations": [made.plain() for made in self._made.values()],
            "singles": [singles, self._singles],
            "calls": self._recorded_calls,
            "steps": self._caller.steps,
            "environments": self._keeping.kept(),
        }

    async def take_up(self, kept: dict[str, Any]) -> None:
        """Make agents and environments as they were when ``kept`` was made.

        Raises:
            PopulaceError: they can't be made.
        """
        self._parts = {k: SavedPart.model_validate(v) for k, v in kept["parts"].items()}
        self._recorded_calls = kept["calls"]
        self._caller.steps = kept["steps"]
        names, self._singles = kept["singles"]
        placed: list[tuple[str, OpenShard]] = []
        turn = itertools.cycle(self._workers)
        for name in names:
            if name in self._parts:
                saved = self._parts[name]
                request = OpenShard(shard=name, population=SINGLE, saved=saved)
                placed.append((next(turn)[0], request))
        for plain in kept["populations"]:
            path, folder = plain["class_path"], plain["folder"]
            cls = self._loader.load(path, Agent, folder)
            sizes = plain["sizes"]
            workers = list(self._workers)
            if plain["isolated"] and self._pool is not None:
                workers = await self._pool.more(len(sizes), self._request)
                self._isolated.extend(workers)
            name, count = plain["name"], sum(sizes)
            shards = []
            offset = 0
            for i, size in enumerate(sizes):
                worker, host = workers[i % len(workers)]
                shard = shard_name(name, i)
                shards.append(
                    PlacedShard(shard=shard, worker=worker, host=host, offset=offset, size=size)
                )
                request = OpenShard(
                    shard=shard,
                    population=name,
                    class_path=path,
                    folder=folder,
                    offset=offset,
                    size=size,
                    people=plain["people"],
                    people_count=count,
                    saved=self._parts.get(shard),
                )
                placed.append((worker, request))
                offset += size
            self._names.add(name)
            await self._place_on_record(name, shards)
            made = Population(self, cls, name, shards)
            self._made[name] = Made(made, path, folder, plain["people"], plain["isolated"])
        await self._keeping.take_up(kept["environments"], self._parts)
        await asyncio.gather(*(self._open_shard(worker, request) for worker, request in placed))
        await self._introduce()

    # Agents
    def _path(self, cls: type[Agent]) -> tuple[str, str | None]:
        path = self._loader.path_of(cls)
        if self._loader.is_installed(path):
            return path, None
        folder = import_path(cls)[1]
        if folder is None:
            return path, None
        self._loader.trust(folder)
        return path, str(folder)

    def _place(self, cls: type[Agent], args: tuple[Any, ...], kwargs: dict[str, Any]) -> AgentProxy:
        """Make one agent, on the next worker in turn."""
        where = self._path(cls)
        self._check_workers()
        worker = self._workers[self._singles % len(self._workers)][0]
        shard = f"{worker}-{SINGLE}"
        number = self._singles
        self._singles += 1
        label = f"{SINGLE}/{number}"
        made = self._caller.call(shard, number, label, CREATE, args, kwargs, class_path=where)
        task = asyncio.ensure_future(self._watch_creation(made, cls))
        self._creations.add(task)
        task.add_done_callback(self._creations.discard)
        return AgentProxy(self._caller, shard, number, label, cls)

    @staticmethod
    async def _watch_creation(made: Any, cls: type) -> None:
        # Calls to the agent carry the same error, so here it is only made visible early.
        try:
            await made
        except AgentError as error:
            if error.kind not in ("closed", "worker_lost"):
                _log.warning(
                    "an agent could not be created",
                    agent_class=cls.__name__,
                    error=f"{error.kind}: {error.message}",
                )

    async def population(
        self,
        cls: type[Agent],
        *args: Any,
        count: int,
        name: str | None = None,
        isolated: bool = False,
        personas: Any = None,
        **kwargs: Any,
    ) -> Population:
        """Make a population of ``count`` agents, divided over all workers.

        Args:
            cls: class of the agents.
            args: for its constructor; ``each(values)`` gives every agent a value of its own.
            count: number of agents.
            name: unique within the run; default: the class's name in lower case.
            isolated: whether each agent gets a process of its own, which costs some 15 MB and
                20 ms, for agents that compute a lot or must not share a process. Calls,
                answers and random numbers are the same. (In ``local()`` all share this one.)
            personas: who the agents are: a file (.yaml population, or rows in .parquet, .csv or
                .jsonl), a stored population or a template by name, or the rows themselves as a
                DataFrame (pandas, polars), an Arrow table or a list of dicts; agents find
                themselves in ``self.persona``.
            kwargs: for its constructor, likewise.

        Raises:
            AgentError: a constructor raised; the first such agent is named.
            CodeError: the workers can't import the class.
            InvalidInputError: a name or number that can't be used.
            PlacementError: no worker is left, or the hosts have no room for so many processes.
        """
        if count < 1:
            raise InvalidInputError(f"a population needs at least 1 agent, not {count}")
        for value in (*args, *kwargs.values()):
            if isinstance(value, Column) and len(value.values) != count:
                raise InvalidInputError(f"each() holds {len(value.values)} values, not {count}")
        self._check_workers()
        name = self._free_name(name or cls.__name__.lower())
        path, folder = self._path(cls)
        people = None
        if personas is not None:
            if not isinstance(personas, (str, Path)):
                from populace.personas.store import stored_table

                personas = await asyncio.to_thread(stored_table, personas, self._settings)
            people = find_people(str(personas), Path(), self._settings.personas_dir)
        shards = _divide_agents(name, count, await self._workers_for(count, isolated))
        try:
            await asyncio.gather(
                *(
                    self._open_shard(
                        s.worker,
                        OpenShard(
                            shard=s.shard,
                            population=name,
                            class_path=path,
                            folder=folder,
                            offset=s.offset,
                            size=s.size,
                            people=people,
                            people_count=count,
                        ),
                    )
                    for s in shards
                )
            )
        except RemoteError as error:
            raise InvalidInputError(f"the population {name!r} can't be made: {error}") from None
        await self._place_on_record(name, shards)
        await self._introduce()
        made = Population(self, cls, name, shards)
        self._made[name] = Made(made, path, folder, people, isolated)
        created = Answers[Any](made, CREATE, args, kwargs, timeout=None, record=None)
        summary = await created.reduce("mean")
        if summary.failed:
            if created.lost:
                raise error_from_wire(name, CREATE, created.lost[0][2])
            kind, _, message = summary.failure_example.partition(": ")
            raise AgentError(
                f"{name} ({summary.failed} of {count} agents)", "__init__", kind, message
            )
        return made

    async def _place_on_record(self, name: str, shards: list[PlacedShard]) -> None:
        placement = Placement(population=name, epoch=self.life, shards=shards)
        bucket = await self._bus.bucket(self._subjects.bucket_placement)
        await bucket.put(f"{self.run}.{name}", placement.model_dump_json().encode())
        self._known[name] = (sum(s.size for s in shards), len(shards))

    async def environment(
        self,
        cls: type[Environment],
        path: str,
        *args: Any,
        order: str = "arrival",
        members: Population | None = None,
        **kwargs: Any,
    ) -> EnvironmentProxy:
        """Make an environment; agents find it by its path.

        Args:
            cls: its class.
            path: where it stands: a name, or names with dots between for one within others,
                which must be there. Environments are spread over the environment services.
            args: for its constructor.
            order: ``"arrival"``, or ``"agent"``: calls that members make while a population call
                of theirs is under way are applied in waves. A wave begins once every member has
                made a call or finished, and applies the calls in the order of the members'
                numbers; so it does not depend on timing or on the number of workers.
            members: with ``order="agent"``, the population whose calls are put in order.
            kwargs: for its constructor.

        Raises:
            InvalidInputError: the path is taken or can't be one, or the class can't be loaded.
            AgentError: the constructor raised.
            PlacementError: no environment service is up.
        """
        return await self._keeping.make(cls, path, *args, order=order, members=members, **kwargs)

    async def listen(
        self,
        environment: EnvironmentProxy | AgentProxy | str,
        event: str,
        handler: Callable[[Event], Any],
        *,
        when: str | None = None,
        below: bool = False,
        durable: str | None = None,
    ) -> Listener:
        """Have a function called, here, with each event of an environment.

        Args:
            environment: its proxy or path; ``""`` with ``below`` means all environments.
            event: the event's name, or ``"*"`` for all.
            handler: takes an ``Event``; may be a coroutine function. What it raises is logged.
            when: a condition on the event's arguments, evaluated where the environment lives.
            below: whether environments below it count as well.
            durable: a name; events that come while nobody listens under it are kept (for a day)
                and delivered, in order, to whoever next does.

        Raises:
            InvalidInputError: no environment, or a condition that can't be read.
        """

        async def deliver(told: Event) -> None:
            outcome = handler(told)
            if inspect.isawaitable(outcome):
                await outcome

        await self._keeping._get_ready()
        name = None
        if durable is not None:
            check_token(durable, "the durable listener's name")
            name = self._subjects.listener(self.run, self.life, durable)
        return await self._listening.add(
            path_of(environment),
            event,
            deliver,
            when=when,
            below=below,
            durable=name,
            new=self._takes_up,
        )

    async def _introduce(
        self, *, environments: dict[str, str] | None = None, moved: dict[str, str] | None = None
    ) -> None:
        """Tell every worker of every population, so that agents can call one another."""
        told = Populations(
            known=self._known,
            environments=self._keeping.known if environments is None else environments,
            rules=self._keeping.rules,
            ordered=self._keeping.ordered,
            lost=self._lost_shards,
            moved=moved or {},
        )
        everyone = [worker for worker, _ in [*self._workers, *self._isolated]]
        outcomes = await asyncio.gather(
            *(
                ask(
                    self._bus,
                    self._subjects.worker(worker, "know"),
                    told,
                    Populations,
                    timeout=30,
                    patience=_PATIENCE,
                )
                for worker in [*everyone, *self._keeping.workers]
            ),
            return_exceptions=True,
        )
        for outcome in outcomes:  # a worker that is lost meanwhile is noticed by its lease
            if isinstance(outcome, BaseException) and not isinstance(outcome, BusError):
                raise outcome

    def _check_workers(self) -> None:
        if not self._workers:
            raise PlacementError(f"no worker is left to hold agents: {self.lost[-1]}")

    def _free_name(self, name: str) -> str:
        check_token(name, "the population's name")
        if name in self._names:
            raise InvalidInputError(
                f"the run has a population named {name!r} already; give this one a name"
            )
        self._names.add(name)
        return name

    async def _workers_for(self, count: int, isolated: bool) -> list[tuple[str, str]]:
        if not isolated or self._pool is None:
            return self._workers
        workers = await self._pool.more(count, self._request)
        self._isolated.extend(workers)
        return workers

    async def profile(self) -> dict[str, Any] | None:
        """Where time went so far, if that is measured; see ``populace._runtime.profile``."""
        if self._meter is None:
            return None
        stats = await self.worker_stats()
        workers = [s.profile for s in stats if s.profile is not None]
        return summarise(workers, self._meter.usage().plain())

    async def worker_stats(self) -> list[WorkerStats]:
        """What each worker counts: agents, calls, memory, CPU seconds."""
        return list(
            await asyncio.gather(
                *(
                    ask(
                        self._bus,
                        self._subjects.worker(worker, "stats"),
                        Assignment(worker=worker, host=host, run=self.run),
                        WorkerStats,
                    )
                    for worker, host in [*self._workers, *self._isolated]
                )
            )
        )


def _divide_agents(name: str, count: int, workers: list[tuple[str, str]]) -> list[PlacedShard]:
    """The shards of a population, one per worker while there are agents."""
    workers = workers[:count]
    shards: list[PlacedShard] = []
    offset = 0
    for i, size in enumerate(shard_sizes(count, len(workers))):
        worker, host = workers[i]
        shards.append(
            PlacedShard(
                shard=shard_name(name, i), worker=worker, host=host, offset=offset, size=size
            )
        )
        offset += size
    return shards


@contextlib.asynccontextmanager
async def connect(
    url: str | None = None,
    *,
    workers: int | None = None,
    seed: int = 0,
    models: dict[str, ModelSpec] | None = None,
    settings: Settings | None = None,
) -> AsyncIterator[World]:
    """A world whose agents live in the workers of running services.

    Args:
        url: the broker; default: ``POPULACE_NATS_URL``, else the stack started here.
        workers: worker processes to get; default: what the hosts offer.
        seed: what the agents' random streams follow from.
        models: the language models that agents may ask, by name.
        settings: default: from the environment.

    Raises:
        BusUnavailableError: no broker answers.
        PlacementError: no host offers workers.
    """
    settings = settings or load_settings()
    async with open_world(
        settings,
        url or broker_url(settings),
        run=new_id("session"),
        seed=seed,
        workers=workers,
        models=models or {},
    ) as world:
        yield world


@contextlib.asynccontextmanager
async def open_world(
    settings: Settings,
    url: str,
    *,
    run: str,
    seed: int,
    workers: int | None = None,
    at_most: int | None = None,
    models: dict[str, ModelSpec] | None = None,
    folders: list[str] | None = None,
    results_format: str = "msgpack",
    call_timeout: float | None = None,
    terms: Terms | None = None,
    profile: bool = False,
    life: int = 1,
    durable: bool = False,
    recall: list[int] | None = None,
    replay: ReplaySpec | None = None,
    by_call: bool = False,
    record_messages: bool = False,
) -> AsyncIterator[World]:
    """A world for a run of a given name; what the director uses. See ``connect``."""
    bus = await NatsBus.connect(settings, url, process=new_id("owner"))
    loader = CodeLoader.from_settings(settings)
    timeout = call_timeout or settings.call_timeout
    world = World(
        bus, settings, loader, run, seed, timeout, profile=profile, life=life, durable=durable
    )
    try:
        for folder in folders or []:
            loader.add_folder(folder)
        await world._open_distributed(
            workers,
            at_most,
            models or {},
            folders or [],
            results_format,
            call_timeout,
            terms or Terms(prices=PriceTable(settings.prices).of_all(models or {})),
            recall or [],
            replay,
            by_call,
            record_messages,
        )
        yield world
    finally:
        await world._close()


@contextlib.asynccontextmanager
async def local(
    *,
    workers: int = 1,
    seed: int = 0,
    models: dict[str, ModelSpec] | None = None,
    settings: Settings | None = None,
    broker: MemoryBroker | None = None,
    run: str | None = None,
    results_format: str = "msgpack",
    terms: Terms | None = None,
    profile: bool = False,
) -> AsyncIterator[World]:
    """A world within this process: no broker, no services, the same meaning.

    Args:
        workers: workers to divide agents over; all share this process's one thread.
        seed: what the agents' random streams follow from.
        models: the language models that agents may ask, by name; default: the embedded one.
        settings: default: from the environment.
        broker: an in-memory broker to share with others.
        run: a name for the run; default: a fresh one.
        results_format: of the result stream, "msgpack" or "json".
        terms: budget and cache of the models, as the keys ``budget`` and ``cache`` of a scenario.
        profile: whether to measure where time goes, for ``World.profile``.
    """
    settings = settings or load_settings()
    broker = broker or MemoryBroker()
    bus = broker.connect(new_id("owner"))
    direct = DirectModels(models or {"default": ModelSpec()}, settings, terms)
    world = World(
        bus,
        settings,
        LocalLoader(),
        run or new_id("session"),
        seed,
        settings.call_timeout,
        profile=profile,
    )
    try:
        await world._open_local(broker, direct, workers, results_format)
        yield world
    finally:
        await world._close()
