"""The worker processes that one run has, on all hosts of a kind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

from populace.errors import PlacementError
from populace.workers.host import HOST_TTL
from shared.bus import Bus, Message
from shared.codec import from_public
from shared.errors import BusError, NoRespondersError, RemoteError
from shared.logs import get_logger
from shared.messages.control import (
    AcquiredWorkers,
    AcquireWorkers,
    HostInfo,
    Lease,
    LeaseRenewed,
    Released,
    ReleaseWorkers,
    WorkerEnded,
)
from shared.service import ask
from shared.settings import Settings

_log = get_logger(__name__)

_LEASE_EVERY = 0.5
_LEASE_MISSES = 3
_SETTLES = 2.0
"""Seconds after a reconnect in which a host that is not heard of is not taken for dead."""
_LEASE_ENDS_WITHIN = 5.0
_ACQUIRE_TIMEOUT = 60.0
_ACQUIRE_EACH = 0.5
_PATIENCE, _LONG_PATIENCE, _LOOK_AGAIN = 10.0, 60.0, 0.5

OnLost = Callable[[str, str], None]
"""Told of a worker that is gone, and why."""


class WorkerPool:
    """The worker processes of one run on all hosts of a kind; keeps them alive by its lease.

    Args:
        bus: the owner's connection.
        settings: the installation's.
        run: whose they are.
        bucket: where the hosts show themselves.
        advice: what to do if there is none, as the end of a sentence.
        life: which life of the run has them.
    """

    def __init__(
        self, bus: Bus, settings: Settings, run: str, bucket: str, advice: str, *, life: int = 1
    ) -> None:
        self._bus = bus
        self._bucket = bucket
        self._advice = advice
        self._settings = settings
        self._subjects = settings.subjects
        self._run = run
        self._life = life
        self._scope = settings.subjects.scope(run, life)
        self.hosts: dict[str, list[str]] = {}
        """Host to the workers that it gave."""
        self._lease: asyncio.Task[None] | None = None
        self._released = False
        self._on_lost: OnLost

    async def acquire(
        self,
        count: int | None,
        at_most: int | None,
        request: AcquireWorkers,
        on_lost: OnLost,
    ) -> list[tuple[str, str]]:
        """Get workers; returns (worker, host) of each.

        Raises:
            PlacementError: there is no host, or not enough room.
        """
        self._on_lost = on_lost
        await self._bus.subscribe(self._subjects.run_workers(self._scope), self._ended)
        # From the first host's answer on, its lease counts, however slow the others are.
        self._lease = asyncio.ensure_future(self._keep_lease())
        try:
            if self._life > 1:
                await self._end_earlier_lives()
            return await self._acquire(count, at_most, request)
        except PlacementError:
            await self._release(list(self.hosts))
            raise

    async def _end_earlier_lives(self) -> None:
        """Have all hosts end what is left of the run's earlier lives."""
        request = ReleaseWorkers(run=self._run, before=self._life, kill=True)
        await asyncio.gather(
            *(self._ask_to_release(host.host, request) for host in await self._find_hosts())
        )

    async def more(self, count: int, request: AcquireWorkers) -> list[tuple[str, str]]:
        """Get a worker each for so many isolated agents; returns (worker, host) of each.

        Raises:
            PlacementError: there is not enough room.
        """
        return await self._acquire(count, None, request.model_copy(update={"isolated": True}))

    async def replace(self, request: AcquireWorkers, within: float = 60.0) -> str:
        """Get one worker from any host that gives one, in place of those that were lost.

        Raises:
            PlacementError: no host did.
        """
        deadline = time.monotonic() + within
        reason = self._advice
        while time.monotonic() < deadline:
            for info in await self._find_hosts():
                if self.hosts.get(info.host):
                    continue
                try:
                    found = await self._acquire_from(info.host, 1, request)
                except (RemoteError, BusError) as error:
                    reason = str(error)  # it may be the one that has just died
                else:
                    return found[0][0]
            await asyncio.sleep(0.2)
        raise PlacementError(f"no worker could be had: {reason}")

    async def _acquire(
        self, count: int | None, at_most: int | None, request: AcquireWorkers
    ) -> list[tuple[str, str]]:
        """Get workers from all hosts that offer some; hosts that have just died are left out."""
        dead: set[str] = set()
        until = time.monotonic() + _LONG_PATIENCE
        found: list[tuple[str, str]] = []
        missing = count
        while True:
            hosts = [host for host in await self._find_hosts() if host.host not in dead]
            if not hosts and self._life > 1 and time.monotonic() < until:
                # Those that died may be starting again, under the same names.
                dead.clear()
                await asyncio.sleep(_LOOK_AGAIN)
                continue
            if not hosts:
                raise PlacementError(self._advice)
            if self._life > 1 and missing is not None:
                # Fewer than the run began with, if one of its hosts is gone.
                missing = min(missing, max(1, sum(host.free for host in hosts)))
            shares = _divide(hosts, missing, at_most)
            outcomes = await asyncio.gather(
                *(self._acquire_from(host, share, request) for host, share in shares.items()),
                return_exceptions=True,
            )
            gone: set[str] = set()
            for host, outcome in zip(shares, outcomes, strict=True):
                if isinstance(outcome, NoRespondersError):
                    gone.add(host)
                elif isinstance(outcome, (RemoteError, BusError)):
                    raise PlacementError(f"no workers for the run: {outcome}") from outcome
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    found.extend(outcome)
            if not gone or (count is None and found):
                return _in_turn(found)
            dead |= gone
            missing = None if count is None else sum(shares[host] for host in gone)

    async def _acquire_from(
        self, host: str, share: int, request: AcquireWorkers
    ) -> list[tuple[str, str]]:
        reply = await ask(
            self._bus,
            self._subjects.host(host, "acquire"),
            request.model_copy(update={"count": share}),
            AcquiredWorkers,
            timeout=_ACQUIRE_TIMEOUT + share * _ACQUIRE_EACH,
            patience=1.0,
        )
        self.hosts.setdefault(host, []).extend(reply.workers)
        return [(worker, host) for worker in reply.workers]

    async def _find_hosts(self) -> list[HostInfo]:
        bucket = await self._bus.bucket(self._bucket, ttl=HOST_TTL)
        # A run that lost its hosts waits for them to come back.
        deadline = time.monotonic() + (_PATIENCE if self._life == 1 else _LONG_PATIENCE)
        while True:
            entries = await bucket.entries()
            if entries:
                hosts = [HostInfo.model_validate(from_public(e.value)) for e in entries]
                free = sorted((h for h in hosts if not h.draining), key=lambda h: h.host)
                if free or self._life > 1:  # one that goes on waits for another host
                    return free
                raise PlacementError(
                    f"all hosts that are up are drained ({', '.join(h.host for h in hosts)}): have "
                    "one take on runs again, or start another"
                )
            if time.monotonic() > deadline:
                raise PlacementError(self._advice)
            await asyncio.sleep(0.1)

    def _ended(self, message: Message) -> None:
        ended = WorkerEnded.model_validate(from_public(message.data))
        self._lose(ended.host, [ended.worker], ended.reason)

    def _lose(self, host: str, workers: list[str], reason: str) -> None:
        if host not in self.hosts or self._released:
            return
        held = self.hosts[host]
        lost = [w for w in workers if w in held]
        self.hosts[host] = [w for w in held if w not in lost]
        for worker in lost:
            _log.error("a worker is lost", worker=worker, host=host, reason=reason)
            self._on_lost(worker, f"the worker {worker} on {host} is gone: {reason}")

    async def _keep_lease(self) -> None:
        misses: dict[str, int] = {}
        reconnects, settled = self._bus.stats.reconnects, 0.0
        while not self._released:
            await asyncio.sleep(_LEASE_EVERY)
            if self._bus.stats.reconnects != reconnects:
                # The broker was away; hosts may find it again later than we do.
                reconnects, settled = self._bus.stats.reconnects, time.monotonic() + _SETTLES
            if time.monotonic() < settled:
                misses.clear()
            await asyncio.gather(*(self._renew(host, misses) for host in list(self.hosts)))

    async def _renew(self, host: str, misses: dict[str, int]) -> None:
        if not self.hosts[host]:
            return
        try:
            reply = await ask(
                self._bus,
                self._subjects.host(host, "lease"),
                Lease(run=self._scope, owner=self._bus.process),
                LeaseRenewed,
                timeout=1.0,
            )
        except RemoteError as error:
            self._lose(host, self.hosts[host], str(error))
        except BusError as error:
            if not self._bus.connected:
                return  # our own connection is down: the host is not to blame
            misses[host] = misses.get(host, 0) + (2 if isinstance(error, NoRespondersError) else 1)
            if misses[host] >= _LEASE_MISSES:
                self._lose(host, self.hosts[host], "its host does not answer")
        else:
            misses[host] = 0
            alive = set(reply.workers)
            for worker in self.hosts[host]:
                if worker not in alive:
                    self._lose(host, [worker], reply.ended.get(worker, "its process ended"))

    async def _release(self, hosts: list[str], *, kill: bool = False) -> None:
        request = ReleaseWorkers(run=self._scope, kill=kill)
        await asyncio.gather(*(self._ask_to_release(host, request) for host in hosts))

    async def _ask_to_release(self, host: str, request: ReleaseWorkers) -> None:
        with contextlib.suppress(BusError, RemoteError):
            subject = self._subjects.host(host, "release")
            await ask(self._bus, subject, request, Released, timeout=10)

    async def release(self, *, kill: bool = False) -> None:
        """Give all workers back; with ``kill``, nothing that they hold is of use any more."""
        self._released = True
        if self._lease is not None:
            self._lease.cancel()
            await asyncio.wait({self._lease}, timeout=_LEASE_ENDS_WITHIN)
        hosts, self.hosts = list(self.hosts), {}
        await self._release(hosts, kill=kill)


