"""The owner's side of environments: where they live, who listens, and what follows a crash."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from populace._runtime.shard import CREATE
from populace.environment import Environment, EnvironmentProxy
from populace.errors import PlacementError
from populace.events import Condition
from populace.workers.pool import WorkerPool
from shared.errors import BusError, InvalidInputError, RemoteError
from shared.ids import check_token, new_id
from shared.logs import get_logger
from shared.messages.control import (
    EnvironmentMade,
    EnvironmentRequest,
    ListenRequest,
    OpenShard,
    Rule,
    SavedPart,
    ShardOpened,
)
from shared.service import ask, serve
from shared.subjects import ENVIRONMENT

if TYPE_CHECKING:
    from populace.population import Population
    from populace.world import World

_log = get_logger(__name__)

_DEEPEST = 8
_ORDERS = ("arrival", "agent")
_OPEN_TIMEOUT = 300.0
_NO_SERVICE = (
    "no environment service is up; start one with 'populace up' (or python -m env_service)"
)


@dataclass
class _Kept:
    """Where an environment lives."""

    path: str
    class_path: str
    folder: str | None
    worker: str
    members: Population | None = None
    epoch: int = 1
    made: bool = False

    @property
    def shard(self) -> str:
        return f"{ENVIRONMENT}{self.path}"


class Keeping:
    """Makes environments and moves them when their process is gone.

    Args:
        world: whose environments they are.
        start_local: makes a worker in this process, in a world without services.
    """

    def __init__(
        self, world: World, start_local: Callable[[], Awaitable[str]] | None = None
    ) -> None:
        self._world = world
        self._start_local = start_local
        self._pool: WorkerPool | None = None
        self._workers: list[str] = []
        self._kept: dict[str, _Kept] = {}
        self._rules: dict[str, Rule] = {}
        self._opening = asyncio.Lock()
        self._moving: set[asyncio.Task[None]] = set()
        self._serving = False

    @property
    def workers(self) -> list[str]:
        """Names of the workers that hold environments."""
        return list(self._workers)

    @property
    def all_kept(self) -> list[_Kept]:
        """Where each environment lives, outer ones before those within them."""
        return list(self._kept.values())

    def find(self, path: str) -> _Kept | None:
        """Where an environment lives; None: there is none."""
        return self._kept.get(path)

    def host_of(self, worker: str) -> str:
        """Name of the host of one of the workers."""
        hosts = {} if self._pool is None else self._pool.hosts
        return next((host for host, held in hosts.items() if worker in held), "local")

    @property
    def known(self) -> dict[str, str]:
        """Path of each environment, and its class's name."""
        return {k.path: k.class_path.rpartition(":")[2] for k in self._kept.values()}

    @property
    def ordered(self) -> dict[str, list[str]]:
        """Population to the environments that apply its agents' calls in agent order."""
        found: dict[str, list[str]] = {}
        for kept in self._kept.values():
            if kept.members is not None:
                found.setdefault(kept.members.name, []).append(kept.path)
        return found

    @property
    def rules(self) -> list[Rule]:
        """What listeners want of the environments."""
        return list(self._rules.values())

    # Making
    async def make(
        self,
        cls: type[Environment],
        path: str,
        *args: Any,
        order: str = "arrival",
        members: Population | None = None,
        **kwargs: Any,
    ) -> EnvironmentProxy:
        """Make an environment; see ``World.environment``."""
        if order not in _ORDERS:
            raise InvalidInputError(f"order must be one of {', '.join(_ORDERS)}, not {order!r}")
        if (order == "agent") != (members is not None):
            raise InvalidInputError(
                'order="agent" needs members=, the population whose calls are put in order'
            )
        class_path, folder = self._world._path(cls)
        await self._make(path, class_path, folder, args, kwargs, members)
        return EnvironmentProxy(self._world._caller, path, cls, self.make)

    async def _make(
        self,
        path: str,
        class_path: str,
        folder: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        members: Population | None = None,
    ) -> None:
        await self._get_ready()
        self._check_path(path)
        load = Counter(dict.fromkeys(self._workers, 0))
        load.update(kept.worker for kept in self._kept.values())
        worker = min(self._workers, key=lambda w: (load[w], self._workers.index(w)))
        kept = self._kept[path] = _Kept(path, class_path, folder, worker, members)
        world = self._world
        try:
            await self._open(kept)
            await world._caller.call(kept.shard, 0, path, CREATE, args, kwargs)
            kept.made = True
        except BaseException as error:
            del self._kept[path]
            await self._close(kept)
            if isinstance(error, RemoteError):
                raise InvalidInputError(
                    f"the environment {path!r} can't be made: {error}"
                ) from None
            raise
        await world._introduce(environments={path: self.known[path]})

    def _check_path(self, path: str) -> None:
        names = path.split(".")
        for name in names:
            check_token(name, f"the environment's path {path!r}: every name in it")
        if len(names) > _DEEPEST:
            raise InvalidInputError(f"environments nest at most {_DEEPEST} deep, not {path!r}")
        if path in self._kept:
            raise InvalidInputError(f"there is an environment at {path!r} already")
        above = path.rpartition(".")[0]
        if above and above not in self._kept:
            raise InvalidInputError(
                f"the environment {path!r} can't be made: there is none at {above!r}"
            )

    # Kept and taken up again
    def kept(self) -> list[list[Any]]:
        """What is needed to make the environments again, besides their states; plain values."""
        return [
            [k.path, k.class_path, k.folder, None if k.members is None else k.members.name]
            for k in self._kept.values()
        ]

    async def take_up(self, kept: list[list[Any]], parts: dict[str, SavedPart]) -> None:
        """Make environments as they were when their states were written down.

        Raises:
            PopulaceError: one can't be made.
        """
        if not kept:
            return
        world = self._world
        await self._get_ready()
        journals = world._subjects.env_journal(world.run, ">")
        await world._bus.purge(world._subjects.stream_journal, journals)
        for i, (path, class_path, folder, members) in enumerate(kept):
            worker = self._workers[i % len(self._workers)]
            population = None if members is None else world._made[members].population
            self._kept[path] = _Kept(path, class_path, folder, worker, population)
        await world._introduce(environments=self.known)
        await asyncio.gather(
            *(self._open(one, parts.get(one.shard)) for one in self._kept.values())
        )
        for one in self._kept.values():
            one.made = one.shard in parts

    async def _open(self, kept: _Kept, saved: SavedPart | None = None) -> None:
        world = self._world
        request = OpenShard(
            shard=kept.shard,
            population=kept.shard,
            class_path=kept.class_path,
            folder=kept.folder,
            size=1,
            epoch=kept.epoch,
            made=kept.made,
            owner=world._bus.process,
            saved=saved,
            members=None if kept.members is None else kept.members.name,
            member_count=0 if kept.members is None else kept.members.count,
        )
        subject = world._subjects.worker(kept.worker, "open")
        await ask(world._bus, subject, request, ShardOpened, timeout=_OPEN_TIMEOUT, patience=10.0)

    async def _close(self, kept: _Kept) -> None:
        """Let go of an environment that could not be made."""
        world = self._world
        request = OpenShard(shard=kept.shard, population=kept.shard)
        with contextlib.suppress(BusError, RemoteError):
            subject = world._subjects.worker(kept.worker, "close")
            await ask(world._bus, subject, request, ShardOpened, timeout=10)

    async def _get_ready(self) -> None:
        async with self._opening:
            if not self._serving:
                self._serving = True
                await self._serve()
            if self._workers:
                return
            if self._start_local is not None:
                self._workers.append(await self._start_local())
                return
            world = self._world
            bucket = world._subjects.bucket_keepers
            self._pool = WorkerPool(
                world._bus, world._settings, world.run, bucket, _NO_SERVICE, life=world.life
            )
            found = await self._pool.acquire(None, None, world._request, self._lost)
            self._workers.extend(worker for worker, _ in found)
            await world._introduce()

    async def _serve(self) -> None:
        world = self._world
        subject = world._subjects.run_owner
        await serve(
            world._bus, subject(world.run, "environment"), EnvironmentRequest, self._make_for
        )
        await serve(world._bus, subject(world.run, "listen"), ListenRequest, self._listen_for)
        await serve(world._bus, subject(world.run, "unlisten"), Rule, self._unlisten)
        await world._bus.flush()

    async def _make_for(self, request: EnvironmentRequest) -> EnvironmentMade:
        args, kwargs = self._world._codec.unpack(bytes.fromhex(request.arguments))
        await self._make(request.path, request.class_path, request.folder, tuple(args), kwargs)
        return EnvironmentMade(path=request.path)

    # Listeners with a condition
    async def _listen_for(self, request: ListenRequest) -> Rule:
        if request.when:
            Condition(request.when)
        name = new_id("rule")
        subject = self._world._subjects.env_matched(self._world.run, name)
        rule = Rule(rule=name, subject=subject, **request.model_dump())
        self._rules[name] = rule
        await self._world._introduce()
        return rule

    async def _unlisten(self, request: Rule) -> Rule:
        self._rules.pop(request.rule, None)
        await self._world._introduce()
        return request

    # Crashes
    def _lost(self, worker: str, reason: str) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
        homeless = [kept for kept in self._kept.values() if kept.worker == worker]
        _log.error("environments lost their process", count=len(homeless), reason=reason)
        task = asyncio.ensure_future(self._move(homeless))
        self._moving.add(task)
        task.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._moving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("environments could not be moved", error=str(error))

    async def _move(self, homeless: list[_Kept]) -> None:
        """Have other workers take environments over."""
        world = self._world
        try:
            if not self._workers:
                assert self._pool is not None
                found = await self._pool.replace(world._request)
                self._workers.append(found)
                await world._introduce()
        except (PlacementError, RemoteError, BusError) as error:
            self._give_up(homeless, error)
            return
        for i, kept in enumerate(homeless):
            kept.worker = self._workers[i % len(self._workers)]
            kept.epoch += 1
        epochs = [kept.epoch for kept in homeless]
        outcomes = await asyncio.gather(
            *(self._open(kept) for kept in homeless), return_exceptions=True
        )
        moved: dict[str, str] = {}
        for kept, epoch, outcome in zip(homeless, epochs, outcomes, strict=True):
            if kept.epoch != epoch:
                continue  # that one died as well, and another move is at work
            if isinstance(outcome, BaseException):
                self._give_up([kept], outcome)
            else:
                moved[kept.shard] = kept.worker
        world._caller.shards_moved(list(moved))
        await world._introduce(moved=moved)

    def _give_up(self, kept: list[_Kept], error: BaseException) -> None:
        reason = f"the environment's process is gone, and no other took it over: {error}"
        self._world._shards_are_lost([one.shard for one in kept], reason)

    async def settled(self) -> None:
        """Wait until no environment is on its way from one process to another, with a bound."""
        if self._moving:
            await asyncio.wait(self._moving, timeout=_OPEN_TIMEOUT)

    async def close(self, *, kill: bool = False) -> None:
        """Give the workers back, and remove the journals."""
        for task in list(self._moving):
            task.cancel()
        if self._pool is not None:
            await self._pool.release(kill=kill)
        # A durable run may have gone on elsewhere by now; whoever plays it removes them.
        if self._kept and not self._world.durable:
            world = self._world
            journals = world._subjects.env_journal(world.run, ">")
            try:
                await world._bus.purge(world._subjects.stream_journal, journals)
            except BusError as error:
                _log.warning("journals were not removed", error=str(error))
