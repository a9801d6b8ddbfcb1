"""What can be done with runs afterwards: read, compared, played again, deleted; and sweeps."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from aiohttp import web

from populace.cli.replaying import FinishedRounds, replay_of
from populace.cli.sweeping import Sweep, table
from populace.errors import ScenarioError
from populace.models.backends.scripted import _fill
from populace.recorded import RecordedRun, compare, deleted_folder, put_away, results
from populace.runs import Outcome, control, find_run, find_spec, follow, forget_run, submit
from populace.scenario_file import ScenarioFile, read_scenario
from populace.sweep import SweepRun, SweepSpec, read_sweep
from populace.yaml_file import YamlFile
from services.director.announce import save_spec
from services.recorder.events import EventTable
from services.recorder.recorder import RunRecorder
from services.recorder.tables import RunFolder, reopen
from shared.bus import MemoryBroker, NatsBus
from shared.codec import pack_plain
from shared.errors import InvalidInputError
from shared.messages.scenario import ReplaySpec, ScenarioSpec, ScriptSpec, Status
from shared.service import ServiceContext
from shared.settings import Settings
from shared.streams import ensure_streams
from tests.conftest import ROOT, Services, unique, wait_until
from tests.endpoint import Endpoint, answer
from tests.services.test_recovery import diaries, respond
from tests.services.test_runs import game, play


@pytest.fixture
async def bus(services: Services) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(services.settings(), services.broker.url)
    yield made
    await made.drain()


def recorded(services: Services, run: str) -> RecordedRun:
    return results(run, services.settings())


async def test_a_recorded_run_as_tables(services: Services) -> None:
    outcome = await play(services, game())
    run = recorded(services, outcome.run)
    assert run.complete
    assert run.manifest["name"] == "a game"
    assert [row["answers"] for row in run.rounds] == [45, 45]
    assert run.to_arrow().num_rows == 100
    for name, read in (("pandas", run.to_pandas), ("polars", run.to_polars)):
        if importlib.util.find_spec(name) is None:
            with pytest.raises(InvalidInputError, match=f"pip install {name}"):
                read()
        else:
            assert read().shape[0] == 100
    with pytest.raises(InvalidInputError, match="no recorded run 'nothing'"):
        recorded(services, "nothing")


async def test_what_a_run_wrote_before_it_was_cut_off(tmp_path: Path, services: Services) -> None:
    outcome = await play(services, game())
    whole = recorded(services, outcome.run)
    folder = tmp_path / outcome.run
    parts = folder / "answers.parts"
    parts.mkdir(parents=True)
    (parts / "000001.parquet").write_bytes((whole.folder / "answers.parquet").read_bytes())
    cut = RecordedRun(folder)
    assert not cut.complete
    assert cut.to_arrow().num_rows == 100
    with pytest.raises(InvalidInputError, match="is not over"):
        _ = cut.manifest


async def test_two_runs_compared(services: Services) -> None:
    first = await play(services, game())
    same = await play(services, game())
    other = await play(services, game(agents={"count": 60}, rounds=1, params={"ask": True}))
    equal = compare(recorded(services, first.run), recorded(services, same.run))
    assert equal.identical
    assert equal.equal == 100
    differs = compare(recorded(services, first.run), recorded(services, other.run))
    assert not differs.identical
    assert (differs.only_first, differs.only_second) == (100, 60)  # other methods
    changed = await play(services, game(seed=4, params={"ask": True}))
    again = await play(services, game(seed=5, params={"ask": True}))
    found = compare(recorded(services, changed.run), recorded(services, again.run))
    assert found.differing > 90
    assert len(found.different) == 5
    assert found.different[0]["first"] != found.different[0]["second"]


async def play_again(
    services: Services, bus: NatsBus, run: str, *, strict: bool, **more: Any
) -> Outcome:
    spec = await find_spec(bus, services.settings(), run)
    spec.run = unique("again")
    spec.replay = ReplaySpec(run=run, strict=strict)
    for name, value in more.items():
        setattr(spec, name, value)
    return await play(services, spec.model_dump(mode="json", exclude_none=True))


async def test_a_run_is_played_again_without_its_model(
    services: Services, bus: NatsBus, endpoint: Endpoint
) -> None:
    endpoint.respond = respond
    first = await play(services, diaries(endpoint, agents={"count": 60, "workers": 2}))
    assert first.state == "finished", first.reason
    asked = len(endpoint.requests)

    def refuse(_: Any) -> web.Response:
        raise AssertionError("a model was asked")

    endpoint.respond = refuse
    outcome = await play_again(services, bus, first.run, strict=True)
    assert (outcome.state, outcome.reason) == ("finished", "")
    found = compare(recorded(services, first.run), recorded(services, outcome.run))
    assert found.identical
    assert found.equal == 180
    assert len(endpoint.requests) == asked
    columns = ["round", "agent", "value", "answer", "error", "tokens", "tokens_out", "backend"]
    one, other = (
        recorded(services, r).to_arrow().select(columns) for r in (first.run, outcome.run)
    )
    assert one.equals(other)
    manifest = recorded(services, outcome.run).manifest
    assert manifest["replay"] == {"run": first.run, "strict": True}


def say(body: dict[str, Any]) -> web.Response:
    """Something that follows from what was asked, and fits the schema, if there is one."""
    number = len(str(body)) % 90
    wanted = body.get("response_format", {}).get("json_schema", {}).get("schema")
    if wanted is None:
        return answer(f"I say {number}.")
    source: Any = random.Random(json.dumps(body["messages"]))
    return answer(json.dumps(_fill(wanted, wanted, source, float(number), ScriptSpec(), 0)))


@pytest.mark.parametrize("name", sorted({p.parent.name for p in ROOT.glob("examples/*/*.yaml")}))
async def test_each_example_is_played_again(
    services: Services, bus: NatsBus, endpoint: Endpoint, name: str
) -> None:
    endpoint.respond = say
    path = ROOT / "examples" / name / "scenario.yaml"
    model = {"backend": "openai", "base_url": endpoint.url, "model": unique("m")}
    file = read_scenario(path, {"models.default": model, "agents.count": 30})
    first = await play(services, file.spec.model_dump(mode="json", exclude_none=True))
    assert (first.state, first.reason) == ("finished", "")
    asked = len(endpoint.requests)
    outcome = await play_again(services, bus, first.run, strict=True)
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert len(endpoint.requests) == asked
    one, other = (
        recorded(services, run).to_arrow().drop_columns(["run", "seconds"])
        for run in (first.run, outcome.run)
    )
    assert one.num_rows >= 30
    assert one.equals(other)


async def test_a_changed_prompt_is_named(
    services: Services, bus: NatsBus, endpoint: Endpoint
) -> None:
    endpoint.respond = lambda _: answer("hello")
    fields = diaries(endpoint, agents={"count": 20, "workers": 2}, rounds=2)
    first = await play(services, fields)
    params = {"mark": "!"}
    strict = await play_again(services, bus, first.run, strict=True, params=params)
    assert strict.state == "failed"
    assert "people/" in strict.reason
    assert "in round 1, question 1 is asked something else" in strict.reason
    assert "where it has" in strict.reason
    lenient = await play_again(services, bus, first.run, strict=False, params=params)
    assert lenient.state == "finished", lenient.reason
    more = await play_again(services, bus, first.run, strict=False, rounds=3)
    assert more.state == "failed"  # nobody has an answer in the third round
    assert "was never asked" in more.reason


async def test_of_a_run_that_was_cut_off_finished_rounds_are_played_again(
    services: Services, bus: NatsBus, endpoint: Endpoint
) -> None:
    """And so is what was played again."""
    settings = services.settings()
    endpoint.respond = respond
    endpoint.delay = 0.02
    fields = diaries(endpoint, agents={"count": 20, "workers": 2}, rounds=100)
    run = await submit(bus, settings, ScenarioSpec.model_validate(fields))
    await wait_until(lambda: len(endpoint.requests) > 70, 60, "the fourth round")
    await control(bus, settings, run, "cancel")
    async for _ in follow(bus, settings, run):
        pass
    asked = len(endpoint.requests)
    for replayed in range(2):
        info = await find_run(bus, settings, run)
        assert info is not None
        assert 3 <= info.rounds_done < 100
        spec = replay_of(await find_spec(bus, settings, run), run, info.rounds_done, strict=True)
        outcome = await play(services, spec.model_dump(mode="json", exclude_none=True))
        assert (outcome.state, outcome.reason) == ("finished", ""), replayed
        first = FinishedRounds(recorded(services, run), info.rounds_done)
        found = compare(first, recorded(services, outcome.run))
        assert found.identical
        assert found.equal == 20 * info.rounds_done
        run = outcome.run
    assert len(endpoint.requests) == asked
    with pytest.raises(InvalidInputError, match="has finished no round"):
        replay_of(spec, run, 0, strict=False)


async def test_events_and_messages_are_recorded_where_that_is_asked_for(services: Services) -> None:
    fields = game(scenario="games:Bell", agents={"count": 5}, rounds=3)
    fields |= {"record_events": True, "record_messages": True}
    outcome = await play(services, fields)
    assert outcome.state == "finished", outcome.reason
    folder = services.runs / outcome.run
    rows = pq.read_table(folder / "events.parquet").to_pylist()
    assert [row["number"] for row in rows] == list(range(1, 16))
    assert {row["name"] for row in rows} == {"ring"}
    assert [row["round"] for row in rows] == [n for n in (1, 2, 3) for _ in range(5)]
    assert sorted(row["by"] for row in rows[:5]) == [f"ringer/{i}" for i in range(5)]
    assert json.loads(rows[0]["arguments"]) == {"times": 1}
    manifest = recorded(services, outcome.run).manifest
    assert (manifest["events"], manifest["events_missing"]) == (15, 0)
    said = pq.read_table(folder / "messages.parquet").to_pylist()
    assert manifest["messages"] == 15
    assert sorted((row["round"], row["sender"]) for row in said) == [
        (n, f"ringer/{i}") for n in (1, 2, 3) for i in range(5)
    ]
    assert {(row["receiver"], row["method"], row["error"]) for row in said} == {
        ("tower", "ring", None)
    }
    assert json.loads(said[0]["arguments"]) == [said[0]["round"], {}]


def test_events_of_a_round_that_was_played_again() -> None:
    events = EventTable("r")
    told = {"path": "p", "name": "n", "by": "", "arguments": {}, "value": None}
    for number, round_number in ((1, 1), (2, 2), (3, 2), (4, 2), (2, 2), (3, 2), (5, 2)):
        events.add({**told, "number": number, "round": round_number})
    assert events.count == 4
    assert events.missing == 1  # the fourth is gone


async def test_a_run_is_deleted(services: Services, bus: NatsBus, endpoint: Endpoint) -> None:
    outcome = await play(services, diaries(endpoint, agents={"count": 10, "workers": 2}))
    settings, subjects = services.settings(), services.settings().subjects
    held = [
        (subjects.stream_states, subjects.run_state(outcome.run)),
        (subjects.stream_kept, subjects.model_kept(outcome.run)),
        (subjects.stream_runs, subjects.run_results(outcome.run)),
        (subjects.stream_runs, subjects.run_status(outcome.run)),
    ]

    async def count() -> list[int]:
        return [len([m async for m in bus.read(stream, (name,))]) for stream, name in held]

    assert min(await count()) > 0
    await forget_run(bus, settings, outcome.run)
    assert max(await count()) == 0
    assert await find_run(bus, settings, outcome.run) is None
    with pytest.raises(InvalidInputError, match="keeps no scenario"):
        await find_spec(bus, settings, outcome.run)


def test_files_of_a_deleted_run_are_not_under_its_name(tmp_path: Path) -> None:
    """A deletion that is cut short leaves nothing that is taken for another run's."""
    folder = tmp_path / "r"
    assert not put_away(folder).exists()
    for content in ("old", "new"):  # the first deletion was cut short before the files went
        folder.mkdir()
        (folder / "manifest.json").write_text(content)
        away = put_away(folder)
        assert not folder.exists()
        assert away == deleted_folder(folder) == put_away(folder)
        assert (away / "manifest.json").read_text() == content


