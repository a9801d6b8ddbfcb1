"""Calls to single agents: the same in one process and over the broker."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

import populace
from populace import AgentError, CallCycleError, CallTimeoutError, InvalidInputError
from populace._runtime import pieces
from shared.messages import batch
from tests.conftest import eventually, wait_until
from tests.populace.sample import Counter, Echo, Odd, Ring, Vote, Voter


async def test_a_call_returns_a_placeholder_at_once(world: populace.World) -> None:
    echo = Echo("a", 0.2).to_dist(world)
    placeholder = echo.reply("hello")
    assert isinstance(placeholder, populace.Placeholder)
    assert not placeholder.done()
    assert await placeholder == "hello>a"
    assert await placeholder == "hello>a"
    assert placeholder.done()


async def test_figure_two(world: populace.World) -> None:
    """A; B and C on A's answer; D on C's. Nothing but to_dist makes it distributed."""
    began = time.monotonic()
    a, b, c, d = (Echo(name, 0.5).to_dist(world) for name in "abcd")
    message_a = a.reply("hello")
    message_b = b.reply(message_a)
    message_c = c.reply(message_a)
    message_d = d.reply(message_c)
    assert time.monotonic() - began < 0.2  # long before A is done
    assert await message_b == "hello>a>b"
    assert await message_d == "hello>a>c>d"
    assert 1.4 < time.monotonic() - began < 4
    (_, end_a), (start_b, end_b), (start_c, end_c) = [await x.span() for x in (a, b, c)]
    assert start_b >= end_a
    assert start_c >= end_a
    assert max(start_b, start_c) < min(end_b, end_c)  # they overlap
    # A caller that changes its mind gets the value after all.
    assert await message_a == "hello>a"


async def test_no_value_of_a_passes_through_the_caller(world: populace.World) -> None:
    caller = world._caller
    seen: list[object] = []
    original = caller._receive

    def spy(message):  # type: ignore[no-untyped-def]
        seen.append(caller.codec.unpack(message.data))
        original(message)

    # Subscribed anew, since the bus holds the bound method.
    caller._receive = spy  # type: ignore[method-assign]
    subject = world._subjects.inbox(world._bus.process, "spied")
    await world._bus.subscribe(subject, spy)
    await world._bus.flush()
    caller.inbox = subject
    a, b, c, d = (Echo(name, 0.1).to_dist(world) for name in "abcd")
    message_a = a.reply("secret")
    message_b = b.reply(message_a)
    message_c = c.reply(message_a)
    message_d = d.reply(message_c)
    assert await message_b == "secret>a>b"
    assert await message_d == "secret>a>c>d"
    values = [
        value
        for message in seen
        if message[0] == batch.ANSWERS  # type: ignore[index]
        for row in message[3]  # type: ignore[index]
        for value in world._codec.unpack(row)[3]
    ]
    assert "secret>a>b" in values
    assert "secret>a>c>d" in values
    assert "secret>a" not in values
    assert "secret>a>c" not in values
    assert not any(message[0] == batch.FETCHED for message in seen)  # type: ignore[index]
    assert sum(message[0] == batch.DONE for message in seen) >= 1  # type: ignore[index]
    assert message_a.done()


async def test_a_placeholder_used_later_is_found_too(world: populace.World) -> None:
    a, b, c = (Echo(name, 0.1).to_dist(world) for name in "abc")
    message = a.reply("x")
    await asyncio.sleep(0.02)  # it has left, and its answer will come here
    pending = b.reply(message)
    assert await pending == "x>a>b"
    assert await c.reply(message) == "x>a>c"


async def test_placeholders_at_any_depth(world: populace.World) -> None:
    a, b = (Echo(name, 0.01).to_dist(world) for name in "ab")
    parts = [a.reply("1"), "plain", b.reply("2")]
    more = {"deep": [a.reply("3"), b.reply(b.reply("4"))]}
    assert await a.joined(parts, more) == "1>a+plain+2>b+3>a+4>b>b"


async def test_a_method_that_takes_a_placeholder_starts_at_once(world: populace.World) -> None:
    a, b = (Echo(name, 0.3).to_dist(world) for name in "ab")
    message = a.reply("x")
    at, text = await b.peek(message)
    _, ended = await a.span()
    assert at < ended
    assert text == "x>a!"


async def test_a_failed_argument_fails_the_call(world: populace.World) -> None:
    odd, echo = Odd().to_dist(world), Echo("e").to_dist(world)
    with pytest.raises(AgentError) as caught:
        await echo.reply(odd.later())
    assert caught.value.kind == "RuntimeError"
    assert "later trouble" in caught.value.message


@pytest.mark.parametrize(
    ("method", "kind", "text"),
    [
        ("plain", "KeyError", "plain trouble"),
        ("later", "RuntimeError", "later trouble"),
        ("leave", "SystemExit", "3"),
        ("unsendable", "CodecError", "Unsendable can't be sent"),
    ],
)
async def test_remote_exceptions(world: populace.World, method: str, kind: str, text: str) -> None:
    odd = Odd().to_dist(world)
    with pytest.raises(AgentError) as caught:
        await getattr(odd, method)()
    error = caught.value
    assert (error.kind, error.method, error.agent) == (kind, method, "single/0")
    assert text in error.message
    if method in ("plain", "later"):
        assert f"in {method}" in error.remote_traceback
        assert "sample.py" in str(error)


async def test_failures_carry_no_traceback(world: populace.World) -> None:
    with pytest.raises(AgentError) as caught:
        await Odd().to_dist(world).failing()
    assert caught.value.kind == "no_opinion"
    assert caught.value.remote_traceback == ""


async def test_errors_that_are_passed_on_say_whose_they_are(world: populace.World) -> None:
    first, second = Odd().to_dist(world), Odd().to_dist(world)
    with pytest.raises(AgentError) as caught:
        await first.ask(second)
    assert caught.value.agent == "single/0"
    assert "from single/1.later: later trouble" in caught.value.message
    assert "later trouble" in caught.value.remote_traceback


async def test_a_constructor_that_raises(world: populace.World) -> None:
    class_, args = Odd, (True,)
    broken = world._place(class_, args, {})
    with pytest.raises(AgentError, match="could not be created: born broken"):
        await broken.plain()


async def test_methods_that_are_not_for_others(world: populace.World) -> None:
    odd = Odd().to_dist(world)
    with pytest.raises(AttributeError, match="no method 'nothing'"):
        _ = odd.nothing
    with pytest.raises(AttributeError):
        _ = odd._secret
    call = world._caller.call(odd._shard, odd._index, "x", "to_dist", (None,), {})
    with pytest.raises(AgentError, match="no method 'to_dist'"):
        await call
    call = world._caller.call(odd._shard, odd._index, "x", "_secret", (), {})
    with pytest.raises(AgentError, match="no method '_secret'"):
        await call
    call = world._caller.call(odd._shard, 999, "x", "plain", (), {})
    with pytest.raises(AgentError, match="there is no agent"):
        await call


async def test_wrong_arguments(world: populace.World) -> None:
    echo = Echo("a").to_dist(world)
    with pytest.raises(AgentError, match="TypeError"):
        await echo.reply()
    with pytest.raises(AgentError, match="CodecError"):
        await echo.reply(object())
    good, bad = echo.reply("x"), echo.reply(object())
    assert await good == "x>a"  # though they left together
    with pytest.raises(AgentError, match="can't be sent"):
        await bad


async def test_one_call_at_a_time(world: populace.World) -> None:
    counter = Counter().to_dist(world)
    answers = await asyncio.gather(*(counter.add() for _ in range(50)))
    assert answers == list(range(1, 51))
    assert await counter.total() == 50


async def test_calls_keep_their_order(world: populace.World) -> None:
    counter = Counter().to_dist(world)
    waits = [
        counter.note_slowly(i) if i % 2 else counter.note(i)  # some wait, some don't
        for i in range(40)
    ]
    await asyncio.gather(*waits)
    assert await counter.seen() == list(range(40))


async def test_calls_of_one_tick_share_a_message(world: populace.World) -> None:
    counter = Counter().to_dist(world)
    await counter.total()
    before = world._bus.stats.sent
    await asyncio.gather(*(counter.note(i) for i in range(1000)))
    assert world._bus.stats.sent - before == 1


async def ring_of_four(world: populace.World) -> list[populace.AgentProxy]:
    ring = [Ring().to_dist(world) for _ in range(4)]
    for i, agent in enumerate(ring):
        await agent.set(ring[(i + 1) % 4])
    return ring


async def check_rings(world: populace.World) -> None:
    """A chain that comes round; and all four at once, each waiting for one that is at work."""
    ring = await ring_of_four(world)
    names = await asyncio.wait_for(ring[0].go(10), 20)
    assert names == [f"single/{i % 4}" for i in range(11)]
    names = await asyncio.wait_for(asyncio.gather(*(agent.ask_next() for agent in ring)), 20)
    assert names == [f"single/{(i + 1) % 4}" for i in range(4)]


async def test_a_ring_of_agents_on_one_worker(one_worker: populace.World) -> None:
    await check_rings(one_worker)


async def test_a_ring_of_agents_over_two_workers(world: populace.World) -> None:
    await check_rings(world)


async def test_calls_that_go_round_for_ever_are_named(world: populace.World) -> None:
    ring = [Ring().to_dist(world) for _ in range(2)]
    for i, agent in enumerate(ring):
        await agent.set(ring[1 - i])
    with pytest.raises(CallCycleError, match=r"single/. *.go -> single/..go") as caught:
        await ring[0].go(100_000)
    assert "without an end" in caught.value.message


async def test_timeouts(world: populace.World) -> None:
    counter = Counter().to_dist(world)
    await counter.total()
    began = time.monotonic()
    with pytest.raises(CallTimeoutError, match=r"within 0\.2 s"):
        await counter.forever().with_timeout(0.2)
    assert time.monotonic() - began < 2
    assert await counter.seen() == [-1]  # it was cancelled where it ran
    with pytest.raises(ValueError, match="above 0"):
        counter.total().with_timeout(0)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(counter.forever(), 0.1)


async def test_cancelling(world: populace.World) -> None:
    counter, witness = Counter().to_dist(world), Counter().to_dist(world)
    await counter.total()
    running, queued = counter.forever(witness), counter.add()
    await eventually(witness.seen, [0])
    assert queued.cancel()
    assert running.cancel()
    assert running.cancelled()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not running.cancel()
    assert await counter.seen() == [-1]
    assert await counter.total() == 0
    unsent = counter.add()
    unsent.cancel()
    assert await counter.total() == 0


async def test_done_callbacks(world: populace.World) -> None:
    echo = Echo("a").to_dist(world)
    called: list[str] = []
    placeholder = echo.reply("x")
    placeholder.add_done_callback(lambda p: called.append(p._get()))
    await placeholder
    await wait_until(lambda: called == ["x>a"])
    placeholder.add_done_callback(lambda p: called.append("again"))
    await wait_until(lambda: called == ["x>a", "again"])


async def test_objects_as_arguments_and_answers(world: populace.World) -> None:
    voter = Voter().to_dist(world)
    vote = await voter.vote("tea")
    assert vote == Vote(choice="tea?", weight=1.0)


async def test_large_payloads_are_divided_or_refused(world: populace.World) -> None:
    odd = Odd().to_dist(world)
    some = b"x" * 300_000
    assert (
        await asyncio.gather(*(odd.size_of(some + bytes([i])) for i in range(8))) == [300_001] * 8
    )
    answers = await asyncio.gather(*(odd.huge(300_000) for _ in range(8)))
    assert [len(a) for a in answers] == [300_000] * 8


async def test_payloads_over_the_brokers_maximum(world: populace.World) -> None:
    """One call's argument and answer travel in pieces; beyond a limit they are refused."""
    odd, other = Odd().to_dist(world), Odd().to_dist(world)
    large = random.Random(1).randbytes(9_000_000)
    assert await odd.same(large) == large
    assert await other.size_of(odd.huge(5_000_000)) == 5_000_000  # from worker to worker
    people = await world.population(Odd, count=3)
    assert list(await people.size_of(large)) == [len(large)] * 3
    assert [len(a) for a in await people.huge(2_500_000)] == [2_500_000] * 3
    too_large = bytes(pieces.MOST_BYTES + 1)
    with pytest.raises(AgentError, match=r"the arguments take 67,\d+,\d+ bytes, more than"):
        await odd.size_of(too_large)
    with pytest.raises(AgentError, match="the answer takes"):
        await odd.huge(pieces.MOST_BYTES + 1)
    assert await odd.half(2) == 1.0


async def test_an_agent_outside_a_world_has_no_identity() -> None:
    echo = Echo("a")
    assert await echo.reply("x") == "x>a"  # an ordinary object
    with pytest.raises(InvalidInputError, match="lives in no world"):
        _ = echo.random


async def test_closing_fails_what_is_open(world: populace.World) -> None:
    counter = Counter().to_dist(world)
    pending = counter.forever()
    await asyncio.sleep(0.05)
    await world._close()
    with pytest.raises(AgentError, match="closed"):
        await pending
    with pytest.raises(AgentError, match="closed"):
        await counter.total()
