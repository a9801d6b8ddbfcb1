"""Calls applied in agent order: the same on any number of workers, whatever the timing."""

from __future__ import annotations

import asyncio

import pytest

import populace
from populace import InvalidInputError
from populace._runtime import waves
from populace.world import open_world
from tests.conftest import Services, unique
from tests.env_service.worlds import Customer, Queue


async def shopping(world: populace.World) -> tuple[list[int], list[list[int]]]:
    customers = await world.population(Customer, count=40)
    queue = await world.environment(Queue, "queue", order="agent", members=customers)
    places = []
    for number in (1, 2):
        world._caller.round = number
        places += list(await customers.shop("queue", 4))
    assert sum(map(len, places)) == len(await queue.taken()) > 40
    return await queue.taken(), places


async def test_the_same_on_any_number_of_workers(services: Services) -> None:
    found = []
    for workers in (1, 2, 3):
        async with open_world(
            services.settings(), services.broker.url, run=unique("w"), seed=5, workers=workers
        ) as world:
            found.append(await shopping(world))
    async with populace.local(seed=5, workers=2) as world:
        found.append(await shopping(world))
    assert all(one == found[0] for one in found)
    first_wave = found[0][0][: len(set(found[0][0]))]
    assert first_wave != list(range(len(first_wave)))  # some never came


async def test_by_arrival_unless_asked(world: populace.World) -> None:
    customers = await world.population(Customer, count=4)
    queue = await world.environment(Queue, "queue")
    assert (await customers.shop("queue", 3)).errors == {}
    assert await queue.take(99) == len(await queue.taken())
    for arguments, reason in (
        ({"order": "agent"}, "needs members="),
        ({"members": customers}, "needs members="),
        ({"order": "random"}, "must be one of arrival, agent"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            await world.environment(Queue, "other", **arguments)


async def test_members_that_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """They can't all be waited for; it goes on all the same, and says so."""
    monkeypatch.setattr(waves, "_PATIENCE", 0.3)
    async with populace.local(workers=2) as world:
        customers = await world.population(Customer, count=4)
        queue = await world.environment(Queue, "queue", order="agent", members=customers)
        async with asyncio.timeout(20):
            await customers.shop_together("queue", populace.each([1, -1, 3, -1]))
        assert sorted(await queue.taken()) == [1, 1, 3, 3]