# Sweeps
SCENARIO = """\
name: pick
scenario: games:Game
agents: {count: 12}
rounds: 2
models: {default: {backend: scripted}}
"""
SWEEP = """\
name: NAME
scenario: scenario.yaml
set: {agents.count: 8}
grid:
  seed: [1, 2]
runs:
  plain: {}
  asked: {params.ask: true}
at_once: 3
"""


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    games = Path(__file__).parent / "games.py"
    (tmp_path / "games.py").write_text(games.read_text())
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP.replace("NAME", unique("s")))
    return file


def test_what_a_sweep_plays(swept: Path) -> None:
    spec, runs = read_sweep(swept)
    assert [(r.variant, r.values) for r in runs] == [
        ("plain", {"seed": 1}),
        ("plain", {"seed": 2}),
        ("asked", {"params.ask": True, "seed": 1}),
        ("asked", {"params.ask": True, "seed": 2}),
    ]
    assert {r.file.spec.agents.count for r in runs} == {8}
    assert len({r.name for r in runs}) == 4
    assert all(r.name.startswith(f"{spec.name}-{r.variant}-") for r in runs)
    assert [r.name for r in read_sweep(swept)[1]] == [r.name for r in runs]
    assert [r.variant for r in read_sweep(swept, only=["asked"])[1]] == ["asked"] * 2
    _, more = read_sweep(swept, {"agents.count": 9})
    assert {r.file.spec.agents.count for r in more} == {9}
    assert not {r.name for r in more} & {r.name for r in runs}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seed: [1, 2]", "sed: [1, 2]", r"plain \(sed=1\): .*scenario.yaml.*sed"),
        ("seed: [1, 2]", "seed: []", "grid.seed has no values"),
        ("name: ", "name: a b", r"sweep.yaml:1: name: must be 1 to 40"),
        ("at_once: 3", "at_ones: 3", r"sweep.yaml:\d+: .*at_ones"),
        ("scenario: scenario.yaml", "scenario: other.yaml", "other.yaml"),
    ],
)
def test_wrong_sweeps(swept: Path, old: str, new: str, said: str) -> None:
    swept.write_text(swept.read_text().replace(old, new, 1))
    with pytest.raises(ScenarioError, match=said):
        read_sweep(swept)
    swept.write_text(SWEEP.replace("NAME", "n"))
    with pytest.raises(ScenarioError, match="there is no run named 'x'"):
        read_sweep(swept, only=["x"])


