"""The bus's contract, kept by the in-memory bus and by NATS alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from shared.bus import Bus, Delivery, Message, StreamSpec
from shared.errors import (
    BusError,
    BusTimeoutError,
    NoRespondersError,
    PayloadTooLargeError,
    RevisionConflictError,
)
from tests.conftest import unique, wait_until

Maker = Callable[[], Awaitable[Bus]]


async def test_everyone_gets_what_is_published_in_order(bus_maker: Maker) -> None:
    a, b = await bus_maker(), await bus_maker()
    subject = unique()
    got: list[list[bytes]] = [[], []]
    await a.subscribe(subject, lambda m: got[0].append(m.data))
    await b.subscribe(subject, lambda m: got[1].append(m.data))
    await a.flush()
    await b.flush()
    for i in range(500):
        a.send(subject, str(i).encode())
    await a.flush()
    expected = [str(i).encode() for i in range(500)]
    await wait_until(lambda: got == [expected, expected])


async def test_wildcards(bus_maker: Maker) -> None:
    bus = await bus_maker()
    top = unique()
    one: list[str] = []
    rest: list[str] = []
    await bus.subscribe(f"{top}.*.c", lambda m: one.append(m.subject))
    await bus.subscribe(f"{top}.>", lambda m: rest.append(m.subject))
    await bus.flush()
    sent = [f"{top}.b.c", f"{top}.b", f"{top}.b.c.d", f"{top}.x.c"]
    for subject in (*sent, top):
        bus.send(subject, b"")
    await wait_until(lambda: len(rest) == 4)
    assert rest == sent
    assert one == [f"{top}.b.c", f"{top}.x.c"]


async def test_headers_and_reply_arrive(bus_maker: Maker) -> None:
    bus = await bus_maker()
    subject = unique()
    got: list[Message] = []
    await bus.subscribe(subject, got.append)
    await bus.flush()
    bus.send(subject, b"x", reply="back.here", headers={"a-b": "c d"})
    await wait_until(lambda: bool(got))
    assert got[0].reply == "back.here"
    assert got[0].header("a-b") == "c d"
    assert got[0].header("other") is None


async def test_a_queue_shares_messages_out(bus_maker: Maker) -> None:
    a, b = await bus_maker(), await bus_maker()
    subject = unique()
    got: list[list[bytes]] = [[], []]
    await a.subscribe(subject, lambda m: got[0].append(m.data), queue="q")
    await b.subscribe(subject, lambda m: got[1].append(m.data), queue="q")
    await a.flush()
    await b.flush()
    for i in range(200):
        a.send(subject, str(i).encode())
    await wait_until(lambda: len(got[0]) + len(got[1]) == 200)
    assert sorted(got[0] + got[1]) == sorted(str(i).encode() for i in range(200))
    assert got[0]
    assert got[1]


async def test_request_and_answer(bus_maker: Maker) -> None:
    a, b = await bus_maker(), await bus_maker()
    subject = unique()
    await b.subscribe(subject, lambda m: b.send(m.reply, m.data * 2))
    await b.flush()
    answers = await asyncio.gather(
        *(a.request(subject, str(i).encode(), timeout=5) for i in range(50))
    )
    assert [m.data for m in answers] == [str(i).encode() * 2 for i in range(50)]


async def test_nobody_listens(bus_maker: Maker) -> None:
    bus = await bus_maker()
    with pytest.raises(NoRespondersError, match="nobody listens"):
        await asyncio.wait_for(bus.request(unique(), b"", timeout=30), 5)


async def test_no_answer_in_time(bus_maker: Maker) -> None:
    bus = await bus_maker()
    subject = unique()
    await bus.subscribe(subject, lambda _: None)
    await bus.flush()
    with pytest.raises(BusTimeoutError, match="within"):
        await bus.request(subject, b"", timeout=0.1)


async def test_a_raising_handler_harms_nobody(bus_maker: Maker) -> None:
    bus = await bus_maker()
    subject = unique()
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        if message.data == b"raise":
            raise RuntimeError("on purpose")
        if message.data == b"cancel":
            raise asyncio.CancelledError
        got.append(message.data)

    await bus.subscribe(subject, handle)
    await bus.flush()
    for data in (b"1", b"raise", b"2", b"cancel", b"3"):
        bus.send(subject, data)
    await wait_until(lambda: got == [b"1", b"2", b"3"])
    assert bus.stats.handler_errors == 2


async def test_handlers_of_one_subscription_run_one_after_the_other(bus_maker: Maker) -> None:
    bus = await bus_maker()
    subject = unique()
    running = 0
    most = 0
    done = 0

    async def handle(_: Message) -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running -= 1
        done += 1

    await bus.subscribe(subject, handle)
    await bus.flush()
    for _ in range(20):
        bus.send(subject, b"")
    await wait_until(lambda: done == 20)
    assert most == 1


async def test_unsubscribe(bus_maker: Maker) -> None:
    bus = await bus_maker()
    subject = unique()
    got: list[bytes] = []
    subscription = await bus.subscribe(subject, lambda m: got.append(m.data))
    await bus.flush()
    bus.send(subject, b"1")
    await wait_until(lambda: got == [b"1"])
    await subscription.unsubscribe()
    with pytest.raises(NoRespondersError):
        await bus.request(subject, b"2", timeout=5)
    assert got == [b"1"]


async def test_too_large_a_message(bus_maker: Maker) -> None:
    bus = await bus_maker()
    with pytest.raises(PayloadTooLargeError, match="over the broker's limit"):
        bus.send(unique(), b"x" * (bus.max_payload + 1))
    got: list[int] = []
    subject = unique()
    await bus.subscribe(subject, lambda m: got.append(len(m.data)))
    await bus.flush()
    bus.send(subject, b"x" * bus.max_payload)
    await wait_until(lambda: got == [bus.max_payload])


async def test_drain_handles_what_arrived_and_sends_what_waits(bus_maker: Maker) -> None:
    a, b = await bus_maker(), await bus_maker()
    subject = unique()
    got: list[bytes] = []
    await b.subscribe(subject, lambda m: got.append(m.data))
    await b.flush()
    for i in range(300):
        a.send(subject, str(i).encode())
    await a.drain()
    await wait_until(lambda: len(got) == 300)
    assert not a.connected
    with pytest.raises(BusError, match="closed"):
        a.send(subject, b"late")
    await a.drain()  # a second time does nothing


async def test_listeners_are_told_of_the_end(bus_maker: Maker) -> None:
    bus = await bus_maker()
    events: list[str] = []
    bus.on_event(lambda event, _: events.append(event))
    await bus.drain()
    assert events[-1:] == ["closed"]


# What lasts
async def stream(bus: Bus, **more: object) -> tuple[str, str]:
    name = unique("s")
    # Small, since a broker sets the whole of max_bytes aside.
    spec = StreamSpec(name, (f"{name}.>",), **{"max_bytes": 1 << 20, **more})  # type: ignore[arg-type]
    await bus.ensure_stream(spec)
    return name, f"{name}.x"


async def test_a_stream_keeps_and_numbers(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name, subject = await stream(bus)
    numbers = [await bus.append(subject, str(i).encode()) for i in range(3)]
    assert numbers == [1, 2, 3]
    consumer = await bus.consumer(name, durable="d")
    found = await consumer.fetch(10, 2)
    assert [d.data for d in found] == [b"0", b"1", b"2"]
    assert [d.sequence for d in found] == [1, 2, 3]
    assert all(d.attempt == 1 for d in found)
    for delivery in found:
        await delivery.ack()
    assert await consumer.fetch(10, 0.1) == []


async def test_plain_sends_are_kept_too(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name, subject = await stream(bus)
    bus.send(subject, b"plain", headers={"k": "v"})
    consumer = await bus.consumer(name, durable="d")
    (delivery,) = await consumer.fetch(10, 5)
    assert delivery.data == b"plain"
    assert dict(delivery.headers or {})["k"] == "v"


async def test_appending_also_reaches_subscribers(bus_maker: Maker) -> None:
    bus = await bus_maker()
    _, subject = await stream(bus)
    got: list[bytes] = []
    await bus.subscribe(subject, lambda m: got.append(m.data))
    await bus.flush()
    await bus.append(subject, b"x")
    await wait_until(lambda: got == [b"x"])


async def test_a_message_id_is_stored_once(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name, subject = await stream(bus)
    first = await bus.append(subject, b"x", message_id="m1")
    assert await bus.append(subject, b"x", message_id="m1") == first
    consumer = await bus.consumer(name, durable="d")
    assert len(await consumer.fetch(10, 1)) == 1


async def test_no_stream_takes_it(bus_maker: Maker) -> None:
    bus = await bus_maker()
    with pytest.raises(NoRespondersError, match="no stream"):
        await bus.append(unique(), b"x")


async def test_unacknowledged_messages_come_again(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name, subject = await stream(bus, work_queue=True)
    await bus.append(subject, b"x")
    consumer = await bus.consumer(name, durable="d", ack_wait=1.5)
    (first,) = await consumer.fetch(1, 2)
    assert abs(first.stored_at - time.time()) < 5
    assert await consumer.fetch(1, 0.05) == []
    (second,) = await consumer.fetch(1, 3)
    assert (second.data, second.attempt) == (b"x", 2)
    await second.nak()
    (third,) = await consumer.fetch(1, 2)
    assert third.attempt == 3
    await third.term()
    assert await consumer.fetch(1, 0.5) == []
    assert first.sequence == third.sequence


async def test_who_had_it_first_may_still_acknowledge(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name, subject = await stream(bus, work_queue=True)
    await bus.append(subject, b"x")
    consumer = await bus.consumer(name, durable="d", ack_wait=1.5)
    (first,) = await consumer.fetch(1, 2)
    (second,) = await consumer.fetch(1, 3)
    assert second.sequence == first.sequence
    for _ in range(4):
        await first.in_progress()
        assert await consumer.fetch(1, 0.5) == []
    await first.ack()
    assert await consumer.fetch(1, 1.8) == []
    assert (await bus.held(name, subject))[0] == 0


async def test_work_in_progress_is_left_alone(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name, subject = await stream(bus, work_queue=True)
    await bus.append(subject, b"x")
    consumer = await bus.consumer(name, durable="d", ack_wait=1.5)
    (held,) = await consumer.fetch(1, 2)
    for _ in range(4):
        await held.in_progress()
        assert await consumer.fetch(1, 0.5) == []
    await held.ack()


async def test_who_takes_alone_goes_on_in_order(bus_maker: Maker) -> None:
    """What another left unacknowledged comes at once, before what came later."""
    bus = await bus_maker()
    name, subject = await stream(bus)
    for i in range(6):
        await bus.append(subject, str(i).encode())
    first = await bus.consumer(name, durable="d", ack_wait=60, alone=True)
    held = await first.fetch(4, 2)
    await held[0].ack()
    await bus.flush()
    for _ in range(2):
        again = await bus.consumer(name, durable="d", ack_wait=60, alone=True)
        found: list[Delivery] = []
        while len(found) < 5:
            found += await again.fetch(10, 2)
        assert [int(d.data) for d in found] == [1, 2, 3, 4, 5]
    for delivery in found:
        await delivery.ack()
    await bus.flush()
    last = await bus.consumer(name, durable="d", ack_wait=60, alone=True)
    assert await last.fetch(1, 0.3) == []


async def test_a_new_consumer_leaves_out_what_was_there(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name, subject = await stream(bus)
    await bus.append(subject, b"old")
    consumer = await bus.consumer(name, durable="d", new=True)
    await bus.append(subject, b"new")
    assert [d.data for d in await consumer.fetch(5, 2)] == [b"new"]


async def test_workers_share_a_queue(bus_maker: Maker) -> None:
    a, b = await bus_maker(), await bus_maker()
    name, subject = await stream(a, work_queue=True)
    for i in range(20):
        await a.append(subject, str(i).encode())
    one = await a.consumer(name, durable="d")
    two = await b.consumer(name, durable="d")
    found = [*await one.fetch(10, 2), *await two.fetch(20, 2)]
    assert sorted(int(d.data) for d in found) == list(range(20))


async def test_replay_from_the_beginning_and_on(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name, subject = await stream(bus)
    await bus.append(subject, b"1")
    await bus.append(f"{name}.other", b"not this")
    got: list[bytes] = []
    quiet = 0
    async for message in bus.replay(name, (subject,), idle=0.2):
        if message is None:
            quiet += 1
            if quiet == 1:
                await bus.append(subject, b"2")
            continue
        got.append(message.data)
        if got == [b"1", b"2"]:
            break
    assert quiet >= 1


async def test_reading_ends_with_what_is_held(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name, subject = await stream(bus)
    assert [m async for m in bus.read(name, (subject,))] == []
    for i in range(250):
        await bus.append(subject, str(i).encode())
        if i % 50 == 0:
            await bus.append(f"{name}.other", b"not this")
    began = time.monotonic()
    found = [int(m.data) async for m in bus.read(name, (subject,))]
    assert found == list(range(250))
    assert time.monotonic() - began < 2
    both = subject, f"{name}.other"
    assert len([m async for m in bus.read(name, both)]) == 255
    newest = [m.data async for m in bus.read(name, both, newest=51)]
    assert newest == [b"200", b"not this", *(str(i).encode() for i in range(201, 250))]
    assert len([m async for m in bus.read(name, both, newest=1000)]) == 255


async def test_a_bucket_of_values(bus_maker: Maker) -> None:
    a, b = await bus_maker(), await bus_maker()
    name = unique("b")
    here, there = await a.bucket(name), await b.bucket(name)
    assert await there.get("k") is None
    assert await there.entries() == []
    first = await here.put("k", b"1")
    found = await there.get("k")
    assert found is not None
    assert (found.value, found.revision) == (b"1", first)
    with pytest.raises(RevisionConflictError):
        await there.create("k", b"x")
    second = await there.update("k", b"2", first)
    with pytest.raises(RevisionConflictError):
        await here.update("k", b"3", first)
    assert second > first
    await here.create("other.key", b"o")
    assert {e.key: e.value for e in await here.entries()} == {"k": b"2", "other.key": b"o"}
    await here.delete("k")
    assert await there.get("k") is None
    await there.create("k", b"again")


async def test_entries_expire(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name = unique("b")
    await (await bus_maker()).bucket(name)  # who does not care for how long may be first
    bucket = await bus.bucket(name, ttl=1.0)
    await bucket.put("k", b"1")
    assert await bucket.get("k") is not None
    for _ in range(60):
        if await bucket.get("k") is None:
            break
        await asyncio.sleep(0.1)
    assert await bucket.get("k") is None


async def test_the_last_message_of_a_subject(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name = unique()
    await bus.ensure_stream(StreamSpec(name, (f"{name}.>",), max_bytes=1 << 20))
    assert await bus.last(name, f"{name}.a") is None
    for value in (b"1", b"2"):
        await bus.append(f"{name}.a", value, headers={"k": value.decode()})
        await bus.append(f"{name}.b", b"other")
    found = await bus.last(name, f"{name}.a")
    assert found is not None
    assert (found.data, found.header("k")) == (b"2", "2")
    await bus.purge(name, f"{name}.a")
    assert await bus.last(name, f"{name}.a") is None


async def test_a_stream_that_keeps_refuses_what_it_cannot_hold(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name = unique()
    await bus.ensure_stream(StreamSpec(name, (f"{name}.>",), max_bytes=10_000, keep=True))
    refused = 0
    for _ in range(20):
        try:
            await bus.append(f"{name}.a", b"x" * 1000)
        except BusError:
            refused += 1
    assert refused >= 10
    first = await bus.last(name, f"{name}.a")
    assert first is not None


async def test_what_a_queue_holds(bus_maker: Maker) -> None:
    bus = await bus_maker()
    name = unique()
    await bus.ensure_stream(StreamSpec(name, (f"{name}.>",), work_queue=True, max_bytes=1 << 20))
    assert await bus.held(name, f"{name}.a") == (0, 0.0)
    for _ in range(3):
        await bus.append(f"{name}.a", b"x")
    await bus.append(f"{name}.b", b"x")
    count, age = await bus.held(name, f"{name}.a")
    assert count == 3
    assert 0 <= age < 5
    assert (await bus.held(name, f"{name}.*"))[0] == 4
    assert (await bus.held(name, f"{name}.*.c"))[0] == 0
    consumer = await bus.consumer(name, durable="d", subjects=(f"{name}.a",))
    for delivery in await consumer.fetch(2, timeout=2):
        await delivery.ack()

    async def left() -> int:
        return (await bus.held(name, f"{name}.a"))[0]

    async with asyncio.timeout(10):
        while await left() != 1:
            await asyncio.sleep(0.01)
