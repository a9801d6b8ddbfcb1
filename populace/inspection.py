"""Looking into a run that is under way, from outside: its agents, environments, workers.

Whoever asks the run's owner (``Subjects.run_owner(run, "inspect")``) gets an ``Inspected``. It
costs one request to the worker concerned, and changes nothing.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

from populace._runtime.looking import shown_attributes, shown_memory, shown_view
from populace._runtime.saving import StateStore, read_agent, read_environment
from populace.commits import last_commit
from populace.directory import shard_name
from shared.bus import Bus
from shared.errors import BusError, BusTimeoutError, InvalidInputError, RemoteError
from shared.messages.control import SavedPart
from shared.messages.inspection import (
    Attribute,
    EnvironmentSeen,
    Held,
    Inspect,
    Inspected,
    Listens,
    Look,
    Looked,
    PopulationSeen,
    WorkerSeen,
)
from shared.service import ask, serve
from shared.subjects import ENVIRONMENT, Subjects

if TYPE_CHECKING:
    from populace.world import World

_WITHIN = 2.0
_MOST_WORKERS = 64
"""Workers that are asked what they hold, of a run that has more."""
_MOST_LISTENERS = 500


async def inspect(
    bus: Bus,
    subjects: Subjects,
    run: str,
    *,
    agent: str | None = None,
    environment: str | None = None,
    workers: bool = True,
) -> Inspected:
    """Look into a run.

    Args:
        bus: a connection.
        subjects: the installation's.
        run: the run, which has to be under way.
        agent: by population and number, such as ``players/17``.
        environment: by path.
        workers: whether each worker is asked as well, if the whole is meant.

    Raises:
        RemoteError: there is no such agent or environment.
        BusError: nobody plays the run, or does not answer.
    """
    request = Inspect(agent=agent, environment=environment, workers=workers)
    subject = subjects.run_owner(run, "inspect")
    try:
        return await ask(bus, subject, request, Inspected, timeout=1.5 * _WITHIN)
    except BusTimeoutError:  # an owner that leaves one life for the next takes questions with it
        return await ask(bus, subject, request, Inspected, timeout=1.5 * _WITHIN)


async def stored_agent(bus: Bus, subjects: Subjects, run: str, name: str) -> Looked | None:
    """What an agent held at the end of the last committed round; also of a run that is over.

    Raises:
        BusError: it can't be read.
        CodecError: it was written by another version.
    """
    commit = await last_commit(bus, subjects, run)
    population, _, number = name.rpartition("/")
    if commit is None or not number.isdecimal():
        return None
    made = next((m for m in commit.world["populations"] if m["name"] == population), None)
    index = int(number)
    if made is None or index >= sum(made["sizes"]):
        return None
    shard = 0
    while index >= made["sizes"][shard]:
        index -= made["sizes"][shard]
        shard += 1
    part = commit.world["parts"].get(shard_name(population, shard))
    if part is None:
        return None
    store = StateStore(bus, subjects, run, 0)
    data = await store.read(shard_name(population, shard), SavedPart.model_validate(part))
    found = await asyncio.to_thread(read_agent, data, index)
    if found is None:
        return None
    attributes, memory = found
    return Looked(
        name=name,
        class_name=made["class_path"].rpartition(":")[2],
        round=commit.round,
        attributes=shown_attributes(attributes),
        **shown_memory(memory),
    )


async def stored_environments(
    bus: Bus, subjects: Subjects, run: str, only: str | None = None
) -> list[Looked]:
    """Which environments there were at the end of the last committed round.

    Args:
        bus: a connection.
        subjects: the installation's.
        run: the run.
        only: the path of one, of which is told as well what it held.

    Raises:
        BusError: it can't be read.
        CodecError: it was written by another version.
    """
    commit = await last_commit(bus, subjects, run)
    if commit is None:
        return []
    store = StateStore(bus, subjects, run, 0)
    found = []
    for path, class_path, _, _ in commit.world["environments"]:
        if only not in (None, path):
            continue
        part = commit.world["parts"].get(f"{ENVIRONMENT}{path}")
        one = Looked(name=path, class_name=class_path.rpartition(":")[2], round=commit.round)
        if part is not None and only is not None:
            data = await store.read(f"{ENVIRONMENT}{path}", SavedPart.model_validate(part))
            one.attributes, one.view = await asyncio.to_thread(_stored, class_path, data)
        found.append(one)
    return found


def _stored(class_path: str, data: bytes) -> tuple[list[Attribute], dict[str, Any] | None]:
    """What a stored environment held, and its view; in a thread."""
    state = read_environment(data)
    return shown_attributes(state), _view_of(class_path, state)


def _view_of(class_path: str, state: dict[str, Any]) -> dict[str, Any] | None:
    """How an environment is shown that lives no more, if its class is one of Populace's own."""
    module, _, name = class_path.partition(":")
    if module.partition(".")[0] != "populace":
        return None  # code of others is run by workers alone
    try:
        cls = getattr(importlib.import_module(module), name)
        environment = cls.__new__(cls)
        environment.restore(state)
    except Exception as error:
        return {"kind": "none", "why": f"{type(error).__name__}: {error}"}
    return shown_view(environment)