async def test_a_sweep_is_played_and_not_repeated(
    services: Services, bus: NatsBus, swept: Path
) -> None:
    settings = services.settings()
    spec, runs = read_sweep(swept)
    for run in runs:  # the services' workers may read from the tests' own folder alone
        run.file.spec.folder = str(Path(__file__).parent)
    sweep = Sweep(bus, settings, spec, runs, quiet=True)
    assert await sweep.play()
    rows = sweep.rows()
    assert [row["state"] for row in rows] == ["finished"] * 4
    assert [row["answers"] for row in rows] == [14, 14, 16, 16]  # one of eight is unlucky
    assert "mean" in rows[0]["last"]
    written = json.loads(sweep.write().read_text())
    assert [row["run"] for row in written] == [run.name for run in runs]
    assert table(rows).row_count == 4
    again = Sweep(bus, settings, spec, runs, quiet=True)
    assert await again.play()
    assert again.rows() == rows
    for run in runs:
        info = await find_run(bus, settings, run.name)
        assert info is not None
        assert info.life == 1


async def test_a_sweep_goes_on_with_runs_whose_endpoint_was_away(
    services: Services, bus: NatsBus, endpoint: Endpoint, tmp_path: Path
) -> None:
    """They failed before anything was played; the same command plays them, under their names."""
    fields = diaries(endpoint, agents={"count": 6, "workers": 1}, rounds=2)
    away = ScenarioSpec.model_validate(fields)
    model = away.models["default"]
    there = model.base_url
    path = tmp_path / "scenario.yaml"
    path.write_text("name: diaries\n")
    file = ScenarioFile(YamlFile(path, "a scenario", ScenarioError), away)
    run = SweepRun(unique("s"), "", {}, {}, file)
    away.run = run.name
    model.base_url = "http://127.0.0.1:9"
    sweep = SweepSpec(name="s", scenario="scenario.yaml", grid={"seed": [1]})

    async def play_it() -> dict[str, Any]:
        playing = Sweep(bus, services.settings(), sweep, [run], quiet=True)
        assert await playing.play()
        (row,) = playing.rows()
        return row

    for _ in range(2):  # while it is away, the run fails, and soon
        row = await play_it()
        assert row["state"] == "failed"
        assert "can't be reached" in row["reason"]
    model.base_url = there
    await save_spec(bus, services.settings().subjects, away)
    endpoint.respond = respond
    row = await play_it()
    assert (row["state"], row["rounds"], row["answers"]) == ("finished", 2, 12)
    assert recorded(services, run.name).to_arrow().num_rows == 12


