"""Populations: many agents handled as one, in one process and over the broker."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

import populace
from populace import AgentError, InvalidInputError, each
from tests.conftest import eventually
from tests.populace.sample import Counter, Odd, Vote, Voter


async def test_everyone_is_there_once(world: populace.World) -> None:
    voters = await world.population(Voter, count=1001)
    assert len(voters) == 1001
    assert {s.size for s in voters._shards} == {500, 501}
    rows = (await voters.row()).values
    assert [r[0] for r in rows] == list(range(1001))


async def test_constructor_arguments_shared_and_own(world: populace.World) -> None:
    voters = await world.population(Voter, each(list(range(30))), count=30, city="Rome")
    assert list(await voters.row()) == [(i, i, "Rome") for i in range(30)]


async def test_call_arguments_shared_and_own(world: populace.World) -> None:
    voters = await world.population(Voter, count=5)
    votes = await voters.vote("tea", weight=each([0.0, 0.5, 1.0, 1.5, 2.0]))
    assert votes[3] == Vote(choice="tea?yes", weight=1.5)
    with pytest.raises(InvalidInputError, match="2 values for 5 agents"):
        voters.vote("tea", weight=each([1.0, 2.0]))
    with pytest.raises(InvalidInputError, match="2 values, not 5"):
        await world.population(Voter, each([1, 2]), count=5, name="more")


async def test_large_columns_are_split(world: populace.World) -> None:
    odd = await world.population(Odd, count=40)
    sizes = await odd.size_of(each([bytes(100_000)] * 40))
    assert list(sizes) == [100_000] * 40


async def test_failures_stand_apart(world: populace.World) -> None:
    voters = await world.population(Voter, count=100)
    results = await voters.some_fail()
    assert sorted(results.errors) == list(range(3, 100, 10))
    assert results[4] == 4
    assert results.values[13] is None
    with pytest.raises(AgentError) as caught:
        _ = results[13]
    assert (caught.value.agent, caught.value.kind) == ("voter/13", "unlucky")
    frame = results.to_pandas() if _has_pandas() else None
    assert frame is None or len(frame) == 100


def _has_pandas() -> bool:
    try:
        import pandas  # noqa: F401
    except ImportError:
        return False
    return True


async def test_reduction_where_the_agents_live(world: populace.World) -> None:
    voters = await world.population(Voter, count=100)
    before = world._bus.stats.received_bytes
    summary = await voters.some_fail().reduce("mean")
    good = [i for i in range(100) if i % 10 != 3]
    assert summary.count == summary.numbers == 90
    assert summary.failed == 10
    assert summary.failures == {"unlucky": 10}
    assert summary.mean == sum(good) / 90
    assert (summary.minimum, summary.maximum) == (0, 99)
    assert summary.failure_example == "unlucky: number 3"
    assert world._bus.stats.received_bytes - before < 3000


async def test_reduction_by_counting(world: populace.World) -> None:
    voters = await world.population(Voter, count=11)
    summary = await voters.text().reduce("count")
    assert summary.counts == {"even": 6, "odd": 5}
    assert summary.mean is None


async def test_reduction_of_a_part(world: populace.World) -> None:
    voters = await world.population(Voter, count=10)
    summary = await voters.vote("x", weight=each([float(i) for i in range(10)])).reduce(
        "mean", field="weight"
    )
    assert summary.mean == 4.5


async def test_reduction_afterwards(world: populace.World) -> None:
    voters = await world.population(Voter, count=100)
    answers = voters.some_fail()
    await asyncio.sleep(0.1)
    summary = await answers.reduce("mean")
    assert (summary.count, summary.failed) == (90, 10)
    reduced = voters.some_fail()
    reduced.reduce("mean")
    with pytest.raises(InvalidInputError, match="already"):
        reduced.reduce("mean")


async def test_unknown_reduction(world: populace.World) -> None:
    voters = await world.population(Voter, count=2)
    with pytest.raises(InvalidInputError, match="no reduction 'median'"):
        voters.row().reduce("median")  # type: ignore[arg-type]
    reduced = voters.row()
    reduced.reduce("count")
    with pytest.raises(InvalidInputError, match="await the reduction"):
        await reduced


async def test_answers_stream(world: populace.World) -> None:
    voters = await world.population(Voter, count=200)
    seen: list[int] = []
    batches = 0
    answers = voters.wait(each([2.0 if i >= 100 else 0.0 for i in range(200)]))
    began = time.monotonic()
    first = None
    async for part in answers.batches():
        first = first or time.monotonic() - began
        batches += 1
        assert list(part.agents) == part.values
        seen.extend(part.values)
    assert sorted(seen) == list(range(200))
    assert batches >= 2
    assert first is not None
    assert first < 1.8
    assert answers.done()


async def test_one_of_many(world: populace.World) -> None:
    voters = await world.population(Voter, count=10)
    assert (await voters[7].row())[0] == 7
    assert (await voters[-1].row())[0] == 9
    with pytest.raises(IndexError, match="0 to 9"):
        _ = voters[10]


async def test_order_between_single_and_population_calls(world: populace.World) -> None:
    counters = await world.population(Counter, count=4)
    one = counters[2]
    waits = [one.note(0), counters.note(1), one.note(2), counters.note_slowly(3), one.note(4)]
    for wait in waits:
        await wait
    assert await one.seen() == [0, 1, 2, 3, 4]


async def test_cancelling_a_population_call(world: populace.World) -> None:
    counters = await world.population(Counter, count=20)
    witness = Counter().to_dist(world)
    answers = counters.forever(witness)
    await eventually(witness.seen, [0] * 20)
    answers.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answers
    assert list(await counters.seen()) == [[-1]] * 20


async def test_a_population_call_without_progress_fails(world: populace.World) -> None:
    counters = await world.population(Counter, count=3)
    summary = await counters.options(timeout=0.3).forever().reduce("mean")
    assert summary.failures == {"timeout": 3}
    results = await counters.options(timeout=0.3).forever()
    assert [e.kind for e in results.errors.values()] == ["timeout"] * 3


async def test_constructors_that_raise(world: populace.World) -> None:
    with pytest.raises(AgentError, match=r"odd \(3 of 6 agents\).*ValueError: born broken"):
        await world.population(Odd, each([False, True] * 3), count=6)


async def test_names(world: populace.World) -> None:
    await world.population(Voter, count=2)
    with pytest.raises(InvalidInputError, match="named 'voter' already"):
        await world.population(Voter, count=2)
    await world.population(Voter, count=2, name="others")
    with pytest.raises(InvalidInputError, match="must be 1 to 64"):
        await world.population(Voter, count=2, name="a.b")
    with pytest.raises(InvalidInputError, match="at least 1 agent"):
        await world.population(Voter, count=0, name="none")
    voters = await world.population(Voter, count=1, name="third")
    with pytest.raises(AttributeError, match="no method 'nothing'"):
        _ = voters.nothing


async def test_draws_depend_on_nothing_but_seed_and_agent(services) -> None:  # type: ignore[no-untyped-def]
    from populace.world import open_world
    from tests.conftest import unique

    draws = []
    for workers in (1, 3):
        async with populace.local(workers=workers, seed=11) as world:
            voters = await world.population(Voter, count=50)
            draws.append((await voters.draw()).values)
    async with open_world(
        services.settings(), services.broker.url, run=unique("w"), seed=11, workers=2
    ) as world:
        voters = await world.population(Voter, count=50)
        draws.append((await voters.draw()).values)
    async with populace.local(seed=12) as world:
        voters = await world.population(Voter, count=50)
        other = (await voters.draw()).values
    assert draws[0] == draws[1] == draws[2]
    assert other != draws[0]
    assert len(set(draws[0])) == 50


async def test_agents_live_in_worker_processes(distributed: populace.World) -> None:
    voters = await distributed.population(Voter, count=1000)
    pids = (await voters.pid()).values
    import os

    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    stats = await distributed.worker_stats()
    assert sum(s.agents for s in stats) == 1000
    assert {s.pid for s in stats} == set(pids)


async def test_equal_texts_are_sent_and_held_once(world: populace.World) -> None:
    personas = [f"persona {i % 7}" + "." * 200 for i in range(5000)]
    before = world._bus.stats.sent_bytes
    people = await world.population(Voter, each([0] * 5000), each(personas), count=5000)
    assert world._bus.stats.sent_bytes - before < 60_000
    assert [row[2] for row in await people.row()] == personas
    assert 7 <= len(set(await people.identity())) <= 2 * 7


async def test_a_part_of_a_population(world: populace.World) -> None:
    voters = await world.population(Voter, each(list(range(31))), count=31, city="Rome")
    some = voters.only([30, 2, 15, 16, 2])
    assert (len(some), list(some.numbers)) == (4, [2, 15, 16, 30])
    rows = await some.row()
    assert [row[0] for row in rows] == [2, 15, 16, 30]
    assert list(rows.agents) == [2, 15, 16, 30]
    votes = await some.vote("tea", weight=each([0.0, 1.0, 2.0, 3.0]))
    assert [vote.weight for vote in votes] == [0.0, 1.0, 2.0, 3.0]
    assert (await some[3].row())[0] == 30
    left = some.without([15])
    assert list(left.numbers) == [2, 16, 30]
    found = [
        (a, v[0])
        async for part in left.row().batches()
        for a, v in zip(part.agents, part.values, strict=True)
    ]
    assert sorted(found) == [(2, 2), (16, 16), (30, 30)]
    assert (await voters.only(range(31)).row().reduce("count")).count == 31
    assert len(await voters.only([]).row()) == 0
    drawn = voters.sample(5, random.Random(1))
    assert len(set(drawn.numbers)) == 5
    with pytest.raises(InvalidInputError, match="voter has no agent 15"):
        left.only([15])
    with pytest.raises(IndexError, match="has 3 agents"):
        _ = left[3]


async def test_failures_of_a_part(world: populace.World) -> None:
    voters = await world.population(Voter, count=100)
    results = await voters.only([3, 4, 13]).some_fail()
    assert sorted(results.errors) == [0, 2]
    assert results.errors[2].agent == "voter/13"
    assert results[1] == 4
    errors = {}
    async for part in voters.only([4, 13]).some_fail().batches():
        errors.update(part.errors)
    assert list(errors) == [13]
