"""A whole installation of its own, every process of which may be killed: for tests and chaos.

The broker (or three), and all services, as processes on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from populace.stack import processes
from populace.stack.broker import broker_command, find_server, wait_for_broker
from shared.bus import NatsBus
from shared.errors import BusError, RemoteError
from shared.messages.control import Assignment, Placement, WorkerStats
from shared.service import ask, everybody
from shared.settings import Settings
from shared.streams import ensure_streams

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "director": "services.director",
    "recorder": "services.recorder",
    "models": "services.models",
    "env_service": "env_service",
    "agent_host": "agent_host",
}
_READY_WITHIN = 60.0


class Installation:
    """Starts and kills the processes of one installation.

    Args:
        home: a folder for everything that it writes.
        models: module of the model service.
        workers: worker processes that a host gives a run.
        environment: more variables for all services.
    """

    def __init__(
        self,
        home: Path,
        *,
        models: str = "services.models",
        workers: int = 2,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.home = home
        self.runs = home / "runs"
        self.modules = {**MODULES, "models": models, "manager": "services.manager"}
        self._workers = workers
        self.environment = environment or {}
        self.nodes: list[subprocess.Popen[bytes] | None] = []
        """Brokers of a cluster."""
        self.url = ""
        self.broker: subprocess.Popen[bytes] | None = None
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self._closed = False

    def settings(self) -> Settings:
        """Settings that lead to it."""
        return Settings(
            nats_url=self.url,
            home=self.home,
            code_roots=str(ROOT),
            connect_timeout=5,
            runs_dir=self.runs,
            **{k.removeprefix("POPULACE_").lower(): v for k, v in self.environment.items()},  # type: ignore[arg-type]
        )

    def start_broker(self) -> None:
        """Start the broker, on the port that it had before if it was there."""
        port = int(self.url.rpartition(":")[2]) if self.url else -1
        command, ports = broker_command(Settings(home=self.home), port)
        log = self.home / "broker.log"
        with log.open("ab") as output:
            self.broker = subprocess.Popen(command, stdout=output, stderr=output)
        self.url = wait_for_broker(self.broker, ports, log)

    def start(self, *names: str) -> None:
        """Start services: by kind, with a number after it where there are several."""
        for name in names:
            self.start_one(name)

    def start_one(self, name: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a service, with variables of its own."""
        kind = name.rstrip("0123456789")
        with (self.home / f"{name}.log").open("ab") as output:
            made = self.services[name] = subprocess.Popen(
                [sys.executable, "-m", self.modules[kind]],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "POPULACE_NATS_URL": self.url,
                    "POPULACE_HOME": str(self.home),
                    "POPULACE_CODE_ROOTS": str(ROOT),
                    "POPULACE_RUNS_DIR": str(self.runs),
                    "POPULACE_WORKERS": str(self._workers),
                    processes.MARK: str(self.home),
                    **self.environment,
                    **environment,
                },
            )
        return made

    async def ready(self, bus: NatsBus) -> None:
        """Wait until all services that were started answer."""
        for kind in MODULES:
            wanted = sum(name.rstrip("0123456789") == kind for name in self.services)
            ping = self.settings().subjects.service_ping(kind)
            async with asyncio.timeout(_READY_WITHIN):
                while len(await everybody(bus, ping, f"{bus.process}.pings")) < wanted:
                    await asyncio.sleep(0.05)

    def kill(self, name: str) -> None:
        """Kill -9 of a service; what it started dies with it."""
        process = self.services.pop(name)
        process.kill()
        process.wait(10)

    def start_cluster(self, size: int = 3) -> None:
        """Start brokers that keep copies of all streams."""
        ports = _free_ports(2 * size)
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports[size:])
        for i in range(size):
            folder = self.home / f"nats{i}"
            folder.mkdir(exist_ok=True)
            (folder / "nats.conf").write_text(
                f'server_name: "n{i}"\nlisten: "127.0.0.1:{ports[i]}"\n'
                "max_payload: 1MB\nmax_pending: 256MB\n"
                f'jetstream {{ store_dir: "{folder / "jetstream"}", max_file_store: 64GB }}\n'
                f'cluster {{ name: c, listen: "127.0.0.1:{ports[size + i]}", '
                f"routes: [{routes}] }}\n"
            )
            self.nodes.append(None)
            self.start_node(i)
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in ports[:size])
        self.environment["POPULACE_REPLICAS"] = str(size)

    async def connect_to_cluster(self, within: float = 60.0) -> NatsBus:
        """A connection, once the brokers have found one another and hold the streams."""
        async with asyncio.timeout(within):
            while True:
                bus = await NatsBus.connect(self.settings(), self.url)
                try:
                    await ensure_streams(bus, self.settings().subjects)
                    return bus
                except BusError:
                    await bus.drain()
                    await asyncio.sleep(0.5)

    def start_node(self, number: int) -> None:
        """Start one broker of the cluster, unless everything has ended meanwhile."""
        if self._closed:
            return
        log = self.home / f"broker{number}.log"
        command = [str(find_server()), "-c", str(self.home / f"nats{number}" / "nats.conf")]
        with log.open("ab") as output:
            self.nodes[number] = subprocess.Popen(command, stdout=output, stderr=output)

    def kill_node(self, number: int) -> None:
        """Kill -9 of one broker of the cluster."""
        node = self.nodes[number]
        assert node is not None
        node.kill()
        node.wait(10)
        self.nodes[number] = None

    def kill_broker(self) -> None:
        """Kill -9 of the broker."""
        assert self.broker is not None
        self.broker.kill()
        self.broker.wait(10)

    @staticmethod
    def kill_process(pid: int) -> None:
        """Kill -9 of a process that a service has started, if it is still there."""
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).kill()

    def forked(self, name: str) -> list[psutil.Process]:
        """Processes that a service's nursery has forked."""
        with contextlib.suppress(psutil.Error):
            nurseries = psutil.Process(self.services[name].pid).children()
            return [child for nursery in nurseries for child in nursery.children()]
        return []

    async def workers(self, bus: NatsBus, run: str) -> list[int]:
        """Process numbers of the workers that hold a run's agents."""
        subjects = self.settings().subjects
        bucket = await bus.bucket(subjects.bucket_placement)
        try:
            entries = await bucket.entries(f"{run}.>")
        except BusError:  # the brokers have no leader for it at the moment
            return []
        names = {
            (shard.worker, shard.host)
            for entry in entries
            for shard in Placement.model_validate_json(entry.value).shards
        }
        found = []
        for worker, host in sorted(names):
            with contextlib.suppress(BusError, RemoteError):
                asked = Assignment(worker=worker, host=host, run=run)
                subject = subjects.worker(worker, "stats")
                found.append((await ask(bus, subject, asked, WorkerStats, timeout=2)).pid)
        return found

    def kill_everything(self) -> None:
        """A power cut: kill -9 of all processes at once."""
        for process in processes.marked(str(self.home)):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for service in self.services.values():
            service.kill()
        self.kill_broker()
        for service in self.services.values():
            service.wait(10)
        self.services.clear()

    def close(self) -> None:
        """End everything."""
        self._closed = True
        for service in self.services.values():
            with contextlib.suppress(ProcessLookupError):
                service.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        for service in self.services.values():
            try:
                service.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait(5)
        self.services.clear()
        for left in processes.marked(str(self.home)):
            with contextlib.suppress(psutil.Error):
                left.kill()
        for broker in [self.broker, *self.nodes]:
            if broker is not None:
                broker.kill()
                broker.wait(10)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
