"""Runs whose processes are killed: nothing is lost, doubled, or asked twice beyond what was under
way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from benchmarks.installation import Installation
from populace.recorded import results
from populace.runs import Outcome, control, find_run, follow, manage, submit
from shared.bus import Message, NatsBus
from shared.codec import from_public
from shared.errors import InvalidInputError
from shared.messages.scenario import Budget, ManageRequest, RunInfo, ScenarioSpec
from tests.conftest import ROOT, unique, wait_until
from tests.endpoint import Endpoint, answer
from tests.services.test_runs import GAMES

COLUMNS = ["round", "population", "agent", "method", "call", "value", "answer", "error"]
SLOTS = 64


def respond(body: dict[str, Any]) -> web.StreamResponse:
    """Follows from the prompt and its seed alone."""
    told = json.dumps([body["messages"], body["seed"]])
    return answer(hashlib.blake2b(told.encode(), digest_size=4).hexdigest())


ALL = ("director", "recorder", "models", "env_service", "agent_host")
AGENTS = int(os.environ.get("POPULACE_TEST_AGENTS", "400"))
"""How many keep diaries where a test does not say: it makes no difference but of time."""


@pytest.fixture(scope="module")
def shared_installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    made = Installation(tmp_path_factory.mktemp("own"), models="tests.services.quick_models")
    made.start_broker()
    yield made
    made.close()


@pytest.fixture
async def installation(shared_installation: Installation) -> AsyncIterator[Installation]:
    """All services are up; a test may kill any, and the next finds them up again."""
    made = shared_installation
    made.start(*(name for name in ALL if name not in made.services))
    bus = await NatsBus.connect(made.settings(), made.url)
    await made.ready(bus)
    await bus.drain()
    yield made
    for name in [name for name in made.services if name not in ALL]:
        made.kill(name)


@pytest.fixture
async def bus(installation: Installation) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(installation.settings(), installation.url)
    yield made
    await made.drain()


def diaries(endpoint: Endpoint, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": "diaries",
        "scenario": "diaries:Diaries",
        "folder": str(ROOT / "benchmarks"),
        "seed": 11,
        "rounds": 3,
        "agents": {"count": 300, "workers": 2},
        "run": unique("r"),
        "models": {
            "default": {
                "backend": "openai",
                "base_url": endpoint.url,
                "model": unique("m"),
                "concurrency": SLOTS,
            }
        },
    }
    fields.update(more)
    return fields


async def watch(bus: NatsBus, installation: Installation, run: str) -> Outcome:
    outcome = Outcome(run)
    async with asyncio.timeout(90):
        async for status in follow(bus, installation.settings(), run, submitted=True):
            if status is not None:
                outcome.take(status)
    return outcome


def table(installation: Installation, run: str) -> list[dict[str, Any]]:
    path = installation.runs / run / "answers.parquet"
    rows: list[dict[str, Any]] = pq.read_table(path, columns=COLUMNS).to_pylist()
    return rows


async def start(bus: NatsBus, installation: Installation, fields: dict[str, Any]) -> str:
    return await submit(bus, installation.settings(), ScenarioSpec.model_validate(fields))


_undisturbed: dict[int, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}


async def undisturbed(
    bus: NatsBus, installation: Installation, endpoint: Endpoint, agents: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What a run without any trouble gives: its answers, and what it noted of its rounds."""
    if agents not in _undisturbed:
        before = len(endpoint.requests)
        fields = diaries(endpoint, agents={"count": agents, "workers": 2})
        run = await start(bus, installation, fields)
        outcome = await watch(bus, installation, run)
        assert (outcome.state, outcome.reason) == ("finished", "")
        assert len(endpoint.requests) - before == 3 * agents + 1
        noted = [row.values for row in outcome.rows]
        _undisturbed[agents] = table(installation, run), noted
    return _undisturbed[agents]


Kill = Callable[[Installation, NatsBus, str], Awaitable[None]]


