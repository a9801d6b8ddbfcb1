"""What only a real broker can do to a connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from nats.aio.client import Client

from shared.bus import Message, NatsBus, StreamSpec
from shared.errors import (
    BusDisconnectedError,
    BusError,
    BusOverflowError,
    BusTimeoutError,
    BusUnavailableError,
)
from shared.settings import Settings
from tests.conftest import Broker, unique, wait_until


async def test_no_broker() -> None:
    began = time.monotonic()
    with pytest.raises(BusUnavailableError, match=r"nats://127\.0\.0\.1:9 within 0\.5 s") as caught:
        await NatsBus.connect(Settings(connect_timeout=0.5), "nats://me:secret@127.0.0.1:9")
    assert "secret" not in str(caught.value)
    assert time.monotonic() - began < 5


async def test_a_bad_address() -> None:
    with pytest.raises(BusUnavailableError):
        await NatsBus.connect(Settings(connect_timeout=0.5), "nonsense://")


async def test_a_restart(own_broker: Callable[..., Broker]) -> None:
    broker = own_broker()
    port = int(broker.url.rpartition(":")[2])
    bus = await NatsBus.connect(broker.settings(), broker.url)
    events: list[str] = []
    bus.on_event(lambda event, _: events.append(event))
    got: list[bytes] = []
    await bus.subscribe("a", lambda m: got.append(m.data))
    await bus.subscribe("mute", lambda _: None)
    name = unique("s")
    await bus.ensure_stream(StreamSpec(name, (f"{name}.>",), max_bytes=1 << 20))
    consumer = await bus.consumer(name, durable="d")
    await bus.append(f"{name}.x", b"kept")
    await bus.flush()
    asked = asyncio.ensure_future(bus.request("mute", b"", timeout=60))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    broker.process.kill()
    broker.process.wait(10)
    with pytest.raises(BusDisconnectedError, match="connection broke"):
        await asked
    assert time.monotonic() - began < 5
    assert not bus.connected
    for i in range(100):
        bus.send("a", str(i).encode())
    assert await consumer.fetch(1, 0.2) == []
    with pytest.raises(BusTimeoutError):
        await bus.flush(0.2)
    own_broker(port)
    await wait_until(lambda: len(got) == 100, 15, "what was sent meanwhile")
    assert got == [str(i).encode() for i in range(100)]
    assert events == ["disconnected", "reconnected"]
    assert bus.stats.reconnects == 1
    for _ in range(20):
        found = await consumer.fetch(1, 1)
        if found:
            break
    assert [d.data for d in found] == [b"kept"]
    await bus.drain()


async def test_an_outbox_is_bounded(
    own_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = own_broker()
    bus = await NatsBus.connect(broker.settings(), broker.url)
    broker.process.kill()
    broker.process.wait(10)
    await wait_until(lambda: not bus.connected)
    monkeypatch.setattr("shared.bus.nats._OUTBOX_LIMIT", 1000)
    bus.send("a", b"x" * 900)
    with pytest.raises(BusOverflowError, match="wait to be sent"):
        bus.send("a", b"x" * 900)
    await bus.drain()


async def test_slow_subscribers_are_named(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.nats._PENDING_MESSAGES", 10)
    bus = await NatsBus.connect(broker.settings(), broker.url)
    events: list[tuple[str, str]] = []
    bus.on_event(lambda event, detail: events.append((event, detail)))
    subject = unique()
    go_on = asyncio.Event()

    async def slow(_: object) -> None:
        await go_on.wait()

    await bus.subscribe(subject, slow)
    await bus.flush()
    for _ in range(100):
        bus.send(subject, b"")
    await wait_until(lambda: ("slow_consumer", subject) in events)
    assert bus.stats.slow_consumers > 0
    go_on.set()
    await bus.drain()


async def test_a_full_queue_refuses(broker: Broker) -> None:
    bus = await NatsBus.connect(broker.settings(), broker.url)
    name = unique("s")
    await bus.ensure_stream(StreamSpec(name, (f"{name}.>",), work_queue=True, max_bytes=5000))
    for _ in range(4):
        await bus.append(f"{name}.x", b"x" * 1000)
    with pytest.raises(BusError, match="refused"):
        await bus.append(f"{name}.x", b"x" * 1000)
    await bus.ensure_stream(StreamSpec(name, (f"{name}.>",), work_queue=True, max_bytes=50_000))
    await bus.append(f"{name}.x", b"x" * 1000)
    await bus.drain()


async def test_a_raising_listener_harms_nobody(own_broker: Callable[..., Broker]) -> None:
    broker = own_broker()
    port = int(broker.url.rpartition(":")[2])
    bus = await NatsBus.connect(broker.settings(), broker.url)

    def bad(*_: object) -> None:
        raise RuntimeError("on purpose")

    bus.on_event(bad)  # type: ignore[arg-type]
    broker.process.kill()
    broker.process.wait(10)
    own_broker(port)
    await wait_until(lambda: bus.stats.reconnects == 1, 15)
    got: list[bytes] = []
    await bus.subscribe("x", lambda m: got.append(m.data))
    bus.send("x", b"1")
    await wait_until(lambda: got == [b"1"])
    await bus.drain()


@pytest.mark.parametrize("batched", [True, False])
async def test_reading_a_bucket_leaves_no_consumer(broker: Broker, batched: bool) -> None:
    """A stream has room for so many consumers alone; a page reads buckets each second."""
    bus = await NatsBus.connect(broker.settings(), broker.url)
    bus.batched = batched
    name = unique("bucket")
    bucket = await bus.bucket(name)
    assert await bucket.entries() == []
    for number in range(5):
        await bucket.put(f"a.{number}", b"%d" % number)
    await bucket.delete("a.3")
    for _ in range(20):
        found = await bucket.entries("a.>")
    assert [(e.key, e.value) for e in found] == [(f"a.{n}", b"%d" % n) for n in (0, 1, 2, 4)]
    assert await bucket.entries("b.>") == []
    assert bucket._batched is batched
    info = await bus._js.stream_info(f"KV_{name}")
    assert info.state.consumer_count == 0
    await bus.drain()


async def test_a_bucket_that_changes_while_it_is_read_misses_nothing(broker: Broker) -> None:
    bus = await NatsBus.connect(broker.settings(), broker.url)
    bucket = await bus.bucket(unique("bucket"))
    for number in range(30):
        await bucket.put(f"a.{number}", b"")

    over = asyncio.Event()  # the client's publish can swallow a cancellation

    async def write() -> None:
        while not over.is_set():
            for number in range(30):
                await bucket.put(f"a.{number}", b"again")

    writing = asyncio.ensure_future(write())
    try:
        for _ in range(100):
            assert len(await bucket.entries()) == 30
    finally:
        over.set()
        await writing
    await bus.drain()


async def test_a_cancellation_that_comes_with_the_answer(broker: Broker) -> None:
    """A loop that is cancelled in the moment in which the broker answers ends all the same."""
    bus = await NatsBus.connect(broker.settings(), broker.url)
    subject = unique("s")
    asking: asyncio.Task[None]

    def answer(message: Message) -> None:
        bus.send(message.reply, b"")

    await bus.subscribe(subject, answer)
    client = bus._client
    inner = Client.request

    async def cancelled_then(*args: Any, **kwargs: Any) -> Any:
        found = await inner(client, *args, **kwargs)
        asking.cancel()  # as wait_for leaves it behind: asked for, and not raised
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return found

    async def ask() -> None:
        while True:
            await bus.request(subject, b"", timeout=5)

    asking = asyncio.ensure_future(ask())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "request", lambda _, *a, **k: cancelled_then(*a, **k))
        done, _ = await asyncio.wait({asking}, timeout=5)
    assert done
    assert asking.cancelled()
    await bus.drain()
