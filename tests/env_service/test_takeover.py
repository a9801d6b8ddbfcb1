"""Environments whose process is killed: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import psutil
import pytest

import populace
from populace import Event
from populace.errors import WorkerLostError
from populace.world import open_world
from shared.bus import NatsBus
from tests.conftest import Services, unique, wait_until
from tests.env_service.worlds import Actor, Room, Table


async def two_homes(world: populace.World) -> tuple[Any, Any]:
    """Two tables, in different processes."""
    first = await world.environment(Table, "first")
    second = await world.environment(Table, "second")
    assert await first.pid() != await second.pid()
    return first, second


async def test_a_worker_process_killed_under_calls(
    services: Services, another: object, distributed: populace.World
) -> None:
    first, second = await two_homes(distributed)
    actors = await distributed.population(Actor, count=20)
    for table in (first, second):
        await table.note("before")
    pid = await first.pid()
    adding = [actors.add_slowly(path, 200) for path in ("first", "second")]
    await asyncio.sleep(0.15)
    psutil.Process(pid).kill()
    for answers in adding:
        assert list(await asyncio.wait_for(answers, 60)) == [200] * 20
    assert distributed._keeping._kept["first"].epoch == 2
    assert await first.get("count") == 4000
    assert await second.get("count") == 4000
    assert await first.seen() == ["before"]
    assert await first.note("after") == 2


async def test_an_environment_service_killed(
    services: Services, another: subprocess.Popen[bytes], distributed: populace.World
) -> None:
    tables = await two_homes(distributed)
    children = {child.pid for child in psutil.Process(another.pid).children(recursive=True)}
    pids = [await table.pid() for table in tables]
    (doomed,) = [i for i, pid in enumerate(pids) if pid in children]
    actors = await distributed.population(Actor, count=20)
    path = tables[doomed].path
    told: list[Event] = []
    await distributed.listen(tables[doomed], "announce", told.append)
    await tables[doomed].announce(1.0)
    answers = actors.add_slowly(path, 300)
    await asyncio.sleep(0.1)
    another.kill()
    assert list(await asyncio.wait_for(answers, 60)) == [300] * 20
    assert distributed._keeping._kept[path].epoch == 2
    assert await tables[doomed].get("count") == 6000
    assert await tables[doomed].get("winning") == 1.0
    assert await tables[doomed].pid() == pids[1 - doomed]
    await tables[doomed].announce(2.0)
    await wait_until(lambda: len(told) == 2)
    assert [(e.number, e["winning"]) for e in told] == [(1, 1.0), (2, 2.0)]


async def test_what_is_restored(
    services: Services, another: object, distributed: populace.World
) -> None:
    """Random numbers go on, outcomes of calls that waited are kept, those in wait are taken up."""
    table, _ = await two_homes(distributed)
    async with open_world(
        services.settings(), services.broker.url, run=unique("w"), seed=5, workers=1
    ) as undisturbed:
        same = await undisturbed.environment(Table, "first")
        expected = [await same.draw() for _ in range(4)]
    drawn = [await table.draw() for _ in range(2)]
    assert await table.slowly("x", 0.05) == 2
    assert await table.note("y") == 3
    meeting = [table.meet(f"m{i}", 6) for i in range(2)]  # three are missing
    await asyncio.sleep(0.3)
    psutil.Process(await table.pid()).kill()
    drawn += [await asyncio.wait_for(table.draw(), 30) for _ in range(2)]
    assert drawn == expected
    assert await table.seen() == [["begin", "x"], ["end", "x"], "y", "m0", "m1"]
    assert not any(call.done() for call in meeting)
    last = table.meet("m2", 6)
    async with asyncio.timeout(20):
        assert await last == 6
    assert await asyncio.gather(*meeting) == [6, 6]


@pytest.mark.parametrize("rest", [True, False])
async def test_a_journal_without_its_beginning(distributed: populace.World, rest: bool) -> None:
    """The broker has dropped the oldest: what follows from the rest alone never was."""
    table = await distributed.environment(Table, "table")
    await table.note("x")
    bus, subjects = distributed._bus, distributed._subjects
    pid = await table.pid()
    here = await bus.append(subjects.env_journal(distributed.run, "elsewhere"), b"")
    if rest:
        await table.note("y")
    journal = subjects.env_journal(distributed.run, "table")
    await bus.purge(subjects.stream_journal, journal, before=here)
    psutil.Process(pid).kill()
    with pytest.raises(WorkerLostError, match="its journal has lost its beginning"):
        await asyncio.wait_for(table.seen(), 60)


async def test_a_repeated_call_takes_effect_once(world: populace.World) -> None:
    table = await world.environment(Table, "table")
    actors = await world.population(Actor, count=3)
    assert sorted(await actors.note("table")) == [1, 2, 3]
    # The very same calls, as after a crash of the agents' process: same caller, round, number.
    actors_again = world._caller
    for number in range(3):
        key = [f"actor/{number}", "", 1]
        actors_again._key = lambda by, key=key: key  # type: ignore[method-assign,misc]
        assert await table.note(number) in (1, 2, 3)
    del actors_again._key
    assert sorted(await table.seen()) == [0, 1, 2]


async def test_durable_listeners_miss_nothing(
    services: Services, distributed: populace.World
) -> None:
    room = await distributed.environment(Room, "room")
    heard: list[str] = []
    first = await distributed.listen(
        room, "say", lambda e: heard.append(e["text"]), durable="diary"
    )
    await room.say("one")
    await wait_until(lambda: heard == ["one"])
    await first.remove()
    for text in ("two", "three", "four"):
        await room.say(text)
    assert heard == ["one"]
    await distributed.listen(room, "say", lambda e: heard.append(e["text"]), durable="diary")
    await room.say("five")
    await wait_until(lambda: len(heard) == 5)
    assert heard == ["one", "two", "three", "four", "five"]


async def test_journals_go_with_their_run(services: Services) -> None:
    settings = services.settings()
    run = unique("w")
    async with open_world(settings, services.broker.url, run=run, seed=5, workers=1) as world:
        table = await world.environment(Table, "table")
        await table.note("x")
    bus = await NatsBus.connect(settings, services.broker.url)
    found = bus.replay(settings.subjects.stream_journal, (settings.subjects.env_journal(run, ">"),))
    assert await anext(found) is None
    await found.aclose()
    await bus.drain()


async def test_durable_listeners_of_agents(world: populace.World) -> None:
    room = await world.environment(Room, "room")
    actors = await world.population(Actor, count=2)
    await actors[0].hear("room", "say", durable=True)
    await asyncio.gather(*(room.say(f"{i}") for i in range(30)))
    async with asyncio.timeout(20):
        while len(await actors[0].heard()) < 30:
            await asyncio.sleep(0.02)
    assert [told[2]["text"] for told in await actors[0].heard()] == [str(i) for i in range(30)]