async def disturbed(
    bus: NatsBus,
    installation: Installation,
    endpoint: Endpoint,
    kill: Kill,
    agents: int = AGENTS,
    at: float = 1.5,
    run: str | None = None,
) -> Outcome:
    """Kill something in the middle of a run, and see that nobody could tell from its results.

    Args:
        bus: a connection.
        installation: what is played on.
        endpoint: the model.
        kill: told of the run once it is ``at`` so many rounds.
        agents: how many.
        at: when.
        run: its name.
    """
    endpoint.respond = respond
    endpoint.delay = 0.02
    rows, noted = await undisturbed(bus, installation, endpoint, agents)
    before = len(endpoint.requests)
    fields = diaries(endpoint, agents={"count": agents, "workers": 2})
    fields["run"] = run or fields["run"]
    run = await start(bus, installation, fields)
    when = before + int(agents * at)
    await wait_until(lambda: len(endpoint.requests) > when, 60, "the middle of the run")
    await kill(installation, bus, run)
    outcome = await watch(bus, installation, run)
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert table(installation, run) == rows
    assert [row.values for row in outcome.rows] == noted
    again = Counter(json.dumps(b["messages"]) for b in endpoint.requests[before:])
    del again[json.dumps([{"role": "user", "content": "Say yes."}])]  # the check of a model
    assert len(again) == 3 * agents
    assert max(again.values()) <= 2
    assert sum(again.values()) <= 3 * agents + SLOTS  # a slot is held until its answer is kept
    manifest = json.loads((installation.runs / run / "manifest.json").read_text())
    assert (manifest["answers"], manifest["failed"]) == (3 * agents, 0)
    assert manifest["missing"] == 0
    return outcome


async def a_worker(installation: Installation, bus: NatsBus, run: str) -> None:
    victims = await installation.workers(bus, run)
    assert len(victims) == 2
    os.kill(victims[0], signal.SIGKILL)


def a_service(name: str, *, again: bool = True) -> Kill:
    async def kill(installation: Installation, bus: NatsBus, run: str) -> None:
        installation.kill(name)
        if again:
            installation.start(name)

    return kill


async def the_player(installation: Installation, bus: NatsBus, run: str) -> None:
    (player,) = installation.forked("director")
    player.kill()


@pytest.mark.parametrize("agents", [AGENTS, pytest.param(2000, marks=pytest.mark.slow)])
async def test_a_worker_is_killed(
    installation: Installation, bus: NatsBus, endpoint: Endpoint, agents: int
) -> None:
    await disturbed(bus, installation, endpoint, a_worker, agents=agents)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0.2, 2.6])
async def test_a_worker_is_killed_in_the_first_round_and_in_the_last(
    installation: Installation, bus: NatsBus, endpoint: Endpoint, at: float
) -> None:
    await disturbed(bus, installation, endpoint, a_worker, at=at)


@pytest.mark.parametrize(
    "victim",
    [
        "director",
        pytest.param("recorder", marks=pytest.mark.slow),
        pytest.param("agent_host", marks=pytest.mark.slow),
        pytest.param("env_service", marks=pytest.mark.slow),
        pytest.param("models", marks=pytest.mark.slow),
    ],
)
async def test_a_service_is_killed_and_started_again(
    installation: Installation, bus: NatsBus, endpoint: Endpoint, victim: str
) -> None:
    await disturbed(bus, installation, endpoint, a_service(victim))


@pytest.mark.parametrize("durability", ["round", pytest.param("none", marks=pytest.mark.slow)])
async def test_a_director_stumbles_between_record_and_start(
    installation: Installation, bus: NatsBus, tmp_path: Path, durability: str
) -> None:
    """It can't keep a scenario for a moment, or dies: nothing has begun, so all begins anew.

    Also if the broker forgets that it has given the scenario out, as one may that is killed.
    """
    made = installation
    made.kill("director")
    made.modules["director"] = "tests.services.stumbling_director"
    try:
        made.start("director")
        await made.ready(bus)
        killed, forgotten = str(tmp_path / "killed"), str(tmp_path / "killed-forgotten")
        for name in ("stumbles", killed, forgotten):
            fields = {
                "name": name,
                "scenario": "games:Bell",
                "folder": GAMES,
                "rounds": 2,
                "agents": {"count": 5},
                "models": {"default": {"backend": "scripted"}},
                "durability": durability,
                "record_events": True,
                "run": unique("r"),
            }
            run = await start(bus, installation, fields)
            if name != "stumbles":
                made.services.pop("director").wait(30)
                if name == forgotten:
                    stream = installation.settings().subjects.stream_scenarios
                    await bus._js.delete_consumer(stream, "directors")
                made.start("director")
            outcome = await watch(bus, installation, run)
            assert (outcome.state, outcome.reason) == ("finished", "")
            manifest = json.loads((installation.runs / run / "manifest.json").read_text())
            assert (manifest["events"], manifest["life"]) == (10, 1)
            assert manifest["accepted"]
    finally:
        made.kill("director")
        made.modules["director"] = "services.director"
        made.start("director")
        await made.ready(bus)