def _in_turn(workers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Workers with their hosts taking turns, so that whatever is fewer spreads over them too."""
    place: Counter[str] = Counter()
    ranked = []
    for worker, host in workers:
        ranked.append((place[host], worker, host))
        place[host] += 1
    ranked.sort(key=lambda row: row[0])
    return [(worker, host) for _, worker, host in ranked]


def _divide(hosts: list[HostInfo], count: int | None, at_most: int | None) -> dict[str, int]:
    """How many workers each host gives."""
    offers = {h.host: (h.per_run if count is None else h.free) for h in hosts}
    offers = {h.host: min(offers[h.host], h.free) for h in hosts if min(offers[h.host], h.free) > 0}
    room = sum(offers.values())
    wanted = room if count is None else count
    if at_most is not None:
        wanted = min(wanted, at_most)
    if not offers or wanted > room:
        names = ", ".join(f"{h.host}: {h.free}" for h in hosts)
        raise PlacementError(
            f"{max(wanted, 1)} workers were asked for, but the hosts have room for {room} ({names})"
        )
    shares = dict.fromkeys(offers, 0)
    while wanted > 0:  # one each in turn, so that a run spreads over the hosts
        for host in shares:
            if wanted > 0 and shares[host] < offers[host]:
                shares[host] += 1
                wanted -= 1
    return {host: share for host, share in shares.items() if share}
