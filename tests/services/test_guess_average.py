"""The guess game: baselines against theory, targets, what players are told."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from populace.recorded import results
from populace.runs import Outcome
from populace.scenario_file import read_scenario
from tests.conftest import ROOT, Services, unique
from tests.endpoint import Endpoint, answer
from tests.services.test_runs import play

FOLDER = ROOT / "examples" / "guess_average"


async def game(services: Services, **overrides: Any) -> Outcome:
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    spec = read_scenario(FOLDER / "dummy.yaml", changes).spec
    return await play(services, spec.model_dump(mode="json", exclude_none=True))


def column(outcome: Outcome, name: str) -> list[Any]:
    return [row.values[name] for row in outcome.rows]


@pytest.fixture
def modules() -> Iterator[dict[str, ModuleType]]:
    """The example's own modules, as workers see them."""
    import importlib

    names = ("rules", "baselines", "references", "prompts")
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


MANY = 100_000
ERROR = 100 / math.sqrt(12 * MANY)
"""Standard error of the mean of so many numbers, uniform from 0 to 100."""


@pytest.mark.parametrize("level", [0, 1, 2, 3])
async def test_level_k(services: Services, level: int) -> None:
    """A population of level k picks 50 (2/3)^k."""
    outcome = await game(
        services, agents__count=MANY, rounds=1, params__players={"kind": "level_k", "level": level}
    )
    (mean,) = column(outcome, "mean")
    expected = 50 * (2 / 3) ** level
    if level == 0:
        assert abs(mean - expected) < 4 * ERROR
    else:
        assert mean == pytest.approx(expected, rel=1e-12)
    assert column(outcome, "parsed") == [MANY]


async def test_level_k_goes_on_from_what_was_announced(services: Services) -> None:
    outcome = await game(
        services, agents__count=10, rounds=3, params__players={"kind": "level_k", "level": 2}
    )
    assert outcome.reason == ""
    steps = [50 * (2 / 3) ** k for k in (2, 4, 6)]
    assert column(outcome, "mean") == pytest.approx(steps)


async def test_a_cognitive_hierarchy(services: Services, modules: dict[str, ModuleType]) -> None:
    tau = 1.5
    outcome = await game(
        services,
        agents__count=MANY,
        rounds=1,
        params__players={"kind": "cognitive_hierarchy", "tau": tau},
    )
    shares = [math.exp(-tau) * tau**k / math.factorial(k) for k in range(40)]
    picks = [50.0]
    for k in range(1, 40):  # the best answer to the levels below, weighed as Poisson has them
        below = sum(f * x for f, x in zip(shares[:k], picks, strict=True)) / sum(shares[:k])
        picks.append(2 / 3 * below)
    expected = sum(f * x for f, x in zip(shares, picks, strict=True))
    (mean,) = column(outcome, "mean")
    # Level 0 is uniform, which scatters more than one number for each level would.
    spread = sum(f * x * x for f, x in zip(shares, picks, strict=True)) - expected**2
    spread += shares[0] * 100**2 / 12
    assert abs(mean - expected) < 4 * math.sqrt(spread / MANY)
    own = modules["baselines"].hierarchy(0.0, 2 / 3, 50.0, tau, 39)
    assert own == pytest.approx(picks)


@pytest.mark.parametrize(
    ("target", "limit"),
    [({"offset": 0, "ratio": "2/3"}, 0.0), ({"offset": 5, "ratio": "1/2"}, 10.0)],
)
async def test_best_response_converges(
    services: Services, target: dict[str, Any], limit: float
) -> None:
    outcome = await game(
        services,
        agents__count=MANY,
        rounds=8,
        params__target=target,
        params__players={"kind": "best_response"},
    )
    means = column(outcome, "mean")
    assert abs(means[0] - 50) < 4 * ERROR
    ratio = 2 / 3 if target["ratio"] == "2/3" else 0.5
    for before, after in itertools.pairwise(means):
        assert after == pytest.approx(target["offset"] + ratio * before)
    assert means[-1] - limit == pytest.approx((means[0] - limit) * ratio**7, rel=1e-9)
    distance = abs(means[-1] - column(outcome, "winning")[-1])
    assert column(outcome, "winners")[-1] == ({"BestResponse": MANY} if distance <= 0.5 else {})


