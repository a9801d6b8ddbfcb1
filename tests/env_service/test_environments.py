"""Environments: state, calls, nesting, events and listeners; in one process and as services."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import nats
import pytest

import populace
from populace import AgentError, Event, InvalidInputError
from tests.conftest import Services, eventually, wait_until
from tests.env_service.worlds import Actor, Room, Table


async def test_attributes(world: populace.World) -> None:
    table = await world.environment(Table, "table", 5)
    assert table.path == "table"
    assert await table.get("count") == 5
    assert await table.get("winning") is None
    await table.set("winning", 3.5)
    assert await table.get("winning") == 3.5
    assert await table.increment("count") == 6
    assert await table.increment("count", by=4) == 10
    assert await table.compare_and_set("count", 10, 11) is True
    assert await table.compare_and_set("count", 10, 12) is False
    assert await table.get("count") == 11
    told = await table.describe()
    assert (told["path"], told["class"]) == ("table", "Table")
    assert told["attributes"] == {"count": "int", "log": "list", "winning": "float"}
    assert "announce(winning)" in told["events"]
    assert "note(what)" in told["methods"]
    assert "increment(name, by=1)" in told["methods"]
    assert not any(
        m.startswith(("snapshot", "restore", "sleep", "listen")) for m in told["methods"]
    )
    with pytest.raises(AgentError, match="no method 'restore' that can be called"):
        await world._caller.call("@table", 0, "table", "restore", ({},), {})


async def test_what_goes_wrong_is_told_to_the_caller(world: populace.World) -> None:
    table = await world.environment(Table, "table")
    for call, reason in (
        (table.get("cuont"), r"table has no attribute 'cuont' \(it has: count, log, winning\)"),
        (table.set("_shard", 1), "no attribute '_shard'"),
        (table.increment("log"), r"table.log is \[\], not a number"),
        (table.fail("x"), "no such luck"),
        (table.unsendable(), "can't be sent"),
    ):
        with pytest.raises(AgentError, match=reason):
            await call
    with pytest.raises(AgentError, match="can't be sent"):
        await table.note(object())
    with pytest.raises(AttributeError, match="no method 'vote'"):
        table.vote()
    for path, reason in (
        ("table", "there is an environment at 'table' already"),
        ("nowhere.room", "there is none at 'nowhere'"),
        ("a b", "every name in it"),
        ("a..b", "every name in it"),
        (".".join("abcdefghij"), "nest at most 8 deep"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            await world.environment(Table, path)
    with pytest.raises(InvalidInputError, match="already"):
        await world.environment(Room, "table")
    actors = await world.population(Actor, count=1)
    with pytest.raises(AgentError, match=r"no environment at 'tabel' \(there are: table\)"):
        await actors[0].add("tabel", 1)
    # Unharmed.
    assert await table.seen() == ["x"]
    assert await table.increment("count") == 1


async def test_no_increment_is_lost(world: populace.World) -> None:
    table = await world.environment(Table, "table")
    actors = await world.population(Actor, count=50)
    await actors.add("table", 20)
    assert await table.get("count") == 1000
    await actors.add_slowly("table", 3)
    assert await table.get("count") == 1150


async def test_one_at_a_time_but_readers_pass(world: populace.World) -> None:
    table = await world.environment(Table, "table", 7)
    slow = [table.slowly("a", 2.0), table.slowly("b", 0.01)]
    await eventually(table.get, [["begin", "a"]], "log")
    assert await table.peek() == 7
    assert not slow[0].done()
    assert await table.note("c") == 5
    await asyncio.gather(*slow)
    assert await table.seen() == [["begin", "a"], ["end", "a"], ["begin", "b"], ["end", "b"], "c"]


async def test_waiting_for_one_another(world: populace.World) -> None:
    await world.environment(Table, "table")
    actors = await world.population(Actor, count=20)
    assert list(await actors.meet("table", 20)) == [20] * 20


async def test_environments_within_environments(world: populace.World) -> None:
    hall = await world.environment(Room, "hall")
    east = await hall.child(Room, "east")
    await world.environment(Room, "hall.west")
    assert "hall.east.nook" in await east.open("nook")
    assert await east.where() == ("hall.east", "hall")
    assert await hall.where() == ("hall", None)
    assert (await hall.describe())["children"] == ["east", "west"]
    assert await hall.tell_all("hello") == 4
    with pytest.raises(AgentError, match=r"'hall\.east\.nook' already"):
        await east.open("nook")
    actors = await world.population(Actor, count=2)
    await actors[0].say("hall.east.nook", "psst")
    assert await actors[1].hear("hall.east.nook") is None


async def test_events_reach_those_who_listen(world: populace.World) -> None:
    hall = await world.environment(Room, "hall")
    rooms = [await hall.child(Room, f"r{i}") for i in range(3)]
    actors = await world.population(Actor, count=6)
    told: list[Event] = []
    everything = await world.listen(hall, "*", told.append, below=True)
    await asyncio.gather(*(actors[i].hear(f"hall.r{i % 3}", "say") for i in range(6)))
    for i, room in enumerate(rooms):
        await room.say(f"in {i}")
    await hall.say("in the hall")
    await actors[5].say("hall.r2", "from five")
    await wait_until(lambda: len(told) == 5)
    assert [e.path for e in told if e.by == "actor/5"] == ["hall.r2"]
    assert told[0].arguments == {"text": "in 0"}
    expected = [[("say", f"hall.r{i}", {"text": f"in {i}"})] for i in range(3)]
    expected[2].append(("say", "hall.r2", {"text": "from five"}))

    async def heard() -> list[Any]:
        return [await actors[i].heard() for i in range(6)]

    async with asyncio.timeout(10):
        while (found := await heard()) != [*expected, *expected]:
            await asyncio.sleep(0.02)
    assert found == [*expected, *expected]
    await everything.remove()
    await hall.say("nobody listens")
    await rooms[0].say("but actors do")
    async with asyncio.timeout(10):
        while len(await actors[0].heard()) < 2:
            await asyncio.sleep(0.02)
    assert len(told) == 5


async def test_conditions_are_looked_at_at_the_source(world: populace.World) -> None:
    table = await world.environment(Table, "table")
    actors = await world.population(Actor, count=2)
    high: list[float] = []
    await world.listen(table, "announce", lambda e: high.append(e["winning"]), when="winning > 10")
    await actors[1].hear("table", "announce", when="winning > 20 and round == 0")
    for winning in (5.0, 15.0, 25.0):
        await table.announce(winning)
    await wait_until(lambda: len(high) == 2)
    assert high == [15.0, 25.0]
    async with asyncio.timeout(10):
        while not await actors[1].heard():
            await asyncio.sleep(0.02)
    assert await actors[1].heard() == [("announce", "table", {"winning": 25.0})]
    for when in ("winning >", "__import__('os').system('true')", "().__class__"):
        listener = world.listen(table, "announce", high.append, when=when)
        if when == "winning >":
            with pytest.raises(InvalidInputError, match="can't be read"):
                await listener
        else:
            await listener  # evaluated, it fails, and is told in the log alone
    await table.announce(30.0)
    await wait_until(lambda: len(high) == 3)


async def test_listeners_that_raise_or_leave(world: populace.World) -> None:
    table = await world.environment(Table, "table")
    actors = await world.population(Actor, count=3)
    await actors[0].hear_and_raise("table")
    await actors[1].hear_once("table")
    await actors[2].hear("table", "announce")
    for winning in (1.0, 2.0, 3.0):
        assert await table.announce(winning) == f"winning is {winning}"
    async with asyncio.timeout(10):
        while len(await actors[2].heard()) < 3:
            await asyncio.sleep(0.02)
    assert [e[2]["winning"] for e in await actors[1].heard()] == [1.0]
    assert await actors[0].heard() == []
    async with asyncio.timeout(10):
        while sum(s.listener_failures for s in await world.worker_stats()) < 3:
            await asyncio.sleep(0.02)
    assert await table.get("winning") == 3.0


async def test_an_event_storm_ends(world: populace.World, caplog: Any) -> None:
    table = await world.environment(Table, "table")
    actors = await world.population(Actor, count=1)
    await actors[0].echo_for_ever("table")
    await table.trigger(0)
    async with asyncio.timeout(10):
        while len(await actors[0].heard()) < 16:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)  # more would come now
    assert len(await actors[0].heard()) == 16
    assert await table.note("alive") == 1


async def test_outside_programs_listen(services: Services, distributed: populace.World) -> None:
    hall = await distributed.environment(Room, "hall")
    room = await hall.child(Room, "room")
    client = await nats.connect(services.broker.url)
    subjects = services.settings().subjects
    plain = await client.subscribe(subjects.env_event(distributed.run, "say", "hall.>"))
    request = {"path": "hall", "below": True, "when": "'secret' in text", "format": "json"}
    reply = await client.request(
        subjects.run_owner(distributed.run, "listen"), json.dumps(request).encode(), timeout=5
    )
    subject = json.loads(reply.data)["subject"]
    chosen = await client.subscribe(subject)
    await client.flush()
    await room.say("a secret")
    await room.say("nothing")
    assert json.loads((await chosen.next_msg(5)).data)["arguments"] == {"text": "a secret"}
    for _ in range(2):
        message = await plain.next_msg(5)
        assert message.subject.endswith(".event.say.hall.room")
    with pytest.raises(nats.errors.TimeoutError):
        await chosen.next_msg(0.2)
    bad = await client.request(
        subjects.run_owner(distributed.run, "listen"), b'{"path": "hall", "when": "1 +"}', timeout=5
    )
    assert "can't be read" in json.loads(bad.data)["error"]
    await client.close()


async def test_random_numbers_of_environments(services: Services) -> None:
    drawn = []
    for _ in range(2):
        async with populace.local(seed=3) as world:
            table = await world.environment(Table, "table")
            drawn.append([await table.draw() for _ in range(3)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3
