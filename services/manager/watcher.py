"""What the manager knows: one look at the broker a second, whoever watches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from shared.bus import KeyValue, Message, NatsBus
from shared.codec import from_public
from shared.errors import BusError, CodecError
from shared.logs import get_logger
from shared.messages.control import HostInfo
from shared.messages.scenario import RunInfo, Status
from shared.subjects import Subjects

_log = get_logger(__name__)

SERVICES = ("director", "models", "recorder", "persona_service", "env_service", "agent_host")
_EVERY = 1.0
_STATES_EVERY = 2.0
_GONE_FOR = 3600.0
"""Seconds for which a host that went away is still shown."""
_RUNS_HELD = 200


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
        self._buckets: dict[str, KeyValue] = {}

    @property
    def broker(self) -> str:
        """``"up"``, or ``"away"`` while it can't be reached."""
        return "up" if self._bus.connected else "away"

    async def run(self) -> None:
        """Look, for as long as the manager lives."""
        subject = self._subjects.run_status()
        await self._bus.subscribe(subject, self._take_status)
        states = asyncio.ensure_future(self._look_at_services())
        before = ""
        try:
            while True:
                try:
                    await self._look()
                    self.looked_at, self.problem = time.time(), ""
                except BusError as error:
                    self.problem = str(error)
                told = f"{self.broker}{self._digest()}"
                if told != before:
                    before = told
                    self._note()
                await asyncio.sleep(_EVERY)
        finally:
            states.cancel()

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
            (n, s.here, s.info.workers, round(s.info.load, 2))
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
        self.runs = {
            info.run: info for info in (RunInfo.model_validate_json(e.value) for e in entries)
        }

    async def catch_up(self, run: str) -> Progress | None:
        """What is known of a run, what happened before this process began included.

        Raises:
            BusError: the broker does not answer.
        """
        held = self.progress.get(run)
        if (held is None or not held.caught_up) and run in self.runs:
            held = self._held(run)
            held.caught_up = True  # at once: others need not read the same
            subject = self._subjects.run_status(run)
            try:
                async for message in self._bus.read(self._subjects.stream_runs, (subject,)):
                    self._take_status(message)
            except BusError:
                held.caught_up = False
                raise
        return held

    def _held(self, run: str) -> Progress:
        held = self.progress.get(run)
        if held is None:
            held = self.progress[run] = Progress()
            while len(self.progress) > _RUNS_HELD:
                self.progress.popitem(last=False)
        return held

    def _take_status(self, message: Message) -> None:
        try:
            status = Status.model_validate_json(message.data)
        except ValueError:
            return
        held = self._held(status.run)
        if status.manifest and "report" in status.manifest:
            held.lines = [str(n) for n in status.manifest["report"].get("lines", ())]
        if status.row is not None:
            held.rows[status.row.round] = status.row.model_dump(mode="json")
            if next(reversed(held.rows)) > status.row.round:  # told late: of earlier rounds
                held.rows = OrderedDict(sorted(held.rows.items()))
            held.now = {}
        elif status.kind == "restored":
            kept = status.round or 0
            held.rows = OrderedDict((n, row) for n, row in held.rows.items() if n <= kept)
        elif status.kind in ("round_started", "progress"):
            names = ("round", "rounds", "agents", "done", "failed", "tokens", "mean")
            held.now = {n: v for n in names if (v := getattr(status, n)) is not None}
        self._note()

    async def _look_at_services(self) -> None:
        """Ask all services what they say of themselves, by NATS's service protocol."""
        number = 0
        while True:
            for name in SERVICES:
                number += 1
                with contextlib.suppress(BusError):
                    self.services[name] = await self._ask_all(name, number)
                    if name == "models":
                        self._reckon()
            await asyncio.sleep(_STATES_EVERY)

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
        found: dict[str, dict[str, Any]] = {}

        def take(message: Message) -> None:
            if message.data:  # empty: the broker's word that nobody listens
                with contextlib.suppress(ValueError):
                    told = json.loads(message.data)
                    endpoints = told.get("endpoints") or [{}]
                    found[str(told.get("id"))] = endpoints[0].get("data") or {}

        inbox = self._subjects.inbox(self._bus.process, f"stats-{number}")
        subscription = await self._bus.subscribe(inbox, take)
        try:
            self._bus.send(self._subjects.service_stats(name), b"", reply=inbox)
            await self._bus.flush()
            await asyncio.sleep(0.3)
        finally:
            await subscription.unsubscribe()
        return [found[key] for key in sorted(found)]
