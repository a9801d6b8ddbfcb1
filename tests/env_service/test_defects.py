"""What once went wrong with environments: each of these was a defect before it was a test."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest

import populace
from populace import AgentError, InvalidInputError, event, readonly
from populace._runtime import flow, stage
from populace._runtime.flow import ANSWER_WINDOW
from tests.conftest import eventually, wait_until
from tests.env_service.worlds import Client, Ledger, Table
from tests.populace.sample import Odd


async def ledger_and_clients(world: populace.World, count: int) -> tuple[Any, Any]:
    ledger = await world.environment(Ledger, "ledger")
    return ledger, await world.population(Client, count=count)


async def test_calls_from_constructors_and_tasks_have_keys_of_their_own(
    world: populace.World,
) -> None:
    ledger = await world.environment(Ledger, "ledger")
    first = await world.population(Client, "ledger", count=6, name="first")
    second = await world.population(Client, count=4, name="second")
    await second.register_in_a_task("ledger")
    async with asyncio.timeout(10):
        while len(await ledger.get("clients")) < 10:
            await asyncio.sleep(0.02)
    assert sorted(await ledger.get("clients")) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5]
    assert len(first) == 6


async def test_handlers_of_an_earlier_round_take_no_ones_place(world: populace.World) -> None:
    ledger, clients = await ledger_and_clients(world, 1)
    table = await world.environment(Table, "table")
    await clients[0].hear("table")
    world._caller.round = 1
    await table.announce(0.2)
    await eventually(ledger.get, b"heard", "big")
    world._caller.round = 2
    assert await clients[0].inc() == 2
    async with asyncio.timeout(10):
        while await ledger.get("n") < 2:
            await asyncio.sleep(0.02)
    assert await clients[0].inc() == 3


async def test_environments_hear_every_event(world: populace.World) -> None:
    ledger = await world.environment(Ledger, "ledger")
    table = await world.environment(Table, "table")
    await ledger.hear("table")
    for i in range(4):
        await table.announce(float(i))
    async with asyncio.timeout(10):
        while len((await ledger.all())["heard"]) < 4:
            await asyncio.sleep(0.02)
    assert (await ledger.all())["heard"] == [0.0, 1.0, 2.0, 3.0]


async def test_answers_are_as_they_were(world: populace.World) -> None:
    ledger = await world.environment(Ledger, "ledger")
    answers = await asyncio.gather(*(ledger.register(i) for i in range(3)))
    assert answers == [[0], [0, 1], [0, 1, 2]]


async def test_waiting_behind_a_queue(world: populace.World) -> None:
    """What is waited for is true between two queued calls, and not after them."""
    ledger = await world.environment(Ledger, "ledger")
    waiting = ledger.wait_for(1)
    slow = ledger.inc_slowly(1, 0.05)
    queued = [ledger.set_x(1), ledger.set_x(2)]
    assert await asyncio.wait_for(waiting, 10) == 1
    await asyncio.gather(slow, *queued)
    assert (await ledger.all())["x"] == 2


async def test_readers_leave_no_trace(world: populace.World) -> None:
    ledger = await world.environment(Ledger, "ledger")
    other = await world.environment(Ledger, "other")
    expected = await other.draw()
    looks = {await ledger.look() for _ in range(3)}
    assert len(looks) == 1
    del expected  # another path, another stream
    assert await ledger.draw() in looks
    with pytest.raises(AgentError, match="can't tell of events"):
        await ledger.tell_secretly()
    with pytest.raises(InvalidInputError, match="both @event and @readonly"):
        readonly(event(lambda self: None))


async def test_an_environment_that_could_not_be_made_can_be_made(world: populace.World) -> None:
    with pytest.raises(AgentError):
        await world.environment(Table, "table", 1, 2, 3)
    table = await world.environment(Table, "table", 4)
    assert await table.peek() == 4


async def test_a_placeholder_whose_answer_is_being_journalled(world: populace.World) -> None:
    ledger = await world.environment(Ledger, "ledger")
    odd = Odd().to_dist(world)
    async with asyncio.timeout(4):  # a recap would come after five
        for _ in range(20):
            assert await odd.half(await ledger.inc(2)) > 0
            assert await odd.half(ledger.inc(2)) > 0


async def test_all_of_it_survives_a_kill(distributed: populace.World) -> None:
    """Two environments in one process, and all that is difficult to do again."""
    world = distributed
    ledger, clients = await ledger_and_clients(world, 2)
    other = await world.environment(Ledger, "other")
    same = await world.environment(Table, "same")
    assert len({await e.pid() for e in (ledger, other, same)}) == 1
    big = bytes(range(256)) * 10_000
    assert await ledger.put(big) == len(big)
    await ledger.register(clients[0])
    await ledger.notify("once")
    assert await ledger.forward("other") == 1
    await ledger.forward_blindly("other")
    released = ledger.wait_for(7)
    await ledger.set_slowly(7)
    assert await released == 1
    waiting = ledger.wait_for(9)
    given_up = ledger.wait_for(9)
    await asyncio.sleep(0.1)
    given_up.cancel()
    slow = ledger.inc_slowly(100, 20.0)
    await eventually(ledger.get, 100, "n")
    slow.cancel()
    await asyncio.sleep(0.1)
    assert await ledger.inc() == 101
    looked = await ledger.look()
    await other.hear("same")

    psutil.Process(await ledger.pid()).kill()

    async with asyncio.timeout(60):
        assert await ledger.size() == len(big)
        assert await ledger.inc() == 102
        assert await ledger.all() == {"n": 102, "grants": 1, "x": 7, "heard": []}
        assert await ledger.draw() == looked
        assert await clients[0].taken() == ["once"]
        await ledger.set_x(9)
        assert await waiting == 2
        assert (await ledger.all())["grants"] == 2
        # The next call to another environment is a new one, and so takes effect.
        assert await ledger.forward("other") == 3
        assert await other.inc() == 4
        # It still listens, as it did before.
        await same.announce(5.0)
        while (await other.all())["heard"] != [5.0]:
            await asyncio.sleep(0.02)


async def test_snapshots_take_the_place_of_what_was_before(
    distributed: populace.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = distributed
    ledger = await world.environment(Ledger, "ledger")
    big = bytes(1_000_000)
    for _ in range(70):  # more than is kept without a snapshot
        await ledger.put(big)
        await ledger.inc()
    subject = world._subjects.env_journal(world.run, "ledger")
    size = 0
    async for message in world._bus.replay(world._subjects.stream_journal, (subject,)):
        if message is None:
            break
        size += len(message.data)
    assert size < stage._SNAPSHOT_EVERY
    psutil.Process(await ledger.pid()).kill()
    async with asyncio.timeout(60):
        assert await ledger.inc() == 71
        assert await ledger.size() == len(big)


async def test_cancelled_answers_are_let_go(world: populace.World) -> None:
    people = await world.population(Odd, count=200)
    for _ in range(3):
        answers = people.huge(100_000)
        await wait_until(
            lambda: (
                sum(getattr(c, "untaken", 0) for c in world._caller._open.values()) >= ANSWER_WINDOW
            )
        )
        answers.cancel()
    for worker in world._local:
        await wait_until(lambda worker=worker: not worker._open)  # type: ignore[misc]


async def test_reading_on_after_a_break(world: populace.World) -> None:
    people = await world.population(Odd, count=100)
    answers = people.huge(100_000)
    seen: set[int] = set()
    while len(seen) < 100:
        async for batch in answers.batches():
            seen.update(batch.agents)
            break
    assert seen == set(range(100))


async def test_lost_calls_give_their_room_back(
    world: populace.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "CALL_WINDOW", 50_000)
    odd = Odd().to_dist(world)
    assert await odd.half(2) == 1.0
    caller = world._caller
    send = caller._send_calls
    monkeypatch.setattr(caller, "_send_calls", lambda *_: None)  # lost on the way
    lost = [odd.size_of(bytes([i]) * 30_000) for i in range(3)]
    await asyncio.sleep(0.05)
    for call in lost:
        call.cancel()
    monkeypatch.setattr(caller, "_send_calls", send)
    caller._recap_at = 0.0
    assert await asyncio.wait_for(odd.half(4), 10) == 2.0


async def test_a_burst_after_a_long_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "CALL_WINDOW", 50_000)
    async with populace.local() as world:
        world._caller.timeout = 0.4
        odd = Odd().to_dist(world)
        assert await odd.half(2) == 1.0
        await asyncio.sleep(0.6)
        sizes = await asyncio.gather(*(odd.size_of(bytes([i]) * 30_000) for i in range(20)))
        assert sizes == [30_000] * 20
