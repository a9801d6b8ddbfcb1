"""What tests share: a real broker, buses of both kinds, worlds of both kinds, a whole stack."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

import populace
from populace.stack import processes
from populace.stack.broker import broker_command, wait_for_broker
from populace.stack.stack import _wait_for_services
from populace.world import open_world
from shared.bus import Bus, MemoryBroker, NatsBus
from shared.settings import Settings
from tests.endpoint import Endpoint, serving

ROOT = Path(__file__).resolve().parent.parent

# A gate says the same twice, and a busy machine is no fault of what is tested; for other examples,
# and longer: pytest --hypothesis-profile=search
hypothesis.settings.register_profile(
    "gate", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("gate")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--vllm``, ``--slow``: run the tests that need a vLLM environment, or minutes, as well."""
    parser.addoption("--slow", action="store_true", help="also run the tests that take long")
    parser.addoption("--vllm", action="store_true", help="also run the tests with a real vLLM")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [name for name in ("vllm", "slow") if not config.getoption(f"--{name}")]
    if left_out:
        asked_for = [i for i in items if not any(name in i.keywords for name in left_out)]
        config.hook.pytest_deselected(items=[i for i in items if i not in asked_for])
        items[:] = asked_for


@dataclass
class Broker:
    """A real nats-server of the tests' own."""

    url: str
    home: Path
    process: subprocess.Popen[bytes]

    def settings(self, **more: object) -> Settings:
        """Settings that lead to this broker."""
        return Settings(
            nats_url=self.url,
            home=self.home,
            code_roots=str(ROOT),
            connect_timeout=5,
            **more,  # type: ignore[arg-type]
        )


def start_broker(home: Path, port: int = -1) -> Broker:
    """Start a broker; the caller ends it."""
    command, ports = broker_command(Settings(home=home), port)
    log = home / "broker.log"
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    return Broker(wait_for_broker(process, ports, log), home, process)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for all tests that don't harm it."""
    made = start_broker(tmp_path_factory.mktemp("broker"))
    yield made
    made.process.terminate()
    made.process.wait(10)


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Starts brokers that a test may kill."""
    made: list[Broker] = []

    def start(port: int = -1) -> Broker:
        made.append(start_broker(tmp_path, port))
        return made[-1]

    yield start
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            one.process.kill()
        one.process.wait(10)
    for left in processes.marked(str(tmp_path)):  # of a test that failed half-way
        with contextlib.suppress(psutil.Error):
            left.kill()


@pytest.fixture(params=["memory", "nats"])
async def bus_maker(
    request: pytest.FixtureRequest, broker: Broker
) -> AsyncIterator[Callable[[], asyncio.Future[Bus]]]:
    """Makes connections to one broker, of one kind; closes them all."""
    made: list[Bus] = []
    memory = MemoryBroker()

    async def make() -> Bus:
        bus: Bus = (
            memory.connect()
            if request.param == "memory"
            else await NatsBus.connect(broker.settings(), broker.url)
        )
        made.append(bus)
        return bus

    yield make  # type: ignore[misc]
    for bus in made:
        await bus.drain()


def unique(stem: str = "t") -> str:
    """A subject token that no other test uses."""
    return f"{stem}{uuid.uuid4().hex[:12]}"


def start_service(module: str, broker: Broker, log: Path, **environment: str) -> subprocess.Popen:
    """Start a service of the installation as a process of its own."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "POPULACE_NATS_URL": broker.url,
                "POPULACE_HOME": str(broker.home),
                "POPULACE_CODE_ROOTS": str(ROOT),
                processes.MARK: str(broker.home),
                **environment,
            },
        )


@dataclass
class Services:
    """A running installation."""

    broker: Broker
    runs: Path
    personas: Path
    logs: Path
    processes: dict[str, subprocess.Popen]

    def settings(self, **more: object) -> Settings:
        """Settings that lead to it."""
        return self.broker.settings(runs_dir=self.runs, personas_dir=self.personas, **more)


def _end(started: dict[str, subprocess.Popen]) -> None:
    for process in started.values():
        process.send_signal(signal.SIGTERM)
    for process in started.values():
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


@pytest.fixture(scope="session")
def services(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """All services, as processes, for the tests that don't harm them."""
    logs = tmp_path_factory.mktemp("logs")
    runs = tmp_path_factory.mktemp("runs")
    personas = tmp_path_factory.mktemp("personas")
    started = {
        name: start_service(
            module,
            broker,
            logs / f"{name}.log",
            POPULACE_RUNS_DIR=str(runs),
            POPULACE_PERSONAS_DIR=str(personas),
            POPULACE_WORKERS="2",
        )
        for name, module in {
            "director": "services.director",
            "recorder": "services.recorder",
            "models": "services.models",
            "persona_service": "persona_service",
            "env_service": "env_service",
            "agent_host": "agent_host",
        }.items()
    }
    try:
        # In a thread: the fixture may be asked for while a test's loop runs.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(
                lambda: asyncio.run(
                    _wait_for_services(broker.settings(), broker.url, started, logs)
                )
            ).result(90)
        yield Services(broker, runs, personas, logs, started)
    finally:
        _end(started)
        left = processes.marked(str(broker.home))
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        assert not left, f"processes were left behind: {left}"


@contextlib.asynccontextmanager
async def a_world(request: pytest.FixtureRequest, workers: int) -> AsyncIterator[populace.World]:
    """A world of the kind that the fixture's parameter names."""
    if request.param == "local":
        async with populace.local(workers=workers, seed=5) as made:
            yield made
        return
    services: Services = request.getfixturevalue("services")
    async with open_world(
        services.settings(), services.broker.url, run=unique("w"), seed=5, workers=workers
    ) as made:
        yield made


@pytest.fixture(params=["local", "connect"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[populace.World]:
    """A world of two workers, in this process or in worker processes."""
    async with a_world(request, 2) as made:
        yield made


@pytest.fixture(params=["local", "connect"])
async def one_worker(request: pytest.FixtureRequest) -> AsyncIterator[populace.World]:
    """A world in which all agents share one worker."""
    async with a_world(request, 1) as made:
        yield made


@pytest.fixture
async def distributed(services: Services) -> AsyncIterator[populace.World]:
    """A world of two worker processes."""
    async with open_world(
        services.settings(), services.broker.url, run=unique("w"), seed=5, workers=2
    ) as made:
        yield made


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    """An OpenAI-compatible endpoint whose answers the test decides."""
    async with serving() as made:
        yield made


async def eventually(call: Callable[..., Awaitable[Any]], wanted: Any, *args: Any) -> None:
    """Ask until the answer is the wanted one, with a bound."""
    async with asyncio.timeout(20):
        while await call(*args) != wanted:
            await asyncio.sleep(0.01)


async def wait_until(
    condition: Callable[[], bool], within: float = 10.0, what: str = "the condition"
) -> None:
    """Wait for something that announces itself in no other way, with a bound."""
    deadline = asyncio.get_running_loop().time() + within
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come about"
        await asyncio.sleep(0.01)
