"""Agents' random numbers: fit for use, and a function of their identity alone."""

from __future__ import annotations

import itertools
import statistics

import pytest

from populace._random import AgentRandom, round_key, stream_key, stream_state


def test_streams_follow_from_seed_population_agent_and_round() -> None:
    states = {
        stream_state(round_key(stream_key(seed, population), round_number), agent)
        for seed in range(3)
        for population in ("a", "b")
        for agent in range(50)
        for round_number in range(5)
    }
    assert len(states) == 3 * 2 * 50 * 5
    assert AgentRandom(5).random() == AgentRandom(5).random()


def test_first_draws_of_neighbours_look_even() -> None:
    key = round_key(stream_key(1, "x"), 1)
    draws = [AgentRandom(stream_state(key, agent)).random() for agent in range(20_000)]
    assert abs(statistics.mean(draws) - 0.5) < 0.01
    assert abs(statistics.pvariance(draws) - 1 / 12) < 0.002
    pairs = list(itertools.pairwise(draws))
    assert abs(statistics.correlation(*zip(*pairs, strict=True))) < 0.03


def test_streams_of_neighbours_do_not_overlap() -> None:
    key = round_key(stream_key(1, "x"), 1)
    seen: set[int] = set()
    for agent in range(2000):
        source = AgentRandom(stream_state(key, agent))
        seen.update(source.getrandbits(64) for _ in range(20))
    assert len(seen) == 40_000


def test_the_usual_methods() -> None:
    source = AgentRandom(7)
    assert all(0 <= source.random() < 1 for _ in range(1000))
    assert {source.randint(1, 6) for _ in range(500)} == {1, 2, 3, 4, 5, 6}
    assert {source.randrange(0, 10, 5) for _ in range(50)} == {0, 5}
    assert {source.choice("abc") for _ in range(100)} == set("abc")
    assert sorted(source.sample(range(10), 10)) == list(range(10))
    items = list(range(20))
    source.shuffle(items)
    assert sorted(items) == list(range(20))
    assert items != list(range(20))
    assert set(source.choices("ab", [0, 1], k=20)) == {"b"}
    assert 5 <= source.uniform(5, 6) <= 6
    assert abs(statistics.mean(source.gauss(3, 1) for _ in range(5000)) - 3) < 0.1
    assert abs(statistics.mean(source.expovariate(2) for _ in range(5000)) - 0.5) < 0.05
    assert abs(statistics.mean(source.betavariate(2, 2) for _ in range(5000)) - 0.5) < 0.05
    assert source.gammavariate(2, 1) > 0
    assert source.lognormvariate(0, 1) > 0
    assert 0 <= source.triangular() <= 1
    assert 0 <= source.getrandbits(3) < 8
    assert source.getrandbits(200).bit_length() <= 200
    assert source.getrandbits(0) == 0


def test_nothing_to_choose_from() -> None:
    with pytest.raises(IndexError):
        AgentRandom(1).choice([])
    with pytest.raises(ValueError, match="empty range"):
        AgentRandom(1).randrange(0)
    with pytest.raises(ValueError, match="non-negative"):
        AgentRandom(1).getrandbits(-1)
