"""Agents with a process each: forked, called like any other, and ended with their run."""

from __future__ import annotations

import asyncio
import os
import time

import psutil
import pytest

import populace
from populace.errors import PlacementError, WorkerLostError
from populace.world import open_world
from tests.conftest import Services, unique, wait_until
from tests.populace.sample import Echo, Odd, Voter


async def test_each_has_a_process_of_its_own(distributed: populace.World) -> None:
    shared = await distributed.population(Voter, count=12)
    isolated = await distributed.population(Voter, count=12, name="apart", isolated=True)
    assert len(set(await shared.pid())) == 2
    pids = list(await isolated.pid())
    assert len(set(pids)) == 12
    assert os.getpid() not in pids
    assert [row[0] for row in await isolated.row()] == list(range(12))
    assert sum(s.agents for s in await distributed.worker_stats()) == 24
    # They call one another like all others.
    a = Echo("a", 0.05).to_dist(distributed)
    people = await distributed.population(Echo, "p", count=3, isolated=True)
    assert list(await people.reply(a.reply("x"))) == ["x>a>p"] * 3


async def test_the_same_random_numbers(services: Services) -> None:
    drawn = []
    for isolated in (False, True):
        async with open_world(
            services.settings(), services.broker.url, run=unique("w"), seed=5, workers=1
        ) as world:
            voters = await world.population(Voter, count=6, isolated=isolated)
            drawn.append(list(await voters.draw()))
    assert drawn[0] == drawn[1]


async def test_they_end_with_their_run(services: Services) -> None:
    async with open_world(
        services.settings(), services.broker.url, run=unique("w"), seed=5, workers=1
    ) as world:
        voters = await world.population(Voter, count=5, isolated=True)
        pids = list(await voters.pid())
    await wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


async def test_one_that_is_killed_leaves_the_others(distributed: populace.World) -> None:
    voters = await distributed.population(Voter, count=6, isolated=True)
    pids = list(await voters.pid())
    waiting = voters[2].wait(30.0)
    await asyncio.sleep(0.1)
    began = time.monotonic()
    psutil.Process(pids[2]).kill()
    with pytest.raises(WorkerLostError, match="killed by signal 9"):
        await waiting
    assert time.monotonic() - began < 2
    left = await voters.pid()
    assert sorted(left.errors) == [2]
    assert [pid for i, pid in enumerate(left.values) if i != 2] == [*pids[:2], *pids[3:]]


async def test_no_room(distributed: populace.World) -> None:
    with pytest.raises(PlacementError, match="the hosts have room for"):
        await distributed.population(Voter, count=50_000, isolated=True)
    odd = await distributed.population(Odd, count=2)  # the run goes on
    assert list(await odd.half(2)) == [1.0, 1.0]


async def test_in_one_process_it_means_the_same() -> None:
    async with populace.local(workers=2, seed=5) as world:
        voters = await world.population(Voter, count=6, isolated=True)
        assert [row[0] for row in await voters.row()] == list(range(6))


async def test_the_nursery_can_be_killed(distributed: populace.World, services: Services) -> None:
    voters = await distributed.population(Voter, count=4, isolated=True)
    pids = list(await voters.pid())
    nursery = psutil.Process(pids[0]).parent()
    assert nursery is not None
    assert "populace.workers.nursery" in nursery.cmdline()
    nursery.kill()
    await wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    results = await voters.pid()
    assert {error.kind for error in results.errors.values()} == {"worker_lost"}
    assert len(results.errors) == 4
    # All workers of the host were its children; the next run has another nursery.
    with pytest.raises(PlacementError, match="killed by signal 9"):
        await distributed.population(Voter, count=4, name="again", isolated=True)
    async with open_world(
        services.settings(), services.broker.url, run=unique("w"), seed=5, workers=1
    ) as world:
        again = await world.population(Voter, count=4, isolated=True)
        assert len(set(await again.pid())) == 4