@pytest.mark.slow
async def test_the_process_that_plays_the_run_is_killed(
    installation: Installation, bus: NatsBus, endpoint: Endpoint
) -> None:
    await disturbed(bus, installation, endpoint, the_player)


@pytest.mark.slow
async def test_another_director_takes_a_run_over(
    installation: Installation, bus: NatsBus, endpoint: Endpoint
) -> None:
    """With a second one up, nobody need start the first again."""

    async def kill(installation: Installation, bus: NatsBus, run: str) -> None:
        subject = installation.settings().subjects.bucket_runs
        entry = await (await bus.bucket(subject)).get(run)
        assert entry is not None
        first = RunInfo.model_validate_json(entry.value).director
        logs = {n: (installation.home / f"{n}.log").read_text() for n in ("director", "director2")}
        (victim,) = [name for name, log in logs.items() if first in log]
        installation.kill(victim)

    installation.start("director2")
    await installation.ready(bus)
    await disturbed(bus, installation, endpoint, kill)


def standing_still(victim: str, seconds: float) -> Kill:
    """Stop processes, so that they are taken for dead, and have them go on later."""

    async def stop(installation: Installation, bus: NatsBus, run: str) -> None:
        if victim == "worker":
            pids = (await installation.workers(bus, run))[:1]
        elif victim == "player":
            pids = [player.pid for player in installation.forked("director")]
        else:
            service = psutil.Process(installation.services[victim].pid)
            pids = [service.pid, *(child.pid for child in service.children(recursive=True))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        asyncio.get_running_loop().call_later(seconds, go_on)

    return stop


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [4.0, 15.0])
@pytest.mark.parametrize(
    "victim", ["worker", "player", "director", "agent_host", "env_service", "models", "recorder"]
)
async def test_a_process_stands_still_and_goes_on(
    installation: Installation, bus: NatsBus, endpoint: Endpoint, victim: str, seconds: float
) -> None:
    """What was taken for dead, and is not, harms nobody."""
    await disturbed(bus, installation, endpoint, standing_still(victim, seconds))


@pytest.mark.slow
async def test_the_broker_is_away_for_ten_seconds(
    installation: Installation, bus: NatsBus, endpoint: Endpoint
) -> None:
    async def kill(installation: Installation, bus: NatsBus, run: str) -> None:
        installation.kill_broker()
        await asyncio.sleep(10)
        installation.start_broker()

    await disturbed(bus, installation, endpoint, kill)


async def test_a_power_cut(installation: Installation, bus: NatsBus, endpoint: Endpoint) -> None:
    """Everything is killed at once and started again; the run is taken up by itself."""

    async def kill(installation: Installation, bus: NatsBus, run: str) -> None:
        installation.kill_everything()
        installation.start_broker()
        installation.start(*ALL)

    await disturbed(bus, installation, endpoint, kill)


# Stop and go on
async def ask_for(bus: NatsBus, installation: Installation, run: str, action: Any) -> None:
    await control(bus, installation.settings(), run, action)


async def state_of(bus: NatsBus, installation: Installation, run: str) -> RunInfo:
    info = await find_run(bus, installation.settings(), run)
    assert info is not None
    return info


