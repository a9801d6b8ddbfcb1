"""What the manager knows: one look at the broker a second, whoever watches."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from shared.bus import KeyValue, Message, NatsBus
from shared.codec import from_public
from shared.errors import BusError, BusUnavailableError, CodecError
from shared.logs import get_logger
from shared.messages.control import HostInfo
from shared.messages.scenario import RunInfo, Status
from shared.service import everybody
from shared.subjects import Subjects

_log = get_logger(__name__)

SERVICES = ("director", "models", "recorder", "persona_service", "env_service", "agent_host")
_EVERY = 1.0
_LOOK_WITHIN = 4.0
_STATES_EVERY = 2.0
_GONE_FOR = 3600.0
"""Seconds for which a host that went away is still shown."""
_RUNS_HELD = 200
_ROWS_HELD = 10_000
"""Rounds of a run that are held, the last ones; its files have all."""
_READ_PATIENCE = 5.0


@dataclass
class Seen:
    """A host, and when it was last heard of."""

    info: HostInfo
    heard: float
    """Unix time."""
    here: bool = True


@dataclass
class Progress:
    """What is known of a run beside its state."""

    rows: OrderedDict[int, dict[str, Any]] = field(default_factory=OrderedDict)
    """Finished rounds, by number."""
    caught_up: bool = False
    """Whether what happened before this process began was read as well."""
    lines: list[str] = field(default_factory=list)
    """What the scenario's report draws, of what it records."""
    now: dict[str, Any] = field(default_factory=dict)
    """Of the round under way: round, agents, done, failed, tokens, mean."""

    def take(self, status: Status) -> None:
        """Note what a status says; one that comes twice makes no difference."""
        if status.manifest and "report" in status.manifest:
            self.lines = [str(n) for n in status.manifest["report"].get("lines", ())]
        if status.row is not None:
            self.rows[status.row.round] = status.row.model_dump(mode="json")
            if next(reversed(self.rows)) > status.row.round:
                self.rows = OrderedDict(sorted(self.rows.items()))
            self.now = {}
            while len(self.rows) > _ROWS_HELD:
                self.rows.popitem(last=False)
        elif status.kind == "restored":
            kept = status.round or 0
            self.rows = OrderedDict((n, row) for n, row in self.rows.items() if n <= kept)
            self.now = {}
        elif status.kind in ("round_started", "progress"):
            names = ("round", "rounds", "agents", "done", "failed", "tokens", "mean")
            self.now = {n: v for n in names if (v := getattr(status, n)) is not None}


