"""Where time goes: the parts that are measured, and their sums."""

from __future__ import annotations

import asyncio
import time

import pytest

import populace
from populace._runtime.profile import Profile, TimedCodec, summarise
from populace.world import open_world
from tests.conftest import Services, unique
from tests.populace.sample import Echo, Gate, Voter
from tests.services.games import Member


def test_a_codec_counts_its_time_once() -> None:
    profile = Profile()
    codec = TimedCodec(None, profile)
    value = {"a": (1, (2, (3, {4, 5}))), "b": ["x" * 1000] * 1000}
    began = time.perf_counter()
    for _ in range(20):
        assert codec.unpack(codec.pack(value)) == value
    assert 0 < profile.coding <= time.perf_counter() - began


async def test_the_parts_of_a_call(services: Services) -> None:
    async with open_world(
        services.settings(), services.broker.url, run=unique("w"), seed=1, workers=1, profile=True
    ) as world:
        voters = await world.population(Voter, count=50)
        await voters.wait(0.2)
        first = await world.profile()
        assert first is not None
        assert first["call"]["calls"] == 100  # the constructors' among them
        assert 0.09 < first["call"]["other waits"] < 0.3
        assert first["call"]["model"] == 0
        gate = Gate(0.05).to_dist(world)
        await asyncio.gather(*(gate.work(i) for i in range(10)))
        second = await world.profile()
        assert second is not None
        work = second["processes"]["workers (1)"]["agents' own code"]
        assert 0.5 < work < 1.5
        # The tenth call waited for nine others.
        queued = second["call"]["queue at the worker"] * second["call"]["calls"]
        assert queued > 0.05 * 45 * 0.9 - 1
        for row in second["processes"].values():
            parts = sum(row.values()) - row["seconds"]
            assert parts == pytest.approx(row["seconds"], rel=0.05, abs=0.05)
        assert 0 < second["call"]["broker, to the worker"] < 0.5
        assert 0 < second["call"]["broker, back"] < 0.5


async def test_models_are_told_apart() -> None:
    spec = populace.ModelSpec(backend="scripted", script={"latency": 0.1}, concurrency=5)
    async with populace.local(models={"default": spec}, profile=True) as world:
        members = await world.population(Member, count=10)
        began = time.monotonic()
        await members.say()
        passed = time.monotonic() - began
        found = await world.profile()
        assert found is not None
        calls = found["call"]["calls"]
        # Five at once, twice: a slow machine makes all of it longer.
        assert 10 * 0.1 * 0.95 <= found["call"]["model"] * calls <= 5 * passed * 1.05
        assert 5 * 0.1 * 0.9 <= found["call"]["queue for a model"] * calls <= 10 * passed * 0.6


async def test_nothing_is_measured_unasked(world: populace.World) -> None:
    await Echo("a").to_dist(world).reply("x")
    assert await world.profile() is None
    assert all(s.profile is None for s in await world.worker_stats())


def test_sums_of_nothing() -> None:
    nothing = {"wall": 0.0, "cpu": 0.0, "came": 0, "came_back": 0.0, "work": 0.0, "coding": 0.0}
    found = summarise([], nothing)
    assert found["call"]["calls"] == 0
    assert set(found["processes"]["player"].values()) == {0.0}
