"""Further kinds of simulation: by the scripted model, and their baselines against theory."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from markupsafe import escape

from populace.cli.reporting import judging
from populace.recorded import RecordedRun, results
from populace.report.data import load
from populace.report.judged import note_judged
from populace.report.page import Report
from populace.runs import Outcome
from populace.scenario_file import read_scenario
from shared.errors import InvalidInputError
from tests.conftest import ROOT, Services
from tests.endpoint import Endpoint
from tests.services.test_guess_average import openai
from tests.services.test_runs import play


async def kind(services: Services, file: str, **overrides: Any) -> tuple[Outcome, RecordedRun]:
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    spec = read_scenario(ROOT / "examples" / file, changes).spec
    outcome = await play(services, spec.model_dump(mode="json", exclude_none=True))
    assert (outcome.state, outcome.reason) == ("finished", "")
    return outcome, results(outcome.run, services.settings())


def values(outcome: Outcome, name: str) -> list[Any]:
    return [row.values[name] for row in outcome.rows]


@pytest.mark.parametrize(
    "name", ["survey", "opinions", "public_goods", "deliberation", "rumour", "guess_average"]
)
async def test_each_kind_with_a_script_and_its_report(services: Services, name: str) -> None:
    outcome, run = await kind(
        services, f"{name}/scenario.yaml", models__default={"backend": "scripted"}
    )
    assert all(row.failed == 0 for row in outcome.rows), outcome.rows[0].example
    page = Report(name, [(name, load(run))]).html()
    assert "A script stood in for a model" in page
    assert "<svg" in page
    for variable in run.manifest["report"]["variables"]:
        assert str(escape(variable["label"])) in page


async def test_a_survey_branches(services: Services) -> None:
    outcome, run = await kind(
        services, "survey/scenario.yaml", agents__count=200, models__default={"backend": "scripted"}
    )
    answers = [json.loads(a) for a in run.to_arrow()["answer"].to_pylist()]
    assert len(answers) == 200
    for answer in answers:
        assert answer["trust"] in ("yes", "no", "it depends")
        assert 0 <= answer["satisfaction"] <= 10
        assert isinstance(answer["satisfaction"], int)
        assert 0 <= answer["savings"] <= 100
        assert ("why" in answer) == (answer["trust"] == "no")
    data = load(run)
    trust, satisfaction, _, why = data.spec.variables
    assert sum(data.words(trust).count(w) for w in ("yes", "no", "it depends")) == 200
    assert len(data.numbers(satisfaction)) == 200
    assert len(data.words(why)) == sum(a["trust"] == "no" for a in answers)
    assert outcome.rows[0].values["questionnaires"] == 200


async def test_a_survey_of_nobody(services: Services) -> None:
    outcome, run = await kind(
        services,
        "survey/scenario.yaml",
        agents__count=3000,
        params__respondents="random",
        models__default={"backend": "scripted"},
    )
    assert outcome.rows[0].tokens == 0
    data = load(run)
    assert data.numbers(data.spec.variables[1]).mean() == pytest.approx(5, abs=0.3)


async def test_questions_that_are_not_answered_stand_apart(
    services: Services, endpoint: Endpoint
) -> None:
    from tests.endpoint import answer

    def respond(body: dict[str, Any]) -> Any:
        asked = json.dumps(body["messages"][-1])
        return answer('{"answer": "yes"}' if "trusted?" in asked else "I can't say.")

    endpoint.respond = respond
    _, run = await kind(
        services, "survey/scenario.yaml", agents__count=5, models__default=openai(endpoint)
    )
    for text in run.to_arrow()["answer"].to_pylist():
        assert json.loads(text) == {"trust": "yes", "satisfaction": None, "savings": None}


async def test_bounded_confidence_comes_to_one_opinion(services: Services) -> None:
    """Deffuant et al. 2000: from half the scale on one cluster is left, and means are conserved."""
    outcome, _ = await kind(services, "opinions/baseline.yaml")
    means = values(outcome, "mean")
    assert means == pytest.approx([means[0]] * len(means), abs=1e-9)
    assert values(outcome, "spread")[-1] < 0.5
    assert values(outcome, "clusters")[-1] == 1
    assert means[0] == pytest.approx(50, abs=4 * 100 / math.sqrt(12 * 1000))


async def test_less_confidence_leaves_several_opinions(services: Services) -> None:
    outcome, _ = await kind(
        services, "opinions/baseline.yaml", params__confidence=10, rounds=120, agents__count=300
    )
    assert 3 <= values(outcome, "clusters")[-1] <= 6  # about 1 / (2 * 0.1), small ones left out


async def test_public_goods_by_rule(services: Services) -> None:
    punished, run = await kind(services, "public_goods/baseline.yaml")
    free, _ = await kind(services, "public_goods/baseline.yaml", params__punishment=False)
    assert values(free, "paid")[0] > values(free, "paid")[-1]  # cooperation decays
    assert values(punished, "paid")[-1] > values(punished, "paid")[0]  # unless it is enforced
    assert values(free, "points") == [0] * 10
    # Incomes are what the rules say: 20 - paid + 0.4 * sum, less points given and received.
    rows = [json.loads(r["answer"]) for r in run.to_arrow().to_pylist() if r["round"] == 1]
    group = rows[:4]
    total = sum(r["paid"] for r in group)
    before = [20 - r["paid"] + 0.4 * total for r in group]
    given = sum(r["points"] for r in group)
    assert sum(r["income"] for r in group) == pytest.approx(sum(before) - 4 * given)


async def test_groups_of_public_goods_leave_nobody_out(services: Services) -> None:
    outcome, _ = await kind(
        services, "public_goods/baseline.yaml", agents__count=11, rounds=2, agents__workers=3
    )
    assert [row.answers for row in outcome.rows] == [11, 11]


async def test_deliberation_by_rule(services: Services) -> None:
    outcome, _ = await kind(services, "deliberation/baseline.yaml")
    ranges = values(outcome, "range_within_rooms")
    for before, after in itertools.pairwise(ranges):
        assert after == pytest.approx(0.7 * before)
    means = values(outcome, "mean")
    assert means == pytest.approx([means[0]] * 4)


async def test_speakers_hear_who_spoke_before(services: Services, endpoint: Endpoint) -> None:
    from tests.endpoint import answer

    def respond(body: dict[str, Any]) -> Any:
        if "response_format" in body or "0 to 10" in json.dumps(body["messages"][-1]):
            return answer('{"support": 5, "reason": "so"}')
        return answer("I have spoken.")

    endpoint.respond = respond
    await kind(
        services,
        "deliberation/scenario.yaml",
        agents__count=6,
        agents__personas=None,
        params__room=3,
        models__default=openai(endpoint),
    )
    asked = [body["messages"][-1]["content"] for body in endpoint.requests]
    heard = sorted(text.count("I have spoken.") for text in asked if "it is your turn" in text)
    assert heard == [0, 0, 1, 1, 2, 2]
    summed = [text for text in asked if "Sum up" in text]
    assert [text.count("I have spoken.") for text in summed] == [3, 3]
    votes = [b["messages"] for b in endpoint.requests if "0 to 10" in str(b["messages"][-1])]
    assert sum("The moderator sums up" in json.dumps(m) for m in votes) == 6


async def test_a_rumour_leaves_a_fifth_out(services: Services) -> None:
    """Maki and Thompson's model: a share of 0.203 never hears it."""
    outcome, _ = await kind(
        services, "rumour/baseline.yaml", agents__count=4000, rounds=45, params__first=10
    )
    assert values(outcome, "spreaders")[-1] == 0
    left = values(outcome, "ignorants")[-1] / 4000
    assert left == pytest.approx(0.203, abs=0.03)


