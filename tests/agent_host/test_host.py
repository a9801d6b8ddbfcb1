"""Hosts and workers as processes, and what becomes of them when one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import populace
from populace.errors import PlacementError, WorkerLostError
from populace.stack import processes
from populace.world import open_world
from shared.bus import NatsBus
from shared.errors import RemoteError
from shared.messages.control import (
    AcquiredWorkers,
    AcquireWorkers,
    HostChange,
    HostDetail,
    HostDetails,
    HostInfo,
)
from shared.service import ask
from tests.conftest import Broker, Services, start_service, unique, wait_until
from tests.populace.sample import Counter, Odd, Voter


async def start_host(broker: Broker, log: Path, **environment: str):  # type: ignore[no-untyped-def]
    host = start_service("agent_host", broker, log, POPULACE_WORKERS="2", **environment)
    bus = await NatsBus.connect(broker.settings(), broker.url)
    deadline = time.monotonic() + 30
    bucket = await bus.bucket(broker.settings().subjects.bucket_hosts)
    while not await bucket.entries():
        assert time.monotonic() < deadline, log.read_text()
        assert host.poll() is None, log.read_text()
        await asyncio.sleep(0.05)
    await bus.drain()
    return host


async def test_a_host_shows_itself(services: Services) -> None:
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    info = json.loads((await bus.request("$SRV.INFO.agent_host", b"", timeout=5)).data)
    assert info["name"] == "agent_host"
    assert info["metadata"]["workers_per_run"] == "2"
    stats = json.loads((await bus.request("$SRV.STATS.agent_host", b"", timeout=5)).data)
    (endpoint,) = stats["endpoints"]
    assert endpoint["data"]["per_run"] == 2
    state = json.loads((await bus.request(endpoint["subject"], b"", timeout=5)).data)
    assert state["host"] == endpoint["data"]["host"]
    for name in ("director", "models", "recorder"):
        assert json.loads((await bus.request(f"$SRV.PING.{name}", b"", timeout=5)).data)["id"]
    await bus.drain()


async def test_a_killed_worker_is_noticed_at_once(distributed: populace.World) -> None:
    voters = await distributed.population(Voter, count=10)
    singles = [Counter().to_dist(distributed) for _ in range(2)]
    assert [await s.total() for s in singles] == [0, 0]
    killed, kept = (await voters.pid()).values[0], (await voters.pid()).values[9]
    waiting = voters.wait(30.0)
    summary = voters.wait(30.0).reduce("mean")
    single = singles[0].forever()
    await asyncio.sleep(0.2)
    began = time.monotonic()
    psutil.Process(killed).kill()
    with pytest.raises(WorkerLostError, match="killed by signal 9"):
        await single
    assert time.monotonic() - began < 2
    waiting.cancel()
    summary.answers.cancel()
    later = await voters.row()
    assert sorted(later.errors) == [0, 1, 2, 3, 4]
    assert later[9][0] == 9
    assert later.errors[0].kind == "worker_lost"
    assert psutil.pid_exists(kept)
    assert len(distributed.lost) == 1


async def test_an_agent_that_ends_its_process(distributed: populace.World) -> None:
    odd = await distributed.population(Odd, count=2)
    with pytest.raises(WorkerLostError, match="exited with code 9"):
        await odd[0].die()
    assert await odd[1].half(4) == 2


async def test_no_orphans_when_a_host_is_killed(
    own_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = own_broker()
    host = await start_host(broker, tmp_path / "host.log")
    settings = broker.settings()
    async with open_world(settings, broker.url, run=unique(), seed=0, workers=3) as world:
        voters = await world.population(Voter, count=6)
        pids = set((await voters.pid()).values)
        assert len(pids) == 3
        waiting = voters.wait(60.0).reduce("mean")
        await asyncio.sleep(0.1)
        began = time.monotonic()
        host.kill()
        host.wait(10)
        summary = await asyncio.wait_for(waiting._summary(), 10)
        assert summary.failures == {"worker_lost": 6}
        assert time.monotonic() - began < 3
        mark = str(broker.home)
        await wait_until(lambda: not processes.marked(mark), 5, "the workers' end")


async def test_a_host_stops_cleanly(own_broker: Callable[..., Broker], tmp_path: Path) -> None:
    broker = own_broker()
    log = tmp_path / "host.log"
    host = await start_host(broker, log)
    async with open_world(broker.settings(), broker.url, run=unique(), seed=0) as world:
        await world.population(Voter, count=4)
        host.send_signal(signal.SIGTERM)
        assert host.wait(20) == 0
    assert not processes.marked(str(broker.home))
    assert "Traceback" not in log.read_text()
    bus = await NatsBus.connect(broker.settings(), broker.url)
    bucket = await bus.bucket(broker.settings().subjects.bucket_hosts)
    assert await bucket.entries() == []
    await bus.drain()


@pytest.mark.slow
async def test_workers_end_when_their_owner_is_gone(services: Services) -> None:
    """An owner that dies without a word stops renewing its lease."""
    world_context = open_world(
        services.settings(), services.broker.url, run=unique("gone"), seed=0, workers=1
    )
    world = await world_context.__aenter__()
    voters = await world.population(Voter, count=2)
    (pid,) = set((await voters.pid()).values)
    assert world._pool is not None
    assert world._pool._lease is not None
    world._pool._lease.cancel()
    await wait_until(lambda: not psutil.pid_exists(pid), 25, "the worker's end")
    await world_context.__aexit__(None, None, None)


async def test_too_many_workers(services: Services) -> None:
    with pytest.raises(PlacementError, match="1000 workers were asked for"):
        async with open_world(
            services.settings(), services.broker.url, run=unique(), seed=0, workers=1000
        ):
            pass


@pytest.mark.slow
async def test_no_host(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    import populace.world

    monkeypatch.setattr(populace.world, "_PATIENCE", 0.2)
    settings = broker.settings(prefix=unique())
    with pytest.raises(PlacementError, match="no agent host is up"):
        async with open_world(settings, broker.url, run=unique(), seed=0):
            pass


async def test_the_broker_restarts_under_calls(
    own_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    """Calls that were under way when the broker was killed are answered all the same."""
    broker = own_broker()
    port = int(broker.url.rpartition(":")[2])
    host = await start_host(broker, tmp_path / "host.log")
    async with open_world(broker.settings(), broker.url, run=unique(), seed=0) as world:
        counters = [Counter().to_dist(world) for _ in range(4)]
        await asyncio.gather(*(c.total() for c in counters))
        voters = await world.population(Voter, count=100)
        slow = voters.wait(1.5)
        pending = [c.add() for c in counters for _ in range(50)]
        await asyncio.sleep(0.05)
        broker.process.kill()
        broker.process.wait(10)
        queued = [c.add() for c in counters]  # made while there is no broker
        await asyncio.sleep(0.3)
        own_broker(port)
        answers = await asyncio.wait_for(asyncio.gather(*pending, *queued), 30)
        assert sorted(answers) == sorted(list(range(1, 52)) * 4)
        assert list(await asyncio.wait_for(slow._results(), 30)) == list(range(100))
        assert [await c.total() for c in counters] == [51] * 4  # each took effect once
    host.send_signal(signal.SIGTERM)
    assert host.wait(20) == 0


async def test_a_host_that_is_drained_keeps_no_workers_that_were_coming(
    own_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = own_broker()
    host = await start_host(broker, tmp_path / "host.log", POPULACE_HOST_NAME="h1")
    bus = await NatsBus.connect(broker.settings(), broker.url)
    subjects = broker.settings().subjects
    request = AcquireWorkers(run=unique("r"), count=12)
    coming = asyncio.ensure_future(
        ask(bus, subjects.host("h1", "acquire"), request, AcquiredWorkers, timeout=60)
    )
    subject = subjects.host("h1", "detail")
    while not (await ask(bus, subject, HostDetail(lines=0), HostDetails)).info.workers:
        assert not coming.done()
    change = HostChange(draining=True)
    await ask(bus, subjects.host("h1", "change"), change, HostInfo, timeout=60)
    with contextlib.suppress(RemoteError):  # or they were given, and ended as all others
        await coming
    told = await ask(bus, subject, HostDetail(lines=0), HostDetails)
    assert (told.info.workers, told.workers, told.info.free) == (0, [], 0)
    await bus.drain()
    host.terminate()
    assert host.wait(20) == 0