async def test_the_offset_is_part_of_what_is_announced(
    services: Services, endpoint: Endpoint
) -> None:
    """The target is 5 + 1/2 of the mean, and so players are told."""
    endpoint.respond = lambda _: answer("30")
    outcome = await game(
        services,
        agents__count=4,
        rounds=2,
        params__target={"offset": 5, "ratio": "1/2"},
        models__default=openai(endpoint),
    )
    assert column(outcome, "winning") == [20.0, 20.0]
    asked = json.dumps(endpoint.requests[-1]["messages"])
    assert "5 plus 1/2 of the average" in asked
    assert "the winning number was 20.00" in asked


def openai(endpoint: Endpoint) -> dict[str, Any]:
    return {"backend": "openai", "base_url": endpoint.url, "model": unique("m")}


async def test_what_is_no_answer_never_enters_the_mean(
    services: Services, endpoint: Endpoint
) -> None:
    said = ["-1", "I can't pick a number.", "101", "40", "2/3 of the average", "20"]

    def respond(body: dict[str, Any]) -> Any:
        if "wrote the text between the lines" in json.dumps(body):
            return answer('{"number": null}')
        return answer(said[len(endpoint.requests) % len(said)])

    endpoint.respond = respond
    outcome = await game(
        services, agents__count=60, rounds=1, models__default={**openai(endpoint), "concurrency": 1}
    )
    (row,) = outcome.rows
    rows = results(outcome.run, services.settings()).to_arrow().to_pylist()
    good = [r["value"] for r in rows if r["error"] is None]
    assert set(good) == {20.0, 40.0}
    assert row.values["mean"] == pytest.approx(sum(good) / len(good))
    assert row.failures.keys() == {"out_of_range", "unparsable"}
    assert row.answers + row.failed == 60


async def test_each_model_has_its_winners_counted(services: Services) -> None:
    scripted = {"backend": "scripted"}
    outcome = await game(
        services,
        agents__count=90,
        rounds=1,
        models={
            "default": {"mixture": {"weights": {"low": 1, "middle": 1, "high": 1}}},
            "low": {**scripted, "script": {"text": "My number is 10."}},
            "middle": {**scripted, "script": {"text": "My number is 22.3."}},
            "high": {**scripted, "script": {"text": "My number is 67."}},
        },
    )
    (row,) = outcome.rows
    assert row.values["winning"] == pytest.approx((10 + 22.3 + 67) / 3 * 2 / 3)
    assert row.values["winners"] == {"middle": 30}  # within 0.5 of 22.07
    assert row.values["near"] == 30


async def test_the_members_of_a_group_ask_one_model(services: Services) -> None:
    scripted = {"backend": "scripted"}
    outcome = await game(
        services,
        agents__count=10,
        agents__groups=3,
        rounds=2,
        params__group_models=["low", "default", "high"],
        models={
            "default": {**scripted, "script": {"text": "My number is 30."}},
            "low": {**scripted, "script": {"text": "My number is 10."}},
            "high": {**scripted, "script": {"text": "My number is 67."}},
        },
    )
    assert outcome.state == "finished"
    for row in outcome.rows:
        assert row.values["groups"] == "10.0, 30.0, 67.0"
        assert row.values["winning"] == pytest.approx((10 + 30 + 67) / 3 * 2 / 3)
        assert row.values["best_group"] == 2


async def test_what_players_are_told(services: Services, endpoint: Endpoint) -> None:
    endpoint.respond = lambda _: answer("30")
    await game(
        services,
        agents__count=10,
        agents__personas="education",
        rounds=1,
        models__default=openai(endpoint),
        params__one_expert=True,
        params__variation=True,
        params__notes="adaptive",
        params__made_up_by="education",
    )
    asked = [body["messages"] for body in endpoint.requests if len(body["messages"]) > 1]
    assert len(asked) == 10
    rules = {messages[0]["content"].split("\n\n")[0] for messages in asked}
    (told,) = rules  # all are told the same, first
    assert "variation of a well-known game" in told
    assert "Ph.D.: 2" in told
    assert "adapt" in told
    experts = [m for m in asked if "You are the only expert" in m[-1]["content"]]
    assert len(experts) == 1


async def test_what_cannot_be_played(services: Services) -> None:
    outcome = await game(
        services, agents__count=10, agents__groups=2, params__players={"kind": "best_response"}
    )
    assert outcome.state == "failed"
    assert "without groups" in outcome.reason
    outcome = await game(services, agents__count=10, params__group_models=["default"])
    assert outcome.state == "failed"
    assert "there are no groups" in outcome.reason