async def test_a_correction_stops_a_rumour(services: Services) -> None:
    correction = {"round": 4, "name": "correction", "data": {"text": "It is not so.", "share": 1.0}}
    stopped, run = await kind(
        services, "rumour/baseline.yaml", params__first=10, rounds=8, events=[correction]
    )
    free, _ = await kind(services, "rumour/baseline.yaml", params__first=10, rounds=8)
    assert values(stopped, "ignorants")[:3] == values(free, "ignorants")[:3]
    assert values(stopped, "spreaders")[3:] == [0] * 5
    assert values(stopped, "ignorants")[-1] > values(free, "ignorants")[-1]
    assert run.manifest["events"][0]["name"] == "correction"


async def test_a_judge_finds_who_is_out_of_character(
    services: Services, endpoint: Endpoint
) -> None:
    from tests.endpoint import answer

    def respond(body: dict[str, Any]) -> Any:
        asked = json.dumps(body["messages"])
        if "You check role play" in asked:
            out = "elementary school" in asked
            return answer(json.dumps({"reason": "<b>too clever</b>", "contradicts": out}))
        return answer("My number is 20, by iterated elimination of dominated strategies.")

    endpoint.respond = respond
    model = openai(endpoint)
    _, run = await kind(
        services,
        "guess_average/scenario.yaml",
        agents__count=40,
        agents__personas="education",
        rounds=1,
        models__default=model,
    )
    spec = judging(run, [f"{key}={value}" for key, value in model.items()], 40, 0)
    outcome = await play(services, spec.model_dump(mode="json", exclude_none=True))
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert outcome.rows[0].values == {"judged": 40, "contradict": 8}
    note_judged(run.folder, outcome.run)
    page = Report("t", [("t", load(run))], runs_dir=run.folder.parent).html()
    assert "8 of 40 answers that were judged contradict their persona" in page
    assert model["model"] in page
    assert "&lt;b&gt;too clever" in page
    assert "education: elementary school" in page
    # The default judge is the model that was asked; without personas there is nothing to judge.
    assert judging(run, None, 5, 0).models["default"].model == model["model"]
    _, nobody = await kind(services, "guess_average/dummy.yaml", agents__count=5, rounds=1)
    with pytest.raises(InvalidInputError, match="have no personas"):
        judging(nobody, None, 5, 0)


