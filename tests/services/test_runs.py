"""Whole runs through director, workers, model service and recorder, as processes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import nats
import psutil
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from populace.cli import show
from populace.runs import Outcome, control, find_run, follow, forget_run, manage, submit
from populace.scenario_file import read_scenario
from shared.bus import NatsBus
from shared.codec import from_public
from shared.errors import BusError, PopulaceError, RemoteError
from shared.messages.scenario import ManageRequest, ScenarioSpec
from tests.conftest import ROOT, Services, unique, wait_until
from tests.endpoint import Endpoint

GAMES = str(ROOT / "tests" / "services")


def game(**more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": "a game",
        "scenario": "games:Game",
        "folder": GAMES,
        "seed": 3,
        "rounds": 2,
        "agents": {"count": 50},
        "models": {"default": {"backend": "scripted"}},
    }
    fields.update(more)
    return fields


async def play(services: Services, fields: dict[str, Any]) -> Outcome:
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    try:
        run = await submit(bus, settings, ScenarioSpec.model_validate(fields))
        return await watch(bus, services, run)
    finally:
        await bus.drain()


async def watch(bus: NatsBus, services: Services, run: str) -> Outcome:
    outcome = Outcome(run)
    async with asyncio.timeout(60):
        async for status in follow(bus, services.settings(), run, submitted=True):
            if status is not None:
                outcome.take(status)
    return outcome


def recorded(services: Services, run: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(services.runs / run / "answers.parquet").to_pylist()
    return rows


async def test_a_run_from_end_to_end(services: Services) -> None:
    outcome = await play(services, game())
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert [(r.round, r.answers, r.failed) for r in outcome.rows] == [(1, 45, 5), (2, 45, 5)]
    assert outcome.rows[0].failures == {"unlucky": 5}
    good = [i for i in range(50) if i % 10 != 3]
    assert outcome.rows[1].values == {"mean": sum(good) * 2 / 45}
    rows = recorded(services, outcome.run)
    assert [(r["round"], r["agent"]) for r in rows] == [(n, i) for n in (1, 2) for i in range(50)]
    assert [r["value"] for r in rows[50:]] == [None if i % 10 == 3 else i * 2.0 for i in range(50)]
    assert rows[3]["error"] == "unlucky"
    assert rows[3]["message"] == "number 3"
    folder = services.runs / outcome.run
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["state"], manifest["answers"], manifest["failed"]) == ("finished", 90, 10)
    assert (manifest["seed"], manifest["missing"]) == (3, 0)
    assert manifest["scripted"] == ["default"]
    assert len(manifest["scenario_sha256"]) == 64
    rounds = json.loads((folder / "rounds.json").read_text())
    assert [r["answers"] for r in rounds] == [45, 45]
    assert sorted(p.name for p in folder.iterdir()) == [
        "answers.parquet",
        "manifest.json",
        "rounds.json",
    ]


async def test_isolated_agents_and_where_the_time_goes(services: Services) -> None:
    fields = game(agents={"count": 12, "workers": 1, "isolated": True}, profile=True)
    outcome = await play(services, fields)
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert [(r.answers, r.failed) for r in outcome.rows] == [(11, 1), (11, 1)]
    assert outcome.profile is not None
    assert "workers (13)" in outcome.profile["processes"]  # one each, and the run's own
    assert outcome.profile["call"]["calls"] >= 36
    assert outcome.profile["call"]["storing the record"] > 0
    written = json.loads((services.runs / outcome.run / "manifest.json").read_text())
    assert written["profile"] == outcome.profile
    table = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(show, "out", Console(file=table, width=120))
        show.show_outcome(outcome)
    assert "serialisation" in table.getvalue()
    assert "queue at the worker" in table.getvalue()
    plain = await play(services, game(agents={"count": 12, "workers": 2}))
    drawn = [[r["answer"] for r in recorded(services, run)] for run in (outcome.run, plain.run)]
    assert drawn[0] == drawn[1]


async def test_nobody_is_dropped_by_a_division(services: Services) -> None:
    outcome = await play(services, game(agents={"count": 1007, "workers": 3}, rounds=1))
    assert outcome.rows[0].answers + outcome.rows[0].failed == 1007
    assert sorted(r["agent"] for r in recorded(services, outcome.run)) == list(range(1007))


async def test_results_do_not_depend_on_the_number_of_workers(services: Services) -> None:
    tables = []
    for workers in (1, 3):
        fields = game(agents={"count": 40, "workers": workers}, params={"ask": True})
        outcome = await play(services, fields)
        rows = recorded(services, outcome.run)
        tables.append([(r["round"], r["agent"], r["answer"]) for r in rows])
        assert {r["backend"] for r in rows} == {"scripted"}
        assert all(r["tokens"] > 0 for r in rows)
    assert tables[0] == tables[1]
    assert len({answer for _, _, answer in tables[0]}) == 80


async def test_by_event_with_a_bare_client(services: Services) -> None:
    """JSON in, JSON out, each answer once; the sender names the run."""
    run = unique("event")
    client = await nats.connect(services.broker.url)
    seen: Counter[tuple[int, int]] = Counter()
    ended = asyncio.Event()

    async def see(message: Any) -> None:
        content = json.loads(message.data)
        if ".results." in message.subject:
            for agent in content["agents"]:
                seen[(content["round"], agent)] += 1
        elif content["kind"] == "recorded":
            ended.set()

    await client.subscribe(f"populace.run.{run}.>", cb=see)
    await client.publish("populace.scenario.event", json.dumps(game(run=run)).encode())
    await asyncio.wait_for(ended.wait(), 60)
    assert seen == Counter({(n, i): 1 for n in (1, 2) for i in range(50)})
    await client.close()


async def test_by_request_with_a_bare_client(services: Services) -> None:
    client = await nats.connect(services.broker.url)

    async def request(fields: Any) -> dict[str, Any]:
        data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        reply = await client.request("populace.scenario.submit", data, timeout=10)
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    first = await request(game(run=unique("req")))
    assert set(first) == {"run"}
    assert "is not a key" in (await request(game(colour="red")))["error"]
    assert "rounds" in (await request(game(rounds=-1)))["error"]
    assert "can't be read" in (await request(b"{broken"))["error"]
    assert "must be 1 to 64" in (await request(game(run="a.b")))["error"]
    bus = await NatsBus.connect(services.settings(), services.broker.url)
    await watch(bus, services, first["run"])
    again = await request(game(run=first["run"]))
    assert "there is a run named" in again["error"]
    await bus.drain()
    await client.close()


async def test_a_bad_event_ends_in_a_status(services: Services) -> None:
    run = unique("bad")
    bus = await NatsBus.connect(services.settings(), services.broker.url)
    data = json.dumps(game(run=run, rounds="many")).encode()
    await bus.append(services.settings().subjects.scenario_event, data)
    outcome = await watch(bus, services, run)
    assert outcome.state == "failed"
    assert "rounds" in outcome.reason
    await bus.drain()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"params": {"raises": "setup"}}, "RuntimeError: no board"),
        ({"params": {"raises": "round 2"}}, "the board fell over"),
        ({"params": {"size": 3}}, "params.size: is not a key"),
        ({"scenario": "games:Nothing"}, "has no 'Nothing'"),
        ({"scenario": "nowhere:Game"}, "no module named 'nowhere'"),
        ({"folder": "/usr/lib"}, "outside the folders"),
        ({"agents": {"count": 5000, "workers": 1000}}, "1000 workers were asked for"),
        (
            {
                "models": {
                    "default": {"backend": "openai", "base_url": "http://127.0.0.1:9", "model": "m"}
                }
            },
            "models.default: the model endpoint http://127.0.0.1:9 can't be reached",
        ),
        (
            {
                "models": {
                    "default": {
                        "backend": "openai",
                        "base_url": "http://127.0.0.1:9",
                        "model": "m",
                        "api_key_env": "PATH",
                    }
                }
            },
            "may not read",
        ),
    ],
)
async def test_runs_that_fail_say_why(
    services: Services, more: dict[str, Any], reason: str
) -> None:
    outcome = await play(services, game(**more))
    assert outcome.state == "failed"
    assert reason in outcome.reason
    assert "\n" not in outcome.reason
    manifest = json.loads((services.runs / outcome.run / "manifest.json").read_text())
    assert manifest["reason"] == outcome.reason
    if more.get("params") == {"raises": "round 2"}:
        assert len(recorded(services, outcome.run)) == 50  # what it had is kept


async def test_cancelling_keeps_what_there_is(services: Services) -> None:
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    spec = ScenarioSpec.model_validate(game(params={"pause": 1.0}, rounds=50))
    run = await submit(bus, settings, spec)
    outcome = Outcome(run)
    asked = False
    async with asyncio.timeout(60):
        async for status in follow(bus, settings, run, submitted=True):
            if status is None:
                continue
            outcome.take(status)
            if status.kind == "progress" and (status.done or 0) >= 10 and not asked:
                asked = True
                began = time.monotonic()
                await control(bus, settings, run, "cancel")
    assert time.monotonic() - began < 10
    assert outcome.state == "cancelled"
    rows = recorded(services, run)
    assert 10 <= len(rows) < 2500
    with pytest.raises(PopulaceError):
        await control(bus, settings, run, "cancel")
    await bus.drain()


@pytest.mark.slow
async def test_cancelling_code_that_blocks(services: Services, tmp_path: Path) -> None:
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    marker = tmp_path / "it blocks"
    fields = game(params={"raises": "block", "marker": str(marker)})
    run = await submit(bus, settings, ScenarioSpec.model_validate(fields))
    outcome = Outcome(run)
    async with asyncio.timeout(60):
        async for status in follow(bus, settings, run, submitted=True):
            if status is not None:
                outcome.take(status)
                if status.kind == "round_started":
                    await wait_until(marker.exists, 30)
                    await control(bus, settings, run, "cancel")
    assert outcome.state == "cancelled"
    assert "was killed" in outcome.reason
    await bus.drain()


async def test_two_calls_of_one_method_in_a_round(services: Services) -> None:
    outcome = await play(services, game(params={"raises": "twice"}, rounds=1))
    assert outcome.rows[0].answers == 90
    rows = recorded(services, outcome.run)
    assert [(r["call"], r["agent"]) for r in rows] == [(n, i) for n in (1, 2) for i in range(50)]
    assert rows[52]["value"] == 4.0


async def test_a_round_in_which_every_agent_fails(services: Services) -> None:
    outcome = await play(services, game(params={"raises": "agents"}))
    assert outcome.state == "failed"
    assert "no agent answered in round 1: 50 failed, the first with KeyError" in outcome.reason
    assert len(recorded(services, outcome.run)) == 50
    logs = (services.logs / "agent_host.log").read_text()
    assert "games.py" in logs  # the traceback, for whoever looks for it


async def test_several_runs_at_once(services: Services) -> None:
    fields = [game(params={"pause": 0.3}, seed=i) for i in range(3)]
    began = time.monotonic()
    outcomes = await asyncio.gather(*(play(services, f) for f in fields))
    assert [o.state for o in outcomes] == ["finished"] * 3
    assert len({o.run for o in outcomes}) == 3
    assert time.monotonic() - began < 30


async def test_a_worker_killed_in_a_round(services: Services) -> None:
    """Its agents' failures are counted and recorded; the others' answers too."""
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    spec = ScenarioSpec.model_validate(
        game(
            params={"pause": 0.7},
            rounds=1,
            agents={"count": 40, "workers": 2},
            durability="none",
        )
    )
    run = await submit(bus, settings, spec)
    outcome = Outcome(run)
    killed = False
    async with asyncio.timeout(60):
        async for status in follow(bus, settings, run, submitted=True):
            if status is None:
                continue
            outcome.take(status)
            if status.kind == "progress" and not killed:
                killed = True
                (victim, *_) = _workers(services)
                victim.kill()
    assert killed
    assert outcome.state == "finished"
    row = outcome.rows[0]
    assert row.answers + row.failed == 40
    assert row.failures["worker_lost"] == 20
    rows = recorded(services, run)
    assert len(rows) == 40
    assert sum(r["error"] == "worker_lost" for r in rows) <= 20
    manifest = json.loads((services.runs / run / "manifest.json").read_text())
    assert "killed by signal 9" in manifest["workers_lost"][0]
    await bus.drain()


def _workers(services: Services) -> list[psutil.Process]:
    """Worker processes of the run that is played."""
    (nursery,) = psutil.Process(services.processes["agent_host"].pid).children()
    return nursery.children()


async def test_results_come_as_they_were_asked_for(services: Services) -> None:
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    formats = {}
    for wanted in ("json", "msgpack"):
        outcome = await play(services, game(results_format=wanted, rounds=1))
        subject = settings.subjects.run_results(outcome.run)
        async for message in bus.replay(settings.subjects.stream_runs, (subject,)):
            assert message is not None
            formats[wanted] = message.header("content-type")
            assert from_public(message.data)["run"] == outcome.run
            break
    assert formats == {"json": "application/json", "msgpack": "application/msgpack"}
    await bus.drain()


async def test_the_example_is_as_good_as_its_word(services: Services) -> None:
    spec = read_scenario(ROOT / "examples/guess_average/dummy.yaml", {"agents.count": 500}).spec
    outcome = await play(services, spec.model_dump(mode="json", exclude_none=True))
    assert outcome.state == "finished"
    assert [r.values["parsed"] for r in outcome.rows] == [500, 500]
    for row in outcome.rows:
        assert row.values["winning"] == pytest.approx(row.values["mean"] * 2 / 3)
        assert 40 < row.values["mean"] < 60
    rows = recorded(services, outcome.run)
    assert all(json.loads(r["answer"])["number"] == r["value"] for r in rows)


async def test_the_bare_client(services: Services) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "examples/bare_client/client.py"),
        str(ROOT / "examples/guess_average/dummy.yaml"),
        "300",
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "POPULACE_NATS_URL": services.broker.url},
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    lines = [json.loads(line) for line in out.decode().splitlines()]
    assert sorted((x["round"], x["agent"]) for x in lines) == [
        (n, i) for n in (1, 2) for i in range(300)
    ]


async def test_the_name_of_a_deleted_run_can_be_used_again(
    services: Services, endpoint: Endpoint
) -> None:
    """At once: nothing of the first is taken for a part of the second."""
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    bell = game(run=unique("r"), scenario="games:Bell", agents={"count": 4}, record_events=True)
    model = {"backend": "openai", "base_url": endpoint.url, "model": unique("m")}
    asking = game(run=unique("r"), params={"ask": True}, models={"default": model})
    for fields in (bell, asking):
        asked = []
        for _ in range(2):
            outcome = await play(services, fields)
            assert outcome.state == "finished", outcome.reason
            assert not outcome.missing
            folder = services.runs / outcome.run
            told = json.loads((folder / "manifest.json").read_text())
            asked.append((told["answers"], told.get("events"), told["usage"]["total"]))
            await forget_run(bus, settings, outcome.run)
            shutil.rmtree(folder)
        assert asked[0] == asked[1]
    await bus.drain()


async def test_a_run_whose_statuses_are_gone_is_known_by_its_files(services: Services) -> None:
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    outcome = await play(services, game())
    await bus.purge(settings.subjects.stream_runs, settings.subjects.run_status(outcome.run))
    again = Outcome(outcome.run)
    async with asyncio.timeout(20):
        async for status in follow(bus, settings, outcome.run):
            if status is not None:
                again.take(status)
    assert (again.state, again.rows, again.records) == ("finished", outcome.rows, outcome.records)
    assert again.folder == outcome.folder
    await bus.drain()


async def test_a_cancel_after_a_pause_counts(services: Services) -> None:
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    run = await submit(
        bus, settings, ScenarioSpec.model_validate(game(params={"pause": 0.2}, rounds=50))
    )
    following = asyncio.ensure_future(watch(bus, services, run))
    async with asyncio.timeout(20):
        while (info := await find_run(bus, settings, run)) is None or info.state != "running":
            await asyncio.sleep(0.02)
    await control(bus, settings, run, "pause")
    with contextlib.suppress(RemoteError, BusError):  # it may be paused by now
        await control(bus, settings, run, "cancel")
    info = await find_run(bus, settings, run)
    if info is not None and info.state == "paused":
        with contextlib.suppress(RemoteError):  # it may be cancelled by now
            await manage(bus, settings, ManageRequest(run=run, action="cancel"))
    await following
    async with asyncio.timeout(20):
        while (info := await find_run(bus, settings, run)) is None or info.state != "cancelled":
            await asyncio.sleep(0.02)
    await bus.drain()


async def test_half_a_character_harms_no_status(services: Services) -> None:
    """Models cut answers short; scenarios record them, and raise with them."""
    outcome = await play(services, game(params={"raises": "half"}))
    assert outcome.state == "failed"
    assert "RuntimeError: half \ufffd (games.py" in outcome.reason
    assert [row.values for row in outcome.rows] == [{"said": "half \ufffd"}]
