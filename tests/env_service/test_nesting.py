"""A world of regions and rooms over two processes: who hears what, counted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import nats

import populace
from shared.codec import from_public
from tests.conftest import Services
from tests.env_service.worlds import Actor, Room

REGIONS, ROOMS, AGENTS = 10, 10, 1000


async def test_events_go_where_they_should_and_nowhere_else(
    services: Services, another: object, distributed: populace.World
) -> None:
    world = distributed
    top = await world.environment(Room, "world")
    regions = await asyncio.gather(*(top.child(Room, f"g{i}") for i in range(REGIONS)))
    rooms = await asyncio.gather(
        *(region.child(Room, f"r{j}") for region in regions for j in range(ROOMS))
    )
    homes = Counter(kept.worker for kept in world._keeping._kept.values())
    assert len(homes) == 2
    assert max(homes.values()) - min(homes.values()) <= 1
    actors = await world.population(Actor, count=AGENTS)
    listening = await actors.hear(
        populace.each([rooms[i % len(rooms)].path for i in range(AGENTS)]), "say"
    )
    assert not listening.errors
    client = await nats.connect(services.broker.url)
    heard: list[Counter[str]] = [Counter() for _ in range(REGIONS)]
    subjects = services.settings().subjects
    for i in range(REGIONS):

        async def take(message: nats.aio.msg.Msg, i: int = i) -> None:
            heard[i][from_public(message.data)["path"]] += 1

        await client.subscribe(subjects.env_event(world.run, "*", f"world.g{i}.>"), cb=take)
    await client.flush()
    # Each room is spoken in as often as its number says; regions and the world say something too.
    said = {room.path: 1 + i % 3 for i, room in enumerate(rooms)}
    await asyncio.gather(
        *(room.say(f"{k}") for room in rooms for k in range(said[room.path])),
        *(region.say("to all") for region in regions),
        top.say("to everyone"),
    )
    expected = [said[rooms[i % len(rooms)].path] for i in range(AGENTS)]
    async with asyncio.timeout(30):
        while [len(events) for events in await actors.heard()] != expected:
            await asyncio.sleep(0.05)
    for i, events in enumerate(await actors.heard()):
        assert {path for _, path, _ in events} == {rooms[i % len(rooms)].path}
    async with asyncio.timeout(10):
        while sum(map(sum, (c.values() for c in heard))) < sum(said.values()):
            await asyncio.sleep(0.02)
    for i, counts in enumerate(heard):
        assert counts == {path: n for path, n in said.items() if path.startswith(f"world.g{i}.")}
    # Down through all levels, side by side; and up again.
    assert await top.tell_all("announcement") == 1 + REGIONS + REGIONS * ROOMS
    assert (await rooms[57].heard())[-1] == "announcement"
    assert json.loads(json.dumps(await top.describe()))["children"] == [
        f"g{i}" for i in range(REGIONS)
    ]
    await client.close()
