"""What once went wrong, or could: each of these was a defect before it was a test."""

from __future__ import annotations

import asyncio
import time

import pytest

import populace
from populace import AgentError, InvalidInputError, each
from populace.scenario import Scenario
from populace.world import open_world
from tests.conftest import Services, unique, wait_until
from tests.populace.sample import (
    Counter,
    Echo,
    Odd,
    Picky,
    Renamed,
    Ring,
    Stubborn,
    Voter,
)


async def make_ring(world: populace.World, size: int) -> list[populace.AgentProxy]:
    ring = [Ring().to_dist(world) for _ in range(size)]
    for i, agent in enumerate(ring):
        await agent.set(ring[(i + 1) % size])
    return ring


async def test_a_circle_of_waiting_methods(world: populace.World) -> None:
    ring = await make_ring(world, 4)
    names = await asyncio.wait_for(asyncio.gather(*(a.ask_next_slowly() for a in ring)), 20)
    assert names == [f"single/{(i + 1) % 4}" for i in range(4)]
    assert await ring[0].name() == "single/0"  # they are free again


async def test_a_reference_made_late(world: populace.World) -> None:
    a, b = Echo("a", 0.3).to_dist(world), Echo("b", 0.2).to_dist(world)
    message = a.reply("x")
    await asyncio.sleep(0.05)
    busy = b.reply("busy")
    assert await b.reply(message) == "x>a>b"
    assert await busy == "busy>b"


async def test_a_reference_given_to_a_population(world: populace.World) -> None:
    a = Echo("a", 0.05).to_dist(world)
    people = await world.population(Echo, "p", count=5)
    assert list(await people.reply(a.reply("x"))) == ["x>a>p"] * 5
    own = [a.reply(str(i)) for i in range(5)]
    assert list(await people.reply(each(own))) == [f"{i}>a>p" for i in range(5)]


@pytest.mark.parametrize("first", [0, 1])
async def test_a_reference_that_is_asked_for_at_once(world: populace.World, first: int) -> None:
    """The answer is made in the very moment in which it is asked for."""
    agents = [Odd().to_dist(world), Odd().to_dist(world)]
    maker, user = agents[first], agents[1 - first]
    await asyncio.gather(*(a.half(2) for a in agents))
    began = time.monotonic()
    for _ in range(20):
        user.half(4)
        assert await user.size_of(maker.huge(10)) == 10
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("first", [0, 1])
async def test_references_to_calls_that_are_divided(world: populace.World, first: int) -> None:
    agents = [Odd().to_dist(world), Odd().to_dist(world)]
    maker, user = agents[first], agents[1 - first]
    user.half(2)  # so that its message comes first
    made = [maker.size_of(bytes(300_000 + i)) for i in range(6)]
    answers = await asyncio.gather(*(user.half(each_made) for each_made in made[::2]))
    assert answers == [(300_000 + i) / 2 for i in (0, 2, 4)]


async def test_rounds_are_passed_on_from_agent_to_agent(services: Services) -> None:
    seen = []
    for workers in (1, 3):
        async with open_world(
            services.settings(), services.broker.url, run=unique("w"), seed=4, workers=workers
        ) as world:
            ring = await make_ring(world, 3)
            rows = []
            for number in (1, 2):
                world._caller.round = number
                rows.append(await ring[0].rounds(2))
            seen.append(rows)
    assert seen[0] == seen[1]
    assert [[r for r, _ in row] for row in seen[0]] == [[1, 1, 1], [2, 2, 2]]


async def test_an_exception_without_a_text(world: populace.World) -> None:
    picky = Picky().to_dist(world)
    with pytest.raises(AgentError, match="Unspeakable"):
        await picky.raises()
    assert await picky.number(3) == 3


async def test_agents_that_cannot_be_made(world: populace.World) -> None:
    with pytest.raises(AgentError, match="nothing may be set"):
        await world.population(Stubborn, count=3)


async def test_arguments_sent_once_are_not_shared(services: Services) -> None:
    for workers in (1, 2):
        async with populace.local(workers=workers) as world:
            people = await world.population(Picky, [], count=4)
            assert list(await people.grow([])) == [1, 1, 1, 1]
            assert list(await people.log_length()) == [1, 1, 1, 1]
            one = Picky().to_dist(world)
            shared: list[int] = []
            assert await asyncio.gather(one.grow(shared), one.grow(shared)) == [1, 1]


