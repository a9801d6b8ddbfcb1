"""The host's work: a pool of worker processes, given to runs and taken back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from populace.workers import process as worker_process
from populace.workers.forking import Forked, Nursery
from shared import __version__
from shared.codec import pack_plain
from shared.errors import BusError, InvalidInputError, PopulaceError
from shared.ids import new_id
from shared.logs import get_logger, last_log_lines
from shared.messages.control import (
    AcquiredWorkers,
    AcquireWorkers,
    Assignment,
    HostChange,
    HostDetail,
    HostDetails,
    HostInfo,
    Lease,
    LeaseRenewed,
    Released,
    ReleaseWorkers,
    StopWorker,
    WorkerEnded,
    WorkerProcess,
)
from shared.service import ServiceContext, serve

_log = get_logger(__name__)

HOST_TTL = 4.0
"""Seconds after which a host that says nothing is no longer listed."""
_HEARTBEAT = 1.0
_LEASE = 15.0
"""Seconds after which workers end whose run's owner gave no sign of life."""
_READY_WITHIN = 45.0
_STOP_WITHIN = 20.0
_STARTING_PER_CORE = 4
"""Workers that start at once."""
_WORKER_MEMORY = 32 << 20
"""Bytes that a host wants to see free for each worker more."""


@dataclass(frozen=True)
class Kind:
    """What a host's workers hold."""

    service: str
    """Name of the service, as the service protocol shows it."""
    description: str
    name: str
    """Of this host, a subject token that no other has."""
    bucket: str
    """Where it shows itself."""
    per_run: int
    """Workers that a run gets here unless it asks for more."""


@dataclass(eq=False)
class _Process:
    """A worker process."""

    name: str
    process: Forked
    run: str
    watch: asyncio.Task[None] | None = None
    released: bool = False
    stopped: str = ""
    """Why it was ended, though its run did not ask for it."""
    since: float = field(default_factory=time.time)


@dataclass
class _Run:
    """A run that has workers here."""

    workers: list[_Process] = field(default_factory=list)
    coming: int = 0
    """Workers that it is being given and that don't run yet; counted all the same."""
    acquiring: int = 0
    """Requests for workers that are being answered."""
    ended: dict[str, str] = field(default_factory=dict)
    """Why workers are no more that nobody released."""

    def add(self, workers: list[_Process]) -> None:
        """Workers that were coming are here."""
        self.workers.extend(workers)
        self.coming -= len(workers)

    heard: float = field(default_factory=time.monotonic)