async def resume(bus: NatsBus, installation: Installation, run: str, **more: Any) -> None:
    request = ManageRequest(run=run, action="resume", **more)
    await manage(bus, installation.settings(), request)


@pytest.mark.parametrize(
    "how", ["pause", *(pytest.param(h, marks=pytest.mark.slow) for h in ("cancel", "stop"))]
)
async def test_a_run_is_stopped_and_resumed(
    installation: Installation, bus: NatsBus, endpoint: Endpoint, how: str
) -> None:
    """By command, or with its director; all services were down meanwhile."""

    async def stop(installation: Installation, bus: NatsBus, run: str) -> None:
        if how == "stop":
            installation.services["director"].terminate()
            installation.services.pop("director").wait(20)
        else:
            await ask_for(bus, installation, run, how)
        told = await watch(bus, installation, run)
        assert told.state == ("cancelled" if how == "cancel" else "paused")
        assert (await state_of(bus, installation, run)).state == told.state
        for name in list(installation.services):
            installation.services[name].terminate()
        for name in list(installation.services):
            installation.services.pop(name).wait(20)
        installation.start(*ALL)
        await installation.ready(bus)
        await asyncio.sleep(2)
        assert (await state_of(bus, installation, run)).state == told.state
        await resume(bus, installation, run)

    await disturbed(bus, installation, endpoint, stop)


async def test_a_finished_run_is_given_more_rounds(
    installation: Installation, bus: NatsBus, endpoint: Endpoint
) -> None:
    endpoint.respond = respond
    rows, noted = await undisturbed(bus, installation, endpoint, AGENTS)
    before = len(endpoint.requests)
    fields = diaries(endpoint, agents={"count": AGENTS, "workers": 2}, rounds=2)
    run = await start(bus, installation, fields)
    assert (await watch(bus, installation, run)).state == "finished"
    with pytest.raises(InvalidInputError, match="has finished its 2 rounds; say how many"):
        await resume(bus, installation, run)
    with pytest.raises(InvalidInputError, match="has played 2 rounds already"):
        await resume(bus, installation, run, rounds=1)
    await resume(bus, installation, run, rounds=3)
    outcome = await watch(bus, installation, run)
    assert (outcome.state, outcome.rounds) == ("finished", 3)
    assert table(installation, run) == rows
    assert [row.values for row in outcome.rows] == noted
    assert len(endpoint.requests) - before == 3 * AGENTS + 2  # each life checks the model
    recorded = results(run, installation.settings())
    assert [row["round"] for row in recorded.rounds] == [1, 2, 3]
    manifest = recorded.manifest
    assert (manifest["answers"], manifest["life"]) == (3 * AGENTS, 2)
    assert manifest["scenario"]["name"] == "diaries"
    assert manifest["accepted"] < manifest["started"] < manifest["ended"]


