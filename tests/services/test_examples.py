"""The example scenarios, played for real: what they print makes sense, and repeats."""

from __future__ import annotations

import math
from typing import Any

import pyarrow.parquet as pq
import pytest

from populace.runs import Outcome
from populace.scenario_file import read_scenario
from tests.conftest import ROOT, Services
from tests.services.test_runs import play


async def example(services: Services, name: str, **overrides: Any) -> Outcome:
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    spec = read_scenario(ROOT / "examples" / name, changes).spec
    outcome = await play(services, spec.model_dump(mode="json", exclude_none=True))
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert all(row.failed == 0 for row in outcome.rows), outcome.rows[0].example
    return outcome


def values(outcome: Outcome) -> list[dict[str, Any]]:
    return [row.values for row in outcome.rows]


async def test_chat_room(services: Services) -> None:
    outcome = await example(services, "chat_room/scenario.yaml")
    assert [row.answers for row in outcome.rows] == [200] * 3
    assert [v["posts"] for v in values(outcome)] == [200, 400, 600]
    assert [v["present"] for v in values(outcome)] == [200] * 3
    assert "My number today is" in values(outcome)[0]["last"]


@pytest.mark.parametrize("workers", [1, 3])
async def test_auction(services: Services, workers: int) -> None:
    outcome = await example(services, "auction/scenario.yaml", agents__workers=workers)
    rows = values(outcome)
    assert [row["kind"] for row in rows] == ["open", "sealed", "second_price"]
    for row in rows:
        assert row["price"] <= row["highest_worth"]
    # Whatever the number of workers; the highest worth wins where all bid alike.
    assert [row["winner"] for row in rows] == ["open/10", "sealed/10", "second_price/19"]
    assert [row["price"] for row in rows] == [98.0, 82.9, 97.86]


async def test_town_map(services: Services) -> None:
    outcome = await example(services, "town_map/scenario.yaml")
    for row in values(outcome):
        assert 0 < row["in_sight"] < 20
        assert 0 < row["at_the_market"] < 60


async def test_market_day(services: Services) -> None:
    outcome = await example(services, "market_day/scenario.yaml")
    rows = values(outcome)
    assert [row["deliveries"] for row in rows] == [0, 1, 0, 0, 1, 0]
    bread = 2.0
    sold = 0
    for row in rows:
        bread = max(1.0, bread - 0.5 * row["deliveries"]) + 0.01 * (row["sold"] - sold)
        sold = row["sold"]
        assert row["bread"] == pytest.approx(bread)


@pytest.mark.parametrize("workers", [1, 2])
async def test_social_feed(services: Services, workers: int) -> None:
    outcome = await example(services, "social_feed/scenario.yaml", agents__workers=workers)
    rows = values(outcome)
    assert [row["posts"] for row in rows] == [33, 57, 73]
    assert rows[0]["clustering"] == 0.417


@pytest.mark.parametrize("workers", [1, 3])
async def test_the_guess_game_in_groups(services: Services, workers: int) -> None:
    outcome = await example(
        services,
        "guess_average/dummy.yaml",
        agents__count=103,
        agents__groups=4,
        agents__workers=workers,
        rounds=3,
    )
    table = pq.read_table(services.runs / outcome.run / "answers.parquet").to_pylist()
    for row in outcome.rows:
        guesses = [r["value"] for r in table if r["round"] == row.round]
        assert len(guesses) == 103
        means, start = [], 0
        for size in (26, 26, 26, 25):
            means.append(math.fsum(guesses[start : start + size]) / size)
            start += size
        assert row.values["groups"] == ", ".join(f"{mean:.1f}" for mean in means)
        # Of the groups' numbers, not of all players': each group counts once.
        assert row.values["winning"] == pytest.approx(sum(means) / 4 * 2 / 3)
        assert row.values["winning"] != pytest.approx(row.values["mean"] * 2 / 3, rel=1e-6)
        distances = [abs(mean - row.values["winning"]) for mean in means]
        assert row.values["best_group"] == distances.index(min(distances)) + 1
    # The announcements were part of what models were asked from the second round on.
    assert outcome.rows[1].tokens > outcome.rows[0].tokens + 103 * 20