async def test_answers_that_cannot_be_read_here(world: populace.World) -> None:
    people = await world.population(Picky, count=2)
    results = await people.renamed()
    assert results.values == [None, None]
    assert results.errors[0].kind == "CodecError"
    with pytest.raises(populace.errors.CodecError):
        await people[0].renamed()
    assert Renamed(**{"grösse": 1}).size == 1


async def test_answers_that_cannot_be_summarised(world: populace.World) -> None:
    people = await world.population(Picky, count=3)
    assert (await people.thing().reduce("count")).failures == {"CodecError": 3}
    missing = await people.row().reduce("mean", field="b")
    assert missing.failures == {"LookupError": 3}
    assert "no part named 'b'" in missing.failure_example
    huge = await people.number(10**400).reduce("mean")
    assert (huge.count, huge.numbers) == (3, 0)
    voters = await world.population(Voter, count=9000)
    many = voters.vote("x" * 200, weight=each([float(i) for i in range(9000)])).reduce("count")
    summary = await many
    assert summary.failures.get("PayloadTooLargeError", 0) + summary.count == 9000


async def test_cancelled_calls_are_not_left_open(world: populace.World) -> None:
    counter = Counter().to_dist(world)
    await counter.total()
    calls = [counter.forever(), counter.add(), counter.add()]
    await asyncio.sleep(0.05)
    calls[0].cancel()
    calls[1].cancel()
    assert await calls[2] == 1
    await wait_until(lambda: not world._caller._open)
    late = counter.forever().with_timeout(0.1)
    with pytest.raises(AgentError, match="within"):
        await late
    await wait_until(lambda: not world._caller._open)


async def test_whoever_waits_for_a_cancelled_call_is_told(world: populace.World) -> None:
    a, b = Echo("a", 20.0).to_dist(world), Echo("b").to_dist(world)
    source = a.reply("x")
    user = b.reply(source)
    await asyncio.sleep(0.1)
    source.cancel()
    began = time.monotonic()
    with pytest.raises(AgentError) as caught:
        await user
    assert caught.value.kind == "cancelled"
    assert time.monotonic() - began < 2


async def test_agents_learn_that_others_are_lost(distributed: populace.World) -> None:
    caller = Picky().to_dist(distributed)
    odd = Odd().to_dist(distributed)
    echo = Echo("e", 30.0).to_dist(distributed)  # with the caller, on the first worker
    doomed = Echo("d", 30.0).to_dist(distributed)  # with odd, on the second
    waiting = caller.reach(doomed)
    await asyncio.sleep(0.2)
    with pytest.raises(AgentError):
        await odd.die()
    assert await asyncio.wait_for(waiting, 5) == "worker_lost"
    assert await asyncio.wait_for(caller.reach(doomed), 5) == "worker_lost"
    people = await distributed.population(Voter, count=10)  # on the worker that is left
    assert len(await people.row()) == 10
    assert len(await distributed.worker_stats()) == 1
    assert echo is not None


async def test_placeholders_do_not_slip_into_texts(world: populace.World) -> None:
    message = Echo("a").to_dist(world).reply("x")
    with pytest.raises(TypeError, match="await it first"):
        _ = f"they said {message}"
    assert await message == "x>a"


async def test_tokens_of_awaited_answers_are_counted() -> None:
    from tests.services.games import Member

    spec = populace.ModelSpec(backend="scripted")
    async with populace.local(models={"default": spec}) as world:
        members = await world.population(Member, count=10)
        answers = members.say()
        await answers
        assert answers.progress[2] > 10


async def test_names_that_every_round_has() -> None:
    scenario = Scenario.__new__(Scenario)
    scenario._recorded = {}
    with pytest.raises(InvalidInputError, match="'answers' already"):
        scenario.record(answers=3)


async def test_an_agent_with_very_many_calls_under_way(world: populace.World) -> None:
    """Noting them must not take quadratic time."""
    people = await world.population(Voter, count=10)
    began = time.monotonic()
    calls = [people[i % 10].row() for i in range(20_000)]
    await asyncio.gather(*calls)
    assert time.monotonic() - began < 20