@pytest.mark.slow
async def test_a_run_goes_on_with_a_larger_budget(
    installation: Installation, bus: NatsBus, endpoint: Endpoint
) -> None:
    """The round in which the budget was spent is played again, from kept answers."""
    endpoint.respond = respond
    rows, _ = await undisturbed(bus, installation, endpoint, AGENTS)
    before = len(endpoint.requests)
    small = {"requests": AGENTS + AGENTS // 2}
    fields = diaries(endpoint, agents={"count": AGENTS, "workers": 2}, budget=small)
    run = await start(bus, installation, fields)
    outcome = await watch(bus, installation, run)
    assert outcome.state == "cancelled"
    assert "is spent" in outcome.reason
    await resume(bus, installation, run, budget=Budget(requests=4 * AGENTS))
    outcome = await watch(bus, installation, run)
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert table(installation, run) == rows
    assert len(endpoint.requests) - before == 3 * AGENTS + 2


async def test_nothing_is_kept_where_that_is_asked_for(
    installation: Installation, bus: NatsBus, endpoint: Endpoint
) -> None:
    """What a lost worker held fails, and the run goes on without."""
    endpoint.respond = respond
    endpoint.delay = 0.1
    fields = diaries(endpoint, durability="none")
    run = await start(bus, installation, fields)
    await wait_until(lambda: len(endpoint.requests) > 50, 60, "the first round")
    victim, _ = await installation.workers(bus, run)
    await wait_until(lambda: len(endpoint.requests) > 400, 60, "the second round")
    os.kill(victim, signal.SIGKILL)
    outcome = await watch(bus, installation, run)
    assert outcome.state == "finished"
    assert outcome.rows[2].failures == {"worker_lost": 150}
    with pytest.raises(InvalidInputError, match="durability: none"):
        await resume(bus, installation, run, rounds=5)


@pytest.mark.slow
async def test_events_are_heard_once_whatever_dies(
    installation: Installation, bus: NatsBus
) -> None:
    """Each of eight pulls once a round, all hear it, and say so to the tower."""
    fields: dict[str, Any] = {
        "name": "bells",
        "scenario": "games:Bell",
        "folder": GAMES,
        "rounds": 4,
        "agents": {"count": 8, "workers": 2},
        "models": {"default": {"backend": "scripted"}},
        "params": {"pause": 0.1},
        "run": unique("r"),
        "record_messages": True,
    }
    told: list[dict[str, Any]] = []

    def take(message: Message) -> None:
        told.append(from_public(message.data, message.header("content-type")))

    subjects = installation.settings().subjects
    listening = await bus.subscribe(subjects.run_results(fields["run"], 2), take)
    run = await start(bus, installation, fields)
    await wait_until(lambda: len(told) > 2, 60, "the second round")
    await a_worker(installation, bus, run)
    outcome = await watch(bus, installation, run)
    await listening.unsubscribe()
    assert (outcome.state, outcome.reason) == ("finished", "")
    for number, row in enumerate(outcome.rows):
        events = 8 * number
        assert row.values == {"heard": [events] * 8, "told": events, "total": 8 * events}
    said = pq.read_table(installation.runs / run / "messages.parquet").to_pylist()
    rings = [(row["round"], row["sender"]) for row in said if row["method"] == "ring"]
    assert sorted(rings) == [(n, f"ringer/{i}") for n in (1, 2, 3, 4) for i in range(8)]


@pytest.mark.parametrize("durability", ["call", pytest.param("round", marks=pytest.mark.slow)])
async def test_what_agents_have_finished_is_not_done_again(
    installation: Installation, bus: NatsBus, durability: str
) -> None:
    """With "call": an answer that was given stays, though it can't be had again."""
    fields: dict[str, Any] = {
        "name": "clocks",
        "scenario": "games:Clocks",
        "folder": GAMES,
        "rounds": 2,
        "agents": {"count": 80, "workers": 2},
        "models": {"default": {"backend": "scripted"}},
        "durability": durability,
        "run": unique("r"),
    }
    told: list[dict[str, Any]] = []

    def take(message: Message) -> None:
        told.append(from_public(message.data, message.header("content-type")))

    subjects = installation.settings().subjects
    listening = await bus.subscribe(subjects.run_results(fields["run"], 2), take)
    run = await start(bus, installation, fields)

    def answers(life: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for batch in told:
            if batch["life"] == life and batch["method"] == "look":
                found.update(zip(batch["agents"], batch["values"], strict=True))
        return found

    await wait_until(lambda: len(answers(1)) > 20, 60, "the first answers")
    await a_worker(installation, bus, run)
    outcome = await watch(bus, installation, run)
    await listening.unsubscribe()
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert outcome.rows[1].values == {"once": True, "same": True}
    before, after = answers(1), answers(2)
    assert len(after) == 80
    kept = {agent for agent, value in before.items() if after[agent] == value}
    assert kept == (set(before) if durability == "call" else set())


async def test_what_cannot_be_written_down(installation: Installation, bus: NatsBus) -> None:
    fields: dict[str, Any] = {
        "name": "locked",
        "scenario": "games:Locked",
        "folder": GAMES,
        "rounds": 2,
        "agents": {"count": 20, "workers": 2},
        "models": {"default": {"backend": "scripted"}},
        "durability": "round",
    }
    outcome = await watch(bus, installation, await start(bus, installation, fields))
    assert outcome.state == "failed"
    assert "Locker.lock of lockers/0: a value of type _thread.lock can't be sent" in outcome.reason
    del fields["durability"]
    outcome = await watch(bus, installation, await start(bus, installation, fields))
    assert outcome.state == "finished"
    manifest = json.loads((installation.runs / outcome.run / "manifest.json").read_text())
    assert "Locker.lock of lockers/0" in manifest["not_durable"]


@pytest.mark.slow
async def test_a_run_that_breaks_again_and_again_is_paused(
    installation: Installation, bus: NatsBus
) -> None:
    fields = {
        "name": "suicidal",
        "scenario": "games:Suicidal",
        "folder": GAMES,
        "rounds": 2,
        "agents": {"count": 4, "workers": 2},
        "models": {"default": {"backend": "scripted"}},
    }
    outcome = await watch(bus, installation, await start(bus, installation, fields))
    assert outcome.state == "paused"
    assert "taken up 5 times from the same round" in outcome.reason
    assert len(outcome.rows) == 1
    request = ManageRequest(run=outcome.run, action="cancel")
    await manage(bus, installation.settings(), request)
    assert (await watch(bus, installation, outcome.run)).state == "cancelled"


@pytest.mark.slow
async def test_one_of_three_brokers_dies(tmp_path: Path, endpoint: Endpoint) -> None:
    """With three copies of every stream; how long nothing is asked is what the brokers take."""
    made = Installation(tmp_path, models="tests.services.quick_models")
    made.start_cluster()
    bus = await made.connect_to_cluster()
    try:
        made.start(*ALL)
        await made.ready(bus)

        async def kill(installation: Installation, bus: NatsBus, run: str) -> None:
            installation.kill_node(0)

        await disturbed(bus, made, endpoint, kill, agents=200)
    finally:
        await bus.drain()
        made.close()


# Results that can't be written
@pytest.mark.slow
async def test_a_folder_that_cannot_be_written(
    installation: Installation, bus: NatsBus, endpoint: Endpoint
) -> None:
    """The run is paused, says why, and goes on once that is mended."""

    async def mend(installation: Installation, bus: NatsBus, run: str) -> None:
        told = await watch(bus, installation, run)
        assert told.state == "paused"
        assert "its results can't be written" in told.reason
        assert str(installation.runs / run) in told.reason
        in_the_way.unlink()
        await resume(bus, installation, run)

    endpoint.respond = respond
    await undisturbed(bus, installation, endpoint, AGENTS)
    name = unique("r")
    in_the_way = installation.runs / name
    in_the_way.touch()
    await disturbed(bus, installation, endpoint, mend, at=0.0, run=name)


@pytest.fixture
def small_disk(shared_installation: Installation) -> Iterator[Path]:
    """The recorder's folder lies on a disk of 200 KB."""
    runs = shared_installation.runs
    runs.mkdir(exist_ok=True)
    options = ["-t", "tmpfs", "-o", "size=200k", "tmpfs"]
    if os.geteuid() != 0 or subprocess.call(["mount", *options, str(runs)]):
        pytest.skip("a small disk can't be mounted here")
    yield runs
    # Lazily: the recorder may be about to look.
    subprocess.run(["umount", "-l", str(runs)], check=True)


@pytest.mark.slow
async def test_a_disk_that_fills_up(
    small_disk: Path, installation: Installation, bus: NatsBus, endpoint: Endpoint
) -> None:
    endpoint.respond = respond
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 160_000)
    run = await start(bus, installation, diaries(endpoint))
    told = await watch(bus, installation, run)
    if told.state == "finished":  # it was over before anything was flushed
        assert "No space left" in told.unrecorded
    else:
        assert told.state == "paused"
        assert "No space left" in told.reason
    filler.unlink()
    if told.state == "paused":
        await resume(bus, installation, run)

    def recorded() -> bool:
        return (small_disk / run / "manifest.json").exists()

    await wait_until(recorded, 40, "the results")
    manifest = json.loads((small_disk / run / "manifest.json").read_text())
    assert (manifest["state"], manifest["answers"], manifest["missing"]) == ("finished", 900, 0)
    assert len(table(installation, run)) == 900