class Watcher:
    """Follows hosts, runs and services.

    Args:
        bus: a connection.
        subjects: the installation's.
    """

    def __init__(self, bus: NatsBus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self.hosts: dict[str, Seen] = {}
        self.keepers: dict[str, Seen] = {}
        self.runs: dict[str, RunInfo] = {}
        self.progress: OrderedDict[str, Progress] = OrderedDict()
        self.services: dict[str, list[dict[str, Any]]] = {}
        """By kind of service: what each instance says of itself."""
        self.rates: dict[tuple[int, str], float] = {}
        """Answers a second, by model service (in their order) and pool."""
        self._counts: dict[tuple[int, str], tuple[float, int]] = {}
        self.problem = ""
        """Why the last look came to nothing, if it did."""
        self.version = 0
        """One more whenever something has changed."""
        self.looked_at = 0.0
        """Unix time of the last look that came to something."""
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._catching: dict[str, asyncio.Task[Progress]] = {}
        self._meanwhile: dict[str, list[Status]] = {}
        """What came of runs while their statuses are read."""
        self._buckets: dict[str, KeyValue] = {}

    @property
    def broker(self) -> str:
        """``"up"``, or ``"away"`` while it can't be reached, or does not answer."""
        return "up" if self._bus.connected and not self.problem else "away"

    async def run(self) -> None:
        """Look, for as long as the manager lives."""
        subject = self._subjects.run_status()
        await self._bus.subscribe(subject, self._take_status)
        states = asyncio.ensure_future(self._look_at_services())
        before = ""
        try:
            while not self._over.is_set():
                try:
                    async with asyncio.timeout(_LOOK_WITHIN):
                        await self._look()
                    self.looked_at, self.problem = time.time(), ""
                except (BusError, TimeoutError) as error:
                    self.problem = str(error) or "it does not answer in time"
                except Exception:  # whatever stands there, the page stays
                    _log.exception("a look at the broker failed")
                    self.problem = "what stands there can't be read; the manager's log says more"
                told = f"{self.broker}{self._digest()}"
                if told != before:
                    before = told
                    self._note()
                await self._pause(_EVERY)
        finally:
            self.stop()
            states.cancel()

    def stop(self) -> None:
        """Have ``run`` end once its look at the broker is over."""
        self._over.set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def changed(self, since: int, timeout: float) -> int:
        """Wait until there is something newer than a version; returns the newest."""
        if self.version <= since:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout)
        return self.version

    def forget(self, run: str) -> None:
        """A run was deleted."""
        self.progress.pop(run, None)
        self.runs.pop(run, None)

    async def refresh(self) -> None:
        """Look at once: something was done that whoever did it wants to see.

        Raises:
            BusError: the broker does not answer.
        """
        await self._look()
        self._note()

    def _note(self) -> None:
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _digest(self) -> str:
        hosts = [
            (n, s.here, s.info.workers, s.info.draining, round(20 * s.info.load))
            for seen in (self.hosts, self.keepers)
            for n, s in sorted(seen.items())
        ]
        runs = [(r.run, r.state, r.rounds_done) for r in self.runs.values()]
        return repr((hosts, runs, {n: len(held) for n, held in self.services.items()}))

    async def _bucket(self, name: str) -> KeyValue:
        found = self._buckets.get(name)
        if found is None:
            found = self._buckets[name] = await self._bus.bucket(name)
        return found

    async def _look(self) -> None:
        now = time.time()
        for seen, name in (
            (self.hosts, self._subjects.bucket_hosts),
            (self.keepers, self._subjects.bucket_keepers),
        ):
            entries = await (await self._bucket(name)).entries()
            here = {}
            for entry in entries:
                with contextlib.suppress(CodecError, ValueError):
                    info = HostInfo.model_validate(from_public(entry.value))
                    here[info.host] = Seen(info, now)
            for host, last in list(seen.items()):
                if host not in here:
                    last.here = False
                    if now - last.heard > _GONE_FOR:
                        del seen[host]
            seen.update(here)
        entries = await (await self._bucket(self._subjects.bucket_runs)).entries()
        runs = {}
        for entry in entries:
            with contextlib.suppress(ValueError):  # of another version, say
                info_of = RunInfo.model_validate_json(entry.value)
                runs[info_of.run] = info_of
        self.runs = runs

    async def catch_up(self, run: str) -> Progress | None:
        """What is known of a run, what happened before this process began included.

        Raises:
            BusError: the broker does not answer.
        """
        held = self.progress.get(run)
        if (held is not None and held.caught_up) or run not in self.runs:
            return held
        if not self._bus.connected:
            raise BusUnavailableError("the broker is away")
        task = self._catching.get(run)
        if task is None:  # whoever comes meanwhile waits for the same
            self._meanwhile[run] = []
            task = self._catching[run] = asyncio.ensure_future(self._read_statuses(run))
            task.add_done_callback(lambda _: self._catching.pop(run, None))
        return await asyncio.shield(task)

    async def _read_statuses(self, run: str) -> Progress:
        """Read a run's statuses from the first on, then what came meanwhile once more."""
        meanwhile = self._meanwhile[run]
        fresh = Progress(caught_up=True)
        try:
            subject = self._subjects.run_status(run)
            statuses = self._bus.read(
                self._subjects.stream_runs, (subject,), patience=_READ_PATIENCE
            )
            async for message in statuses:
                with contextlib.suppress(ValueError):
                    fresh.take(Status.model_validate_json(message.data))
        finally:
            del self._meanwhile[run]
        for status in meanwhile:
            fresh.take(status)
        self.progress[run] = fresh
        return fresh

    def _take_status(self, message: Message) -> None:
        try:
            status = Status.model_validate_json(message.data)
        except ValueError:
            return
        held = self.progress.get(status.run)
        if held is None:
            held = self.progress[status.run] = Progress()
            while len(self.progress) > _RUNS_HELD:
                self.progress.popitem(last=False)
        held.take(status)
        if status.run in self._meanwhile:
            self._meanwhile[status.run].append(status)
        self._note()

    async def _look_at_services(self) -> None:
        """Ask all services what they say of themselves, by NATS's service protocol."""
        number = 0
        while not self._over.is_set():
            for name in SERVICES:
                number += 1
                with contextlib.suppress(BusError):
                    self.services[name] = await self._ask_all(name, number)
                    if name == "models":
                        self._reckon()
            await self._pause(_STATES_EVERY)

    def _reckon(self) -> None:
        """How fast pools answer: since the last look, or the one before if that was just now."""
        now = time.monotonic()
        for place, told in enumerate(self.services["models"]):
            for name, pool in told.items():
                if not isinstance(pool, dict) or "answered" not in pool:
                    continue
                key, count = (place, name), int(pool["answered"])
                at, before = self._counts.get(key, (now, count))
                if now - at > 0.5:
                    self.rates[key] = max(0, count - before) / (now - at)
                self._counts[key] = (now, count)

    async def _ask_all(self, name: str, number: int) -> list[dict[str, Any]]:
        inbox = self._subjects.inbox(self._bus.process, f"stats-{number}")
        told = await everybody(self._bus, self._subjects.service_stats(name), inbox)
        return [((one.get("endpoints") or [{}])[0]).get("data") or {} for one in told]