async def test_a_member_that_fails_holds_nobody_up(services: Services, endpoint: Endpoint) -> None:
    """One of four gets no usable answer in the first period; the others play both periods."""
    from tests.endpoint import answer

    refusals = iter([True])

    def respond(body: dict[str, Any]) -> Any:
        if "How many tokens" not in json.dumps(body["messages"]):
            return answer('{"points": [0, 1, 0]}')
        return answer("no") if next(refusals, False) else answer('{"tokens": 10}')

    endpoint.respond = respond
    outcome, _ = await kind(
        services,
        "public_goods/scenario.yaml",
        agents__count=4,
        rounds=2,
        models__default={**openai(endpoint), "concurrency": 1, "repair": False},
    )
    assert [row.failed for row in outcome.rows] == [1, 0]
    assert [row.answers for row in outcome.rows] == [3, 4]
    assert all(row.seconds < 20 for row in outcome.rows)
    assert values(outcome, "paid") == [10, 10]


@pytest.mark.parametrize("agents", [1, 5, 6, 11, 16])
async def test_nobody_sits_alone_and_nobody_is_left_out(services: Services, agents: int) -> None:
    outcome, _ = await kind(services, "deliberation/baseline.yaml", agents__count=agents, rounds=2)
    assert [row.answers for row in outcome.rows] == [agents, agents]
    if agents > 1:
        before, after = values(outcome, "range_within_rooms")
        assert after == pytest.approx(0.7 * before)  # in every room, each member once


async def test_parameters_change_in_the_middle_of_a_game(
    services: Services, endpoint: Endpoint
) -> None:
    from tests.endpoint import answer

    endpoint.respond = lambda _: answer("30")
    event = {"round": 2, "name": "params", "data": {"target.ratio": "1/2"}}
    outcome, _ = await kind(
        services,
        "guess_average/dummy.yaml",
        agents__count=3,
        rounds=2,
        events=[event],
        models__default=openai(endpoint),
    )
    assert values(outcome, "winning") == pytest.approx([20.0, 15.0])
    told = [body["messages"][0]["content"] for body in endpoint.requests]
    assert sum("The target is 2/3 of" in text for text in told) == 3
    assert sum("The target is 1/2 of" in text for text in told) == 3
