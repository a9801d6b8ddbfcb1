"""Flow control: windows of calls and answers, and what happens when they are full."""

from __future__ import annotations

import asyncio

import pytest

import populace
from populace import each
from populace._runtime import flow
from populace._runtime.flow import ANSWER_WINDOW, CALL_WINDOW, Account, Answered, Lane
from populace._runtime.open_calls import OpenPart
from tests.conftest import wait_until
from tests.populace.sample import Gate, Odd

MESSAGE = 1 << 20


def in_flight(world: populace.World) -> int:
    """The most that any lane has under way."""
    return max(lane.sent - lane.credited for lane in world._caller._lanes.values())


def waiting(world: populace.World) -> int:
    """Things that wait for credit."""
    return sum(len(lane.backlog) for lane in world._caller._lanes.values())


def test_credit_only_rises() -> None:
    account = Account("inbox")
    seen = [account.credit]
    account.begun += 300  # three calls, of which two are parked
    account.parked += 200
    seen.append(account.credit)
    account.forgive()
    seen.append(account.credit)
    account.begun += 100
    account.parked += 100
    seen.append(account.credit)
    for _ in range(3):
        account.unpark(100)
        seen.append(account.credit)
    assert seen == [0, 100, 300, 300, 300, 300, 400]
    assert account.credit == account.begun


def test_lanes_and_answers_open_and_close() -> None:
    lane, answered = Lane("s", 0.0), Answered()
    lane.sent = CALL_WINDOW
    assert not lane.open
    lane.credit(1, 5.0)
    assert lane.open
    assert lane.moved == 5.0
    lane.credit(0, 6.0)  # an old message
    assert (lane.credited, lane.moved) == (1, 5.0)
    answered.sent = ANSWER_WINDOW
    assert not answered.open
    answered.taken = 1
    assert answered.open
    assert lane.take(ANSWER_WINDOW // 4 - 1) is None
    assert lane.take(1) == ANSWER_WINDOW // 4


async def test_calls_beyond_the_window_wait_with_the_caller(world: populace.World) -> None:
    gate = Gate(0.002).to_dist(world)
    await gate.seen()
    load = bytes(100_000)
    calls = [gate.work(i, load + bytes([i % 251])) for i in range(300)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waiting(world) > 0
    most = 0
    for call in calls:
        most = max(most, in_flight(world))
        await call
    assert CALL_WINDOW // 2 < most < CALL_WINDOW + 2 * MESSAGE
    assert [await call for call in calls] == list(range(300))
    assert await gate.seen() == list(range(300))
    assert waiting(world) == 0


async def test_population_calls_keep_their_place_behind_what_waits(world: populace.World) -> None:
    gates = await world.population(Gate, 0.001, count=4)
    load = bytes(100_000)
    calls = [gates[i % 4].work(i, load + bytes([i % 251])) for i in range(400)]
    answers = gates.work(each([1000, 1001, 1002, 1003]))
    last = [gates[i].work(2000) for i in range(4)]
    assert list(await answers) == [1000, 1001, 1002, 1003]
    await asyncio.gather(*calls, *last)
    for i in range(4):
        assert await gates[i].seen() == [*range(i, 400, 4), 1000 + i, 2000]


async def test_relief_when_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shard: a queue full of calls to a waiting agent, and behind it what it waits for."""
    monkeypatch.setattr(flow, "CALL_WINDOW", 20_000)
    async with populace.local() as world:
        gates = await world.population(Gate, count=2)
        await gates[0].open(False)
        gate = gates[0]
        held = [gate.wait()]
        for i in range(1000):  # of two shapes in turn, so that they don't travel as one
            held += [gate.work(2 * i), gate.work(number=2 * i + 1)]
        await asyncio.sleep(0.05)
        assert waiting(world) > 0
        opened = gates[1].open()
        await asyncio.wait_for(opened, 30)
        assert await asyncio.gather(*held) == [0, *range(2000)]
        await gates[0].open(False)


async def test_a_slow_reader_holds_up_the_workers(world: populace.World) -> None:
    people = await world.population(Odd, count=400)
    answers = people.huge(100_000)
    total = 400 * 100_000
    parts = world._caller._open

    def here() -> int:
        return sum(c.untaken for c in parts.values() if isinstance(c, OpenPart))

    await wait_until(lambda: here() >= ANSWER_WINDOW)
    await asyncio.sleep(0.3)  # more would come now, if it came
    assert here() <= len(parts) * (ANSWER_WINDOW + MESSAGE) < total
    seen = set()
    async for batch in answers.batches():
        assert here() <= len(parts) * (ANSWER_WINDOW + MESSAGE)
        seen.update(batch.agents)
        assert all(len(value) == 100_000 for value in batch.values)
        # Other calls are not held up by answers that nobody takes.
        assert await people[3].half(2) == 1.0
    assert seen == set(range(400))


async def test_answers_that_are_awaited_late(world: populace.World) -> None:
    people = await world.population(Odd, count=200)
    answers = people.huge(100_000)
    await asyncio.sleep(0.2)
    assert len(await answers) == 200
    left = people.huge(100_000)
    async for _ in left.batches():
        break  # and never again
    assert await people[0].half(2) == 1.0


async def test_many_large_answers_to_single_calls(world: populace.World) -> None:
    odd = Odd().to_dist(world)
    calls = [odd.huge(500_000) for _ in range(60)]
    assert {len(await call) for call in calls} == {500_000}


async def test_a_worker_a_hundred_times_slower_loses_nothing(distributed: populace.World) -> None:
    gates = await distributed.population(
        Gate, each([0.0 if i < 50 else 0.004 for i in range(100)]), count=100
    )
    load = bytes(20_000)
    calls = [gates[i % 100].work(i, load + bytes([i % 251])) for i in range(3000)]
    fast = [call for i, call in enumerate(calls) if i % 100 < 50]
    await asyncio.gather(*fast)
    slow = [call for i, call in enumerate(calls) if i % 100 >= 50]
    assert not all(call.done() for call in slow)  # nobody waited for them
    assert await asyncio.gather(*calls) == list(range(3000))
    stats = await distributed.worker_stats()
    assert max(s.rss for s in stats) < 400e6
