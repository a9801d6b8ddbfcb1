"""What comes into a run from outside: events planned and by hand, and interviews."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.counting import CountingModel, counting_model
from benchmarks.installation import MODULES, Installation
from populace.interviews import InterviewAnswers, InterviewRequest
from populace.recorded import compare, results
from populace.runs import Outcome, control, find_spec, follow, submit
from shared.bus import NatsBus
from shared.errors import RemoteError
from shared.messages.scenario import PlannedEvent, ReplaySpec, ScenarioSpec
from shared.service import ask
from tests.conftest import Services, unique
from tests.services.test_runs import GAMES, play, watch


def paper(**more: Any) -> dict[str, Any]:
    return {
        "name": "paper",
        "scenario": "papers:Paper",
        "folder": GAMES,
        "seed": 3,
        "rounds": 4,
        "agents": {"count": 12},
        "models": {"default": {"backend": "scripted"}},
        "run": unique("paper"),
        **more,
    }


@pytest.fixture
async def bus(services: Services) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(services.settings(), services.broker.url)
    yield made
    await made.drain()


def values(outcome: Outcome, name: str) -> list[Any]:
    return [row.values[name] for row in outcome.rows]


EVENTS = [
    {"round": 2, "name": "news", "data": {"text": "It rains."}},
    {"round": 2, "name": "params", "data": {"tone": "sad"}},
    {"round": 3, "name": "leave", "data": {"agents": [0, 11, 5]}},
    {"round": 4, "name": "join", "data": {"count": 7}},
]


async def test_events_at_their_rounds(services: Services, bus: NatsBus) -> None:
    outcome = await play(services, paper(events=EVENTS))
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert values(outcome, "heard") == [0, 1, 1, 1]
    assert values(outcome, "tone") == ["plain", "sad", "sad", "sad"]
    assert values(outcome, "readers") == [12, 12, 9, 9]
    assert values(outcome, "more") == [0, 0, 0, 7]
    manifest = results(outcome.run, services.settings()).manifest
    assert [(e["round"], e["name"], e["by"]) for e in manifest["events"]] == [
        (2, "news", "file"),
        (2, "params", "file"),
        (3, "leave", "file"),
        (4, "join", "file"),
    ]


async def test_after_some_time(services: Services) -> None:
    event = {"after": 0.0, "name": "news", "data": {"text": "At once."}}
    outcome = await play(services, paper(events=[event], rounds=2))
    assert values(outcome, "heard") == [1, 1]


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        ({"round": 1, "name": "storm"}, "does not know the event 'storm'"),
        ({"round": 1, "name": "params", "data": {"colour": 1}}, "params.colour"),
    ],
)
async def test_planned_events_that_cannot_be_used(
    services: Services, event: dict[str, Any], complaint: str
) -> None:
    outcome = await play(services, paper(events=[event]))
    assert outcome.state == "failed"
    assert complaint in outcome.reason


async def begin(bus: NatsBus, services: Services, fields: dict[str, Any], rounds: int) -> str:
    """Start a run; returns when so many rounds are finished."""
    run = await submit(bus, services.settings(), ScenarioSpec.model_validate(fields))
    async with asyncio.timeout(30):
        async for status in follow(bus, services.settings(), run, submitted=True):
            if status is not None and status.kind == "round_finished" and status.round == rounds:
                return run
    raise AssertionError("the run ended")


async def test_events_by_hand(services: Services, bus: NatsBus) -> None:
    settings = services.settings()
    run = await begin(bus, services, paper(params={"pause": 0.4}, rounds=6), 1)

    async def inject(name: str, **data: Any) -> None:
        await control(bus, settings, run, "inject", event=PlannedEvent(name=name, data=data))

    await inject("news", text="By hand.")
    await inject("storm")  # nobody knows it: it is refused, and the run goes on
    event = PlannedEvent(name="news", round=1)
    with pytest.raises(RemoteError, match=r"round 1 of .* has begun"):
        await control(bus, settings, run, "inject", event=event)
    event = PlannedEvent(name="news", data={"text": "Later."}, round=5)
    await control(bus, settings, run, "inject", event=event)
    outcome = await watch(bus, services, run)
    assert (outcome.state, outcome.reason) == ("finished", "")
    heard = values(outcome, "heard")
    assert heard[0] == 0
    assert heard[3:] == [1, 2, 2]
    manifest = results(run, settings).manifest
    events = manifest["events"]
    assert [(e["name"], e["by"]) for e in events] == [
        ("news", "hand"),
        ("storm", "hand"),
        ("news", "hand"),
    ]
    assert "does not know" in events[1]["refused"]
    assert events[2]["round"] == 5
    # Played again, the events come in the rounds in which they came.
    spec = await find_spec(bus, settings, run)
    spec.run, spec.replay = unique("again"), ReplaySpec(run=run)
    assert [e.name for e in spec.events] == ["news", "news"]  # "storm" was no part of the run
    again = await play(services, spec.model_dump(mode="json", exclude_none=True))
    assert (again.state, again.reason) == ("finished", "")
    assert values(again, "heard") == heard
    assert compare(results(run, settings), results(again.run, settings)).identical


@pytest.mark.parametrize("durability", ["round", "call"])
async def test_an_interview_changes_nothing(
    services: Services, bus: NatsBus, durability: str
) -> None:
    settings = services.settings()
    fields = paper(
        params={"pause": 0.3},
        events=EVENTS[:1],
        durability=durability,
        agents={"count": 12, "personas": "education"},
        rounds=8,
    )
    undisturbed = await play(services, fields)
    run = await begin(bus, services, {**fields, "run": unique("asked")}, 2)
    subject = settings.subjects.run_owner(run, "interview")
    request = InterviewRequest(agents=["readers/3", "readers/11"], question="Why?")
    wrong = request.model_copy(update={"agents": ["readers/12"]})
    with pytest.raises(RemoteError, match="no agent 'readers/12'"):
        await ask(bus, subject, wrong, InterviewAnswers, timeout=20)
    found = await ask(bus, subject, request, InterviewAnswers, timeout=20)
    assert [a.agent for a in found.answers] == ["readers/3", "readers/11"]
    assert all(a.text and a.error is None for a in found.answers)
    assert found.answers[0].persona is not None
    assert "education" in found.answers[0].persona
    twice = await ask(bus, subject, request, InterviewAnswers, timeout=20)
    assert [a.text for a in twice.answers] != [a.text for a in found.answers]  # drawn anew
    outcome = await watch(bus, services, run)
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert compare(results(undisturbed.run, settings), results(run, settings)).identical


async def test_an_interview_that_is_remembered(services: Services, bus: NatsBus) -> None:
    run = await begin(bus, services, paper(params={"pause": 0.3}), 1)
    request = InterviewRequest(agents=["readers/3"], question="Why?", remember=True)
    subject = services.settings().subjects.run_owner(run, "interview")
    await ask(bus, subject, request, InterviewAnswers, timeout=20)
    outcome = await watch(bus, services, run)
    heard = values(outcome, "heard")
    assert heard[-1] == pytest.approx(2 / 12)  # question and answer, of one of twelve


async def test_an_event_survives_a_crash(tmp_path: Path) -> None:
    """Taken, then the process that plays the run is killed in the very round that it came into."""
    installation = Installation(tmp_path)
    installation.start_broker()
    try:
        installation.start(*MODULES)
        bus = await NatsBus.connect(installation.settings(), installation.url)
        await installation.ready(bus)
        async with counting_model(0.05) as model:
            await _crash(installation, bus, model)
        await bus.drain()
    finally:
        installation.close()


async def _crash(installation: Installation, bus: NatsBus, model: CountingModel) -> None:
    settings = installation.settings()
    fields = paper(
        params={"pause": 0.5},
        events=[{"after": 0.0, "name": "params", "data": {"tone": "early"}}],
        models={"default": {"backend": "openai", "base_url": model.url, "model": unique("m")}},
    )
    run = await submit(bus, settings, ScenarioSpec.model_validate(fields))
    outcome, lives = Outcome(run), set[int | None]()
    async with asyncio.timeout(60):
        async for status in follow(bus, settings, run, submitted=True):
            if status is None:
                continue
            outcome.take(status)
            if status.kind == "round_finished" and status.round == 1:
                event = PlannedEvent(name="news", data={"text": "Once."})
                await control(bus, settings, run, "inject", event=event)
            lives.update({status.life} if status.kind == "restored" else ())
            if status.kind == "round_started" and status.round == 3 and not lives:
                for player in installation.forked("director"):
                    installation.kill_process(player.pid)
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert lives == {2}
    heard = values(outcome, "heard")
    assert heard[0] == 0
    assert heard[-1] == 1  # once, though a round was played twice
    assert values(outcome, "tone") == ["early"] * 4