class Host:
    """Owns worker processes on this machine."""

    def __init__(self, context: ServiceContext, kind: Kind) -> None:
        self._context = context
        self._kind = kind
        self._bus = context.bus
        self._settings = context.settings
        self._subjects = context.settings.subjects
        self.name = kind.name
        self._per_run = kind.per_run
        self._runs: dict[str, _Run] = {}
        self._since = time.time()
        self._closing = False
        self._draining = False
        self._load = self._load_at = 0.0
        environment = (
            {**os.environ, "POPULACE_NATS_URL": self._settings.nats_url}
            if self._settings.nats_url
            else None
        )
        self._nursery = Nursery(worker_process.__name__, environment)
        self._starting = asyncio.Semaphore(_STARTING_PER_CORE * self._settings.cores)

    @property
    def _room(self) -> int:
        """How many more workers this host would run."""
        if self._draining:
            return 0
        by_memory = psutil.virtual_memory().available // _WORKER_MEMORY
        return max(0, min(self._settings.max_workers - self._busy, by_memory))

    @property
    def _busy(self) -> int:
        """Worker processes that runs have, or are about to have."""
        return sum(len(run.workers) + run.coming for run in self._runs.values())

    def info(self) -> HostInfo:
        """What the host says of itself."""
        busy = self._busy
        return HostInfo(
            host=self.name,
            address=socket.gethostname(),
            cores=self._settings.cores,
            memory=psutil.virtual_memory().total,
            load=self._load,
            workers=busy,
            free=self._room,
            per_run=self._per_run,
            since=self._since,
            version=__version__,
            labels=self._settings.labels,
            draining=self._draining,
            runs=self._by_run(),
        )

    def _by_run(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for scope, run in self._runs.items():
            found[self._subjects.life_of(scope)[0]] += len(run.workers) + run.coming
        return dict(found)

    # Processes
    async def _watch(self, worker: _Process) -> None:
        """Say so when a worker ends that nobody ended."""
        code = await worker.process.wait()
        run = self._runs.get(worker.run)
        if run is None or worker.released:
            return
        run.workers.remove(worker)
        reason = f"killed by signal {-code}" if code < 0 else f"it exited with code {code}"
        reason = run.ended[worker.name] = worker.stopped or reason
        log = _log.info if worker.stopped else _log.error
        log("a worker ended", worker=worker.name, run=worker.run, reason=reason)
        ended = WorkerEnded(run=worker.run, worker=worker.name, host=self.name, reason=reason)
        with contextlib.suppress(BusError):
            self._bus.send(
                self._subjects.run_workers(ended.run), pack_plain(ended.model_dump(mode="json"))
            )

    async def _fork(self, run: _Run, assignment: Assignment, came: list[_Process]) -> _Process:
        """Fork a worker, and wait until it listens."""
        async with self._starting:  # so many at once, however many are asked for
            if self._draining:
                raise InvalidInputError(f"the host {self.name} is drained")
            forked = await self._nursery.fork(assignment.worker, assignment.model_dump_json())
            scope = self._subjects.scope(assignment.run, assignment.life)
            worker = _Process(assignment.worker, forked, run=scope)
            came.append(worker)
            run.add([worker])
            worker.watch = asyncio.ensure_future(self._watch(worker))
            try:
                error = await asyncio.wait_for(forked.ready, _READY_WITHIN)
            except TimeoutError:
                error = f"it was not ready within {_READY_WITHIN:g} s"
            if error:
                raise PopulaceError(f"a worker could not start: {error}")
            return worker

    async def _end(self, workers: list[_Process], *, kill: bool = False) -> None:
        """End processes: ask first, unless there is nothing to wait for, then make sure."""
        for worker in workers:
            worker.released = True
            (worker.process.kill if kill else worker.process.terminate)()
        waits = [asyncio.ensure_future(w.process.wait()) for w in workers]
        if not waits:
            return
        _, late = await asyncio.wait(waits, timeout=_STOP_WITHIN)
        if late:
            _log.warning("workers did not stop in time and are killed", count=len(late))
            for worker in workers:
                worker.process.kill()
            await asyncio.wait(late, timeout=_STOP_WITHIN)

    # Requests
    async def acquire(self, request: AcquireWorkers) -> AcquiredWorkers:
        """Give a run workers."""
        if self._closing:
            raise InvalidInputError(f"the host {self.name} is stopping")
        if request.count > (room := self._room):
            raise InvalidInputError(
                f"the host {self.name} has room for {room} more workers, not {request.count}"
            )
        scope = self._subjects.scope(request.run, request.life)
        run = self._runs.get(scope)
        if run is None:
            run = self._runs[scope] = _Run()
        elif not request.isolated and (run.workers or run.coming):
            raise InvalidInputError(f"the run {request.run!r} has workers on {self.name} already")
        came: list[_Process] = []
        run.coming += request.count
        run.acquiring += 1
        try:
            made = await self._workers(run, request, came)
            self._check_still_there(scope, run)
            if self._draining:  # since it was asked
                raise InvalidInputError(f"the host {self.name} is drained")
        except BaseException as error:
            run.coming -= request.count - len(came)
            await self._end_some(scope, run, came)
            if isinstance(error, OSError):
                raise PopulaceError(f"a worker could not be started: {error}") from error
            raise
        finally:
            run.acquiring -= 1
            run.heard = time.monotonic()
        _log.info("workers given", run=scope, count=request.count)
        return AcquiredWorkers(workers=[w.name for w in made])

    async def _workers(
        self, run: _Run, request: AcquireWorkers, came: list[_Process]
    ) -> list[_Process]:
        """Fork the workers that a run asks for."""
        outcomes = await asyncio.gather(
            *(
                self._fork(run, self._assignment(new_id("w"), request), came)
                for _ in range(request.count)
            ),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [o for o in outcomes if isinstance(o, _Process)]

    def _assignment(self, worker: str, request: AcquireWorkers) -> Assignment:
        fields = request.model_dump(exclude={"count", "isolated"})
        return Assignment(worker=worker, host=self.name, **fields)

    async def _end_some(self, name: str, run: _Run, workers: list[_Process]) -> None:
        """End workers that were being given; and the run's place here, if it has no others."""
        run.workers = [w for w in run.workers if w not in workers]
        if not run.workers and self._runs.get(name) is run:
            del self._runs[name]
        await self._end([w for w in workers if w.process.returncode is None])

    def _check_still_there(self, name: str, run: _Run) -> None:
        if self._runs.get(name) is not run:
            raise InvalidInputError(f"the run {name!r} was released while it was given workers")

    async def _drop(self, name: str, *, kill: bool = False) -> int:
        run = self._runs.pop(name, None)
        if run is None:
            return 0
        await self._end(run.workers, kill=kill)
        return len(run.workers)

    async def release(self, request: ReleaseWorkers) -> Released:
        """End a run's workers."""
        names = [request.run]
        if request.before:
            names = [
                scope
                for scope in self._runs
                if (found := self._subjects.life_of(scope))[0] == request.run
                and found[1] < request.before
            ]
        count = sum([await self._drop(name, kill=request.kill) for name in names])
        if count:
            _log.info("workers taken back", run=request.run, count=count)
        return Released(workers=count)

    async def change(self, request: HostChange) -> HostInfo:
        """Do otherwise from now on."""
        if request.per_run is not None:
            self._per_run = request.per_run
        if request.draining is not None:
            self._draining = request.draining
            _log.info("draining" if self._draining else "takes on runs again", host=self.name)
        if request.draining:
            workers = [w for run in self._runs.values() for w in run.workers]
            await self._stop(workers, f"the host {self.name} is drained")
        await self._show()
        return self.info()

    async def stop_worker(self, request: StopWorker) -> Released:
        """End one worker; its run is told, as if it had died.

        Raises:
            InvalidInputError: there is no such worker here.
        """
        found = [w for run in self._runs.values() for w in run.workers if w.name == request.worker]
        if not found:
            raise InvalidInputError(f"the host {self.name} has no worker {request.worker!r}")
        await self._stop(found, "an operator stopped it")
        await self._show()
        return Released(workers=len(found))

    async def _stop(self, workers: list[_Process], why: str) -> None:
        """End workers whose runs did not ask for it; they hear of it from ``_watch``.

        At once, as if they had died: what they are at is begun again elsewhere, and what they
        would still say could only be in the way of that.
        """
        for worker in workers:
            worker.stopped = why
            worker.process.kill()
        waits = [asyncio.ensure_future(w.process.wait()) for w in workers]
        if waits:
            await asyncio.wait(waits, timeout=_STOP_WITHIN)

    async def detail(self, request: HostDetail) -> HostDetails:
        """Tell of each worker, and what was logged last."""
        told = HostDetails(info=self.info())
        told.workers = [
            WorkerProcess(worker=w.name, run=scope, pid=w.process.pid, since=w.since)
            for scope, run in self._runs.items()
            for w in run.workers
        ]
        told.log = await asyncio.to_thread(last_log_lines, request.lines)
        await asyncio.to_thread(_measure, told.workers)
        return told

    async def lease(self, request: Lease) -> LeaseRenewed:
        """Hear that a run's owner is alive."""
        run = self._runs.get(request.run)
        if run is None:
            raise InvalidInputError(f"the host {self.name} has no workers of {request.run!r}")
        run.heard = time.monotonic()
        return LeaseRenewed(workers=[w.name for w in run.workers], ended=run.ended)

    # The resident's life
    async def run(self) -> None:
        """Serve until told to stop."""
        for verb, model, handler in (
            ("acquire", AcquireWorkers, self.acquire),
            ("release", ReleaseWorkers, self.release),
            ("lease", Lease, self.lease),
            ("change", HostChange, self.change),
            ("stop", StopWorker, self.stop_worker),
            ("detail", HostDetail, self.detail),
        ):
            await serve(self._bus, self._subjects.host(self.name, verb), model, handler)  # type: ignore[arg-type]
        await self._nursery.start()
        info = self.info()
        await self._context.announce(
            self._kind.description,
            metadata={
                "host": self.name,
                "cores": str(info.cores),
                "memory": str(info.memory),
                "workers_per_run": str(info.per_run),
            },
            stats=lambda: self.info().model_dump(mode="json"),
        )
        self._bus.on_event(self._event)
        beat = asyncio.ensure_future(self._beat())
        _log.info("host is up", host=self.name, cores=info.cores)
        try:
            await self._context.stopping.wait()
        finally:
            self._closing = True
            beat.cancel()
            await asyncio.wait({beat}, timeout=_STOP_WITHIN)
            await self._withdraw()
            workers = [w for run in self._runs.values() for w in run.workers]
            self._runs.clear()
            await self._end(workers)
            await self._nursery.stop()

    async def _beat(self) -> None:
        """Show this host's state once a second, and end what nobody owns any more."""
        while not self._closing:
            try:
                await self._show()
                await self._end_silent()
            except Exception as error:  # the host must not vanish for a passing trouble
                _log.warning("the host can't show itself", error=str(error))
            await asyncio.sleep(_HEARTBEAT)

    async def _show(self) -> None:
        now = time.monotonic()
        if now - self._load_at > _HEARTBEAT / 2:  # over a shorter time it says little
            self._load, self._load_at = psutil.cpu_percent() / 100, now
        bucket = await self._bus.bucket(self._kind.bucket, ttl=HOST_TTL)
        await bucket.put(self.name, pack_plain(self.info().model_dump(mode="json")))

    def _event(self, event: str, _: str) -> None:
        if event == "reconnected":  # owners may find the broker again later than this host
            for run in self._runs.values():
                run.heard = time.monotonic()

    async def _end_silent(self) -> None:
        """End the workers of runs whose owner gives no sign of life."""
        silent = [
            name
            for name, run in self._runs.items()
            if time.monotonic() - run.heard > _LEASE and not run.acquiring and self._bus.connected
        ]
        for name in silent:
            _log.warning("a run's owner is gone; its workers end", run=name)
            await self._drop(name)

    async def _withdraw(self) -> None:
        if not self._bus.connected:
            return  # the entry expires by itself
        with contextlib.suppress(BusError):
            bucket = await self._bus.bucket(self._kind.bucket, ttl=HOST_TTL)
            await bucket.delete(self.name)


def _measure(workers: list[WorkerProcess]) -> None:
    """Add what processes use; in a thread."""
    for row in workers:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(row.pid)
            times = process.cpu_times()
            row.rss, row.cpu = process.memory_info().rss, times.user + times.system
