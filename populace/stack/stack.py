"""Bringing a stack up and down, and looking at it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from populace.stack import processes
from populace.stack.broker import broker_command, last_lines, wait_for_broker
from populace.stack.state import (
    ProcessRecord,
    StackRecord,
    broker_url,
    page_address,
    read_record,
    record_file,
    write_record,
)
from shared import __version__
from shared.bus import NatsBus
from shared.codec import from_public
from shared.errors import BusError, InvalidInputError, PopulaceError
from shared.messages.control import HostInfo
from shared.messages.scenario import RunInfo
from shared.service import everybody
from shared.settings import Settings
from shared.subjects import Subjects

SERVICES = {
    "director": "services.director",
    "recorder": "services.recorder",
    "models": "services.models",
    "persona_service": "persona_service",
    "env_service": "env_service",
    "agent_host": "agent_host",
}
"""Service name to the module that runs it; ended in this order, the broker last."""
MANAGER = {"manager": "services.manager"}
"""The page over all of it: for those who stay."""
_PAGE_NEEDS = ("jinja2", "numpy", "plotly")

_READY_WITHIN = 60.0
_STOP_WITHIN = 25.0
_BROKER_STOP_WITHIN = 10.0


class AlreadyUpError(PopulaceError):
    """A stack runs in this working directory."""


@contextlib.contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    """Hold the stack's lock.

    Raises:
        PopulaceError: another command is starting or stopping it.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    with (settings.home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PopulaceError(
                f"another command is starting or stopping the stack in {settings.home}; "
                "wait for it to finish"
            ) from None
        yield


def mark_of(settings: Settings) -> str:
    """The mark that the processes of this stack carry."""
    return str(settings.home.resolve())


def is_up(settings: Settings) -> bool:
    """Whether a stack that was started here has living processes."""
    record = read_record(settings)
    return record is not None and any(map(processes.is_alive, record.processes))


def has_page() -> bool:
    """Whether what the manager needs is installed (extra ``manager``)."""
    return all(importlib.util.find_spec(name) is not None for name in _PAGE_NEEDS)


def up(settings: Settings, *, page: bool = False) -> StackRecord:
    """Start broker (unless one is set) and services; returns once all of them answer.

    Where a part of a stack is up here already, what has died of it is started again.

    Args:
        settings: of the installation.
        page: whether the manager is started as well.

    Raises:
        AlreadyUpError: a stack runs here already, and nothing of it is missing.
        BusUnavailableError: the broker that is set can't be reached.
        PopulaceError: something did not start; nothing that was begun is left running.
    """
    with _alone(settings):
        record = read_record(settings)
        if record is not None and any(map(processes.is_alive, record.processes)):
            return _mend(settings, record, MANAGER if page else {})
        _sweep(settings)  # what a killed command may have left
        record = StackRecord(
            nats_url=settings.nats_url or "",
            embedded_broker=settings.nats_url is None,
            since=time.time(),
            version=__version__,
        )
        try:
            return _start(settings, record, {**SERVICES, **(MANAGER if page else {})})
        except BaseException:
            _stop_all(settings)
            raise


def _mend(settings: Settings, record: StackRecord, more: dict[str, str]) -> StackRecord:
    """Start what has died of a stack, at the address that the others know."""
    had = {noted.name for noted in record.processes}
    alive = [noted for noted in record.processes if processes.is_alive(noted)]
    there = {noted.name for noted in alive}
    wanted = {**SERVICES, **{name: m for name, m in MANAGER.items() if name in had}, **more}
    missing = {name: module for name, module in wanted.items() if name not in there}
    if not missing and ("broker" in there or not record.embedded_broker):
        raise AlreadyUpError(
            f"Populace is up here already, on {record.nats_url}; see 'populace status', or "
            "stop it with 'populace down'"
        )
    record.processes = list(alive)
    try:
        return _start(settings, record, missing)
    except BaseException:
        processes.end_recorded([p for p in record.processes if p not in alive], _STOP_WITHIN)
        record.processes = alive
        write_record(settings, record)
        raise


def _start(settings: Settings, record: StackRecord, services: dict[str, str]) -> StackRecord:
    logs = settings.home / "logs"

    def begin(
        name: str, command: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        process, noted = processes.start(
            name,
            command,
            mark=mark_of(settings),
            log=logs / f"{name}.log",
            environment=environment,
        )
        record.processes.append(noted)
        write_record(settings, record)
        return process

    if not record.embedded_broker:
        asyncio.run(_reach(settings, record.nats_url))
    elif not any(noted.name == "broker" for noted in record.processes):
        known = record.nats_url.rpartition(":")[2]
        command, ports = broker_command(settings, int(known) if known else None)
        broker = begin("broker", command, {})
        record.nats_url = wait_for_broker(broker, ports, logs / "broker.log")
    environment = {
        "POPULACE_NATS_URL": record.nats_url,
        "POPULACE_HOME": str(settings.home.resolve()),
        "POPULACE_RUNS_DIR": str(settings.runs_dir.resolve()),
        "POPULACE_PERSONAS_DIR": str(settings.personas_dir.resolve()),
        "POPULACE_CODE_ROOTS": os.pathsep.join(map(str, settings.roots)),
    }
    started = {
        name: begin(name, [sys.executable, "-m", module], environment)
        for name, module in services.items()
    }
    asyncio.run(_wait_for_services(settings, record.nats_url, started, logs))
    return record


async def _reach(settings: Settings, url: str) -> None:
    bus = await NatsBus.connect(settings, url)
    await bus.drain()


async def _wait_for_services(
    settings: Settings, url: str, started: dict[str, subprocess.Popen[bytes]], logs: Path
) -> None:
    bus = await NatsBus.connect(settings, url)
    deadline = time.monotonic() + _READY_WITHIN
    missing = set(started)
    try:
        while missing:
            for name in sorted(missing):
                if started[name].poll() is not None:
                    tail = " / ".join(_messages(logs / f"{name}.log"))
                    raise PopulaceError(f"the service {name!r} did not start: {tail}")
                with contextlib.suppress(BusError):
                    await bus.request(settings.subjects.service_ping(name), b"", timeout=1)
                    missing.discard(name)
            if time.monotonic() > deadline:
                raise PopulaceError(
                    f"services did not answer within {_READY_WITHIN:g} s: "
                    f"{', '.join(sorted(missing))}; see the logs in {logs}"
                )
            await asyncio.sleep(0.05)
    finally:
        await bus.drain()


def _messages(log: Path) -> list[str]:
    """The last log lines' own words."""
    found = []
    for line in last_lines(log, 2):
        try:
            found.append(str(json.loads(line)["event"]))
        except (ValueError, KeyError, TypeError):
            found.append(line)
    return found or ["it said nothing"]


def down(settings: Settings) -> int:
    """Stop everything that was started here; returns how many processes there were."""
    with _alone(settings):
        return _stop_all(settings)


def _stop_all(settings: Settings) -> int:
    try:
        record = read_record(settings)
    except InvalidInputError:
        record = None
    count = 0
    noted = record.processes if record is not None else []
    services = [p for p in noted if p.name != "broker" and processes.is_alive(p)]
    brokers = [p for p in noted if p.name == "broker" and processes.is_alive(p)]
    deadline = time.monotonic() + _STOP_WITHIN  # for all of them together
    for name in (*MANAGER, *SERVICES):
        left = max(1.0, deadline - time.monotonic())
        count += _end([p for p in services if p.name == name], left)
    # Workers end with their host, and runs with their director; whatever is left goes now.
    strays = [p for p in processes.marked(mark_of(settings)) if p.pid not in _pids(brokers)]
    processes.end(strays, 5.0)
    count += len(strays)
    count += _end(brokers, _BROKER_STOP_WITHIN)
    count += _sweep(settings)
    record_file(settings).unlink(missing_ok=True)
    return count


def _pids(records: list[ProcessRecord]) -> set[int]:
    return {record.pid for record in records}


def _end(records: list[ProcessRecord], within: float) -> int:
    processes.end_recorded(records, within)
    return len(records)


def _sweep(settings: Settings) -> int:
    """End every process that carries this stack's mark, on record or not."""
    strays = processes.marked(mark_of(settings))
    processes.end(strays, 5.0)
    return len(strays)


@dataclass
class StackStatus:
    """What a look at the installation found."""

    nats_url: str
    embedded_broker: bool | None
    """None: no stack was started here."""
    processes: list[tuple[ProcessRecord, bool]]
    """Each with whether it is alive."""
    services: dict[str, int]
    """Service name to how many instances answer, on any machine."""
    hosts: list[HostInfo]
    runs: list[RunInfo]
    """Latest first."""
    page: str | None = None
    """Address of the manager's page, if it was started here."""


async def look(settings: Settings) -> StackStatus:
    """Ask the broker what is there.

    Raises:
        BusUnavailableError: there is none.
    """
    record = read_record(settings)
    url = broker_url(settings)
    bus = await NatsBus.connect(settings, url)
    try:
        subjects = settings.subjects
        services = {name: len(told) for name, told in (await ping_services(bus, subjects)).items()}
        hosts = await bus.bucket(subjects.bucket_hosts)
        runs = await bus.bucket(subjects.bucket_runs)
        found_hosts = [HostInfo.model_validate(from_public(e.value)) for e in await hosts.entries()]
        found_runs = [RunInfo.model_validate_json(e.value) for e in await runs.entries()]
    finally:
        await bus.drain()
    return StackStatus(
        nats_url=url,
        embedded_broker=record.embedded_broker if record is not None else None,
        processes=[(p, processes.is_alive(p)) for p in record.processes] if record else [],
        services=services,
        hosts=sorted(found_hosts, key=lambda h: h.host),
        runs=sorted(found_runs, key=lambda r: -r.created),
        page=page_address(settings) if _page_is_up(record) else None,
    )


async def ping_services(bus: NatsBus, subjects: Subjects) -> dict[str, list[dict[str, Any]]]:
    """What all instances of each service say of themselves.

    Raises:
        BusError: the broker is away.
    """
    told = await asyncio.gather(
        *(
            everybody(bus, subjects.service_ping(name), subjects.inbox(bus.process, f"ping-{name}"))
            for name in SERVICES
        )
    )
    return dict(zip(SERVICES, told, strict=True))


def _page_is_up(record: StackRecord | None) -> bool:
    noted = record.processes if record is not None else []
    return any(p.name in MANAGER and processes.is_alive(p) for p in noted)