async def test_runs_of_a_sweep_spend_one_budget(
    services: Services, bus: NatsBus, endpoint: Endpoint
) -> None:
    account = unique("account")
    outcomes = [
        await play(
            services,
            diaries(
                endpoint,
                agents={"count": 30, "workers": 1},
                rounds=1,
                budget={"requests": 45, "account": account},
            ),
        )
        for _ in range(2)
    ]
    assert [o.state for o in outcomes] == ["finished", "cancelled"]
    assert "its budget (45 requests) is spent" in outcomes[1].reason
    assert 45 <= sum(o.rows[0].answers for o in outcomes) <= 45 + 8


async def test_messages_that_never_came_are_read_again(tmp_path: Path) -> None:
    """A node of a cluster died with some of them on their way to the recorder."""
    bus, settings, run = MemoryBroker().connect(), Settings(runs_dir=tmp_path), "r"
    await ensure_streams(bus, settings.subjects)
    recorder = RunRecorder(ServiceContext("recorder", settings, bus))  # type: ignore[arg-type]
    folder = RunFolder(tmp_path / run, run)
    told = {
        "run": run,
        "method": "say",
        "senders": ["a/0"],
        "receivers": ["a/1"],
        "arguments": [[["hello"], {}]],
        "values": ["yes"],
        "errors": [None],
    }
    for life, round_number in ((1, 1), (1, 2), (2, 2)):
        batch = {**told, "round": round_number, "life": life, "batch": f"{life}/{round_number}"}
        await bus.append(settings.subjects.run_messages(run, round_number), pack_plain(batch))
        if life == 2:
            folder.add_messages(batch)
    restored = Status(kind="restored", run=run, round=1, life=2)
    await bus.append(settings.subjects.run_status(run), restored.model_dump_json().encode())
    await recorder._fill(run, folder)
    assert folder.message_batches == 3
    folder.finish()
    said = pq.read_table(tmp_path / run / "messages.parquet").to_pylist()
    assert sorted(row["batch"] for row in said) == ["1/1", "2/2"]


async def test_a_recorder_that_dies_as_it_reopens_a_run_keeps_all(tmp_path: Path) -> None:
    """Between the answers' new place and the end of the manifest, they are in the parts alone."""
    bus, settings, run = MemoryBroker().connect(), Settings(runs_dir=tmp_path), "r"
    await ensure_streams(bus, settings.subjects)
    folder = RunFolder(tmp_path / run, run)
    ended = Status(kind="ended", run=run, state="finished", life=1)
    folder.add_status(ended)
    folder.finish()
    manifest = (tmp_path / run / "manifest.json").read_text()
    reopen(tmp_path / run, run)
    (tmp_path / run / "manifest.json").write_text(manifest)
    await bus.append(settings.subjects.run_status(run), ended.model_dump_json().encode())
    consumer = await bus.consumer(settings.subjects.stream_runs, durable="recorder")
    recorder = RunRecorder(ServiceContext("recorder", settings, bus))  # type: ignore[arg-type]
    (delivery,) = await consumer.fetch(1, timeout=1)
    await recorder._take(delivery)
    assert (tmp_path / run / "answers.parts" / "000000.parquet").exists()