class Inspections:
    """Answers those who look into a world.

    Args:
        world: the world.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    async def open(self) -> None:
        """Begin to answer."""
        subject = self._world._subjects.run_owner(self._world.run, "inspect")
        await serve(self._world._bus, subject, Inspect, self.answer)

    async def answer(self, request: Inspect) -> Inspected:
        """Look.

        Raises:
            InvalidInputError: there is no such agent or environment.
            BusError: its worker does not answer.
        """
        world = self._world
        told = Inspected(run=world.run, round=world._caller.round, life=world.life)
        if request.agent is not None:
            told.where, told.one = await self._one(*self._find_agent(request.agent))
        elif request.environment is not None:
            told.where, told.one = await self._one(*self._find_environment(request.environment))
        else:
            self._placed(told)
            if request.workers:
                await self._held_by_all(told)
        return told

    def _find_agent(self, name: str) -> tuple[str, str, Look]:
        proxy = self._world.agent_named(name)
        shard, index = proxy._shard, proxy._index
        population = name.rpartition("/")[0]
        placed = next(
            p for p in self._world._made[population].population._shards if p.shard == shard
        )
        return placed.worker, placed.host, Look(shard=shard, index=index)

    def _find_environment(self, path: str) -> tuple[str, str, Look]:
        kept = self._world._keeping.find(path)
        if kept is None:
            known = ", ".join(sorted(self._world._keeping.known))
            raise InvalidInputError(
                f"there is no environment {path!r} in this run (there are: {known or 'none'})"
            )
        return kept.worker, self._world._keeping.host_of(kept.worker), Look(shard=kept.shard)

    async def _one(self, worker: str, host: str, look: Look) -> tuple[str, Looked]:
        bus, subjects = self._world._bus, self._world._subjects
        found = await ask(bus, subjects.worker(worker, "look"), look, Looked, timeout=_WITHIN)
        return f"{worker} on {host}", found

    def _placed(self, told: Inspected) -> None:
        world = self._world
        for name, made in world._made.items():
            seen = PopulationSeen(
                name=name,
                class_name=made.class_path.rpartition(":")[2],
                count=made.population.count,
                people=made.people,
            )
            for placed in made.population._shards:
                seen.workers[placed.worker] = seen.workers.get(placed.worker, 0) + placed.size
            told.populations.append(seen)
        told.environments = [
            EnvironmentSeen(
                path=kept.path,
                class_name=kept.class_path.rpartition(":")[2],
                worker=kept.worker,
                moved=kept.epoch - 1,
            )
            for kept in world._keeping.all_kept
        ]
        told.workers = [WorkerSeen(worker=worker, host=host) for worker, host in world.workers] + [
            WorkerSeen(worker=worker, host=world._keeping.host_of(worker), holds="environments")
            for worker in world._keeping.workers
        ]

    async def _held_by_all(self, told: Inspected) -> None:
        world = self._world
        await asyncio.gather(*(self._held(seen) for seen in told.workers[:_MOST_WORKERS]))
        listens = [
            Listens(
                who="scenario",
                path=one.path,
                event=one.event,
                when=one.when,
                below=one.below,
            )
            for one in world.listeners
        ]
        for one_worker in told.workers:
            if one_worker.held is not None:
                listens += one_worker.held.listens
                told.listens_left_out += one_worker.held.listens_left_out
                one_worker.held.listens = []
        told.listens_left_out += max(0, len(listens) - _MOST_LISTENERS)
        told.listens = listens[:_MOST_LISTENERS]

    async def _held(self, seen: WorkerSeen) -> None:
        bus, subjects = self._world._bus, self._world._subjects
        try:
            subject = subjects.worker(seen.worker, "held")
            seen.held = await ask(bus, subject, Look(), Held, timeout=_WITHIN / 2)
        except (BusError, RemoteError):
            seen.held = None  # it is busy, or gone: the page says so
