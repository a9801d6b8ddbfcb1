"""Looking into runs that are under way, and what operators do to hosts meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from populace.inspection import inspect
from populace.recorded import compare, results
from populace.runs import control, find_run
from shared.bus import NatsBus
from shared.errors import BusError, NoRespondersError, RemoteError
from shared.messages.control import (
    HostChange,
    HostDetail,
    HostDetails,
    HostInfo,
    Released,
    ReleaseWorkers,
    StopWorker,
)
from shared.messages.inspection import Inspected
from shared.service import ask
from tests.conftest import Services, start_service, unique
from tests.endpoint import Endpoint
from tests.services.test_injections import begin, paper
from tests.services.test_recovery import diaries, respond
from tests.services.test_runs import play, watch


@pytest.fixture
async def bus(services: Services) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(services.settings(), services.broker.url)
    yield made
    await made.drain()


@pytest.fixture
def second_host(services: Services, tmp_path: Path) -> Iterator[str]:
    """Another host, on this machine."""
    name = unique("second")
    process = start_service(
        "agent_host",
        services.broker,
        tmp_path / "second.log",
        POPULACE_HOST_NAME=name,
        POPULACE_HOST_LABELS="zone=b, disk=fast",
        POPULACE_RUNS_DIR=str(services.runs),
        POPULACE_PERSONAS_DIR=str(services.personas),
        POPULACE_WORKERS="2",
    )
    yield name
    process.terminate()
    process.wait(20)


async def look(bus: NatsBus, services: Services, run: str, **what: str) -> Inspected:
    return await inspect(bus, services.settings().subjects, run, **what)


async def test_agents_and_workers_are_seen(services: Services, bus: NatsBus) -> None:
    agents = {"count": 12, "personas": "education"}
    fields = paper(params={"pause": 0.3}, agents=agents, rounds=8)
    undisturbed = await play(services, fields)
    run = await begin(bus, services, {**fields, "run": unique("seen")}, 2)
    whole = await look(bus, services, run)
    (readers,) = whole.populations
    assert (readers.name, readers.count, sum(readers.workers.values())) == ("readers", 12, 12)
    assert {w.worker for w in whole.workers if w.holds == "agents"} == set(readers.workers)
    assert all(w.held is not None and w.held.rss > 1 << 20 for w in whole.workers)
    told = await look(bus, services, run, agent="readers/7")
    one = told.one
    assert one is not None
    assert one.name == "readers/7"
    assert one.persona is not None
    assert "education" in one.persona
    assert one.text
    assert told.where.partition(" on ")[0] in readers.workers
    with pytest.raises(RemoteError, match="no agent 'readers/12'"):
        await look(bus, services, run, agent="readers/12")
    with pytest.raises(RemoteError, match="no environment 'square'"):
        await look(bus, services, run, environment="square")
    outcome = await watch(bus, services, run)
    assert (outcome.state, outcome.reason) == ("finished", "")
    settings = services.settings()
    assert compare(results(undisturbed.run, settings), results(run, settings)).identical
    with pytest.raises(NoRespondersError):
        await look(bus, services, run)


async def test_environments_are_seen(services: Services, bus: NatsBus, endpoint: Endpoint) -> None:
    endpoint.respond = respond
    agents = {"count": 20, "workers": 2}
    fields = diaries(endpoint, agents=agents, params={"pause": 0.3}, rounds=8)
    run = await begin(bus, services, fields, 1)
    whole = await look(bus, services, run)
    assert [(e.path, e.class_name) for e in whole.environments] == [("ledger", "Ledger")]
    told = await look(bus, services, run, environment="ledger")
    assert told.one is not None
    assert told.one.about is not None
    shown = {a.name: a.text for a in told.one.attributes}
    assert int(shown["notes"]) >= 20
    assert told.one.view == {"kind": "none", "why": ""}
    diarist = (await look(bus, services, run, agent="people/3")).one
    assert diarist is not None
    assert diarist.memory[0]["role"] == "user"
    assert {a.name for a in diarist.attributes} == {"pause", "days", "sum"}
    assert (await watch(bus, services, run)).state == "finished"


async def change(bus: NatsBus, services: Services, host: str, **fields: Any) -> HostInfo:
    subject = services.settings().subjects.host(host, "change")
    return await ask(bus, subject, HostChange(**fields), HostInfo, timeout=30)


async def detail(bus: NatsBus, services: Services, host: str) -> HostDetails:
    subject = services.settings().subjects.host(host, "detail")
    return await ask(bus, subject, HostDetail(), HostDetails, timeout=10)


async def test_a_stopped_worker_s_agents_move(
    services: Services, bus: NatsBus, endpoint: Endpoint
) -> None:
    endpoint.respond = respond
    agents = {"count": 60, "workers": 2}
    fields = diaries(endpoint, agents=agents, params={"pause": 0.2}, rounds=8)
    undisturbed = await play(services, fields)
    run = await begin(bus, services, {**fields, "run": unique("moved")}, 1)
    host = services.settings().host
    before = await detail(bus, services, host)
    mine = [w for w in before.workers if w.run == run]
    assert len(mine) == 2
    assert before.info.runs[run] == 2
    assert all(w.rss > 1 << 20 and w.pid for w in mine)
    assert any("workers given" in line for line in before.log)
    subject = services.settings().subjects.host(host, "stop")
    told = await ask(bus, subject, StopWorker(worker=mine[0].worker), Released, timeout=30)
    assert told.workers == 1
    with pytest.raises(RemoteError, match="has no worker"):
        await ask(bus, subject, StopWorker(worker=mine[0].worker), Released, timeout=30)
    outcome = await watch(bus, services, run)
    assert (outcome.state, outcome.reason) == ("finished", "")
    info = await find_run(bus, services.settings(), run)
    assert info is not None
    assert info.life == 2
    settings = services.settings()
    assert compare(results(undisturbed.run, settings), results(run, settings)).identical


async def test_a_drained_host_gives_its_agents_to_others(
    services: Services, bus: NatsBus, endpoint: Endpoint, second_host: str
) -> None:
    endpoint.respond = respond
    settings = services.settings()
    async with asyncio.timeout(30):
        while True:
            try:
                info = (await detail(bus, services, second_host)).info
                break
            except NoRespondersError:
                await asyncio.sleep(0.05)
        hosts = await bus.bucket(settings.subjects.bucket_hosts)
        while await hosts.get(second_host) is None:  # runs find it there
            await asyncio.sleep(0.05)
    assert info.labels == {"zone": "b", "disk": "fast"}
    fields = diaries(endpoint, agents={"count": 60, "workers": 4}, params={"pause": 0.3})
    run = await begin(bus, services, fields, 1)
    whole = await look(bus, services, run)
    assert {w.host for w in whole.workers if w.holds == "agents"} == {settings.host, second_host}
    try:
        told = await change(bus, services, settings.host, draining=True)
        assert told.draining
        assert told.free == 0
        assert not told.runs.get(run)
        outcome = await watch(bus, services, run)
        assert (outcome.state, outcome.reason) == ("finished", "")
        manifest = results(run, settings).manifest
        assert manifest["workers_lost"]
        assert all("is drained" in reason for reason in manifest["workers_lost"])
        # A run that begins now is given none of its workers.
        other = await begin(
            bus, services, {**fields, "run": unique("r"), "agents": {"count": 8}}, 1
        )
        whole = await look(bus, services, other)
        assert {w.host for w in whole.workers if w.holds == "agents"} == {second_host}
    finally:
        told = await change(bus, services, settings.host, draining=False)
    assert told.free > 0
    told = await change(bus, services, second_host, per_run=1)
    assert told.per_run == 1
    # A run that is under way takes workers anew, on all hosts that there are.
    wide = {**fields, "run": unique("wide"), "agents": {"count": 40}, "rounds": 12}
    undisturbed = await play(services, wide)
    wide["run"] = unique("wide")
    await change(bus, services, second_host, draining=True)
    run = await begin(bus, services, wide, 1)
    assert {w.host for w in (await look(bus, services, run)).workers if w.holds == "agents"} == {
        settings.host
    }
    await change(bus, services, second_host, draining=False)
    await control(bus, settings, run, "spread")
    async with asyncio.timeout(30):
        seen: set[str] = set()
        while len(seen) < 2:
            with contextlib.suppress(BusError):  # between two lives
                whole = await look(bus, services, run)
                where = {w.worker: w.host for w in whole.workers}
                seen = {where[worker] for worker in whole.populations[0].workers}
            await asyncio.sleep(0.05)
    outcome = await watch(bus, services, run)
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert compare(results(undisturbed.run, settings), results(run, settings)).identical
    manifest = results(run, settings).manifest
    assert manifest["workers_lost"] == ["it is spread over the hosts anew"]
    # Cleaning up: whatever is left of a run there ends, of all its lives.
    subject = settings.subjects.host(second_host, "release")
    await ask(bus, subject, ReleaseWorkers(run=other, before=99, kill=True), Released, timeout=30)
    assert not (await detail(bus, services, second_host)).info.runs.get(other)
    assert (await watch(bus, services, other)).state == "finished"
