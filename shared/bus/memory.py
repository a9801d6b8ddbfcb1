"""The in-memory bus: NATS's behaviour within one process, for local mode and tests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace

from shared.bus.base import (
    Bus,
    BusEvent,
    BusStats,
    Consumer,
    Delivery,
    Entry,
    Handler,
    KeyValue,
    Message,
    StreamSpec,
    Subscription,
)
from shared.errors import (
    BusError,
    BusTimeoutError,
    NoRespondersError,
    PayloadTooLargeError,
    RevisionConflictError,
)
from shared.ids import new_id
from shared.logs import get_logger

_log = get_logger(__name__)


def subject_matches(pattern: str, subject: str) -> bool:
    """Whether a subject falls under a pattern with ``*`` and ``>``."""
    if pattern == subject:
        return True
    wanted, got = pattern.split("."), subject.split(".")
    for i, part in enumerate(wanted):
        if part == ">":
            return len(got) > i
        if i >= len(got) or part not in ("*", got[i]):
            return False
    return len(wanted) == len(got)


class _MemorySubscription(Subscription):
    """Handlers of one subscription run one after the other, as with nats-py."""

    def __init__(self, bus: MemoryBus, pattern: str, handler: Handler, queue: str) -> None:
        self.bus, self.pattern, self.queue = bus, pattern, queue
        self._handler = handler
        self._waiting: deque[Message] = deque()
        self._task: asyncio.Task[None] | None = None
        self._scheduled = False
        self.closed = False

    def deliver(self, message: Message) -> None:
        self._waiting.append(message)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Run plain handlers here; the first that must wait goes on in a task."""
        while self._waiting and not self.closed:
            message = self._waiting.popleft()
            stats = self.bus.stats
            stats.received += 1
            stats.received_bytes += len(message.data)
            try:
                result = self._handler(message)
            except Exception as error:
                self._failed(error)
                continue
            if result is not None:
                self._task = asyncio.ensure_future(self._finish(result))
                return
        self._scheduled = False

    async def _finish(self, result: object) -> None:
        try:
            await result  # type: ignore[misc]
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            self._failed(RuntimeError("the handler was cancelled from within"))
        except Exception as error:
            self._failed(error)
        self._task = None
        self._pump()

    def _failed(self, error: BaseException) -> None:
        self.bus.stats.handler_errors += 1
        _log.error("a message handler raised", subject=self.pattern, exc_info=error)

    async def idle(self) -> None:
        while self._waiting or self._task is not None:
            if self._task is not None:
                await asyncio.wait({self._task})
            else:
                await asyncio.sleep(0)

    async def unsubscribe(self) -> None:
        self.closed = True
        self.bus.broker.subscriptions.discard(self)


@dataclass(slots=True)
class _Stored:
    sequence: int
    subject: str
    data: bytes
    headers: Mapping[str, str] | None
    at: float


@dataclass
class _Stream:
    spec: StreamSpec
    messages: dict[int, _Stored] = field(default_factory=dict)
    last: int = 0
    size: int = 0
    ids: dict[str, int] = field(default_factory=dict)
    consumers: dict[str, _Durable] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Let all who wait for a message look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    def remove(self, sequence: int) -> None:
        gone = self.messages.pop(sequence, None)
        if gone is not None:
            self.size -= len(gone.data)

    def store(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> int:
        now = time.monotonic()
        if self.spec.max_age:
            for sequence in list(self.messages):
                if now - self.messages[sequence].at <= self.spec.max_age:
                    break
                self.remove(sequence)
        if self.size + len(data) > self.spec.max_bytes:
            if self.spec.work_queue or self.spec.keep:
                raise BusError(f"the stream {self.spec.name!r} is full")
            while self.messages and self.size + len(data) > self.spec.max_bytes:
                self.remove(next(iter(self.messages)))
        self.last += 1
        self.messages[self.last] = _Stored(self.last, subject, data, headers, now)
        self.size += len(data)
        self.wake()
        return self.last


@dataclass
class _Durable:
    """A consumer's place in a stream, shared by all that pull under its name."""

    stream: _Stream
    subjects: tuple[str, ...]
    ack_wait: float
    max_waiting: int
    next: int = 1
    waiting: dict[int, float] = field(default_factory=dict)
    """Sequence to the time at which it is delivered again."""
    attempts: dict[int, int] = field(default_factory=dict)

    def take(self, limit: int) -> list[_Stored]:
        now = time.monotonic()
        found: list[_Stored] = []
        for sequence in [s for s, due in self.waiting.items() if due <= now]:
            if len(found) == limit:
                return found
            stored = self.stream.messages.get(sequence)
            if stored is None:
                self.forget(sequence)
            else:
                self._hand_out(stored, found)
        while self.next <= self.stream.last and len(found) < limit:
            if len(self.waiting) >= self.max_waiting:
                break
            stored = self.stream.messages.get(self.next)
            self.next += 1
            if stored is not None and self.takes(stored):
                self._hand_out(stored, found)
        return found

    def takes(self, stored: _Stored) -> bool:
        return not self.subjects or any(subject_matches(p, stored.subject) for p in self.subjects)

    def _hand_out(self, stored: _Stored, found: list[_Stored]) -> None:
        self.waiting[stored.sequence] = time.monotonic() + self.ack_wait
        self.attempts[stored.sequence] = self.attempts.get(stored.sequence, 0) + 1
        found.append(stored)

    def forget(self, sequence: int) -> None:
        self.waiting.pop(sequence, None)
        self.attempts.pop(sequence, None)

    def done(self, sequence: int) -> None:
        self.forget(sequence)
        if self.stream.spec.work_queue:
            self.stream.remove(sequence)
        self.stream.wake()

    def next_due(self) -> float | None:
        return min(self.waiting.values(), default=None)


class _MemoryDelivery(Delivery):
    def __init__(self, durable: _Durable, stored: _Stored) -> None:
        self._durable = durable
        self.subject, self.data, self.headers = stored.subject, stored.data, stored.headers
        self.sequence = stored.sequence
        self.attempt = durable.attempts[stored.sequence]
        self.stored_at = time.time() - (time.monotonic() - stored.at)

    async def ack(self) -> None:
        self._durable.done(self.sequence)

    async def nak(self, delay: float = 0.0) -> None:
        if self.sequence in self._durable.waiting:
            self._durable.waiting[self.sequence] = time.monotonic() + delay
            self._durable.stream.wake()

    async def term(self) -> None:
        self._durable.done(self.sequence)

    async def in_progress(self) -> None:
        if self.sequence in self._durable.waiting:
            self._durable.waiting[self.sequence] = time.monotonic() + self._durable.ack_wait


class _MemoryConsumer(Consumer):
    def __init__(self, durable: _Durable) -> None:
        self._durable = durable
        self._closed = False

    async def fetch(self, limit: int, timeout: float) -> list[Delivery]:
        durable = self._durable
        deadline = time.monotonic() + timeout
        while not self._closed:
            changed = durable.stream.changed
            found = durable.take(limit)
            if found:
                return [_MemoryDelivery(durable, stored) for stored in found]
            wake_at = min(deadline, durable.next_due() or deadline)
            wait = wake_at - time.monotonic()
            if deadline - time.monotonic() <= 0:
                break
            try:
                await asyncio.wait_for(changed.wait(), max(wait, 0.001))
            except TimeoutError:
                continue
        return []

    async def left(self) -> int:
        durable = self._durable
        later = [m for m in durable.stream.messages.values() if m.sequence >= durable.next]
        return len(durable.waiting) + sum(durable.takes(stored) for stored in later)

    async def close(self) -> None:
        self._closed = True
        self._durable.stream.wake()


@dataclass
class _Value:
    value: bytes
    revision: int
    at: float


class _MemoryBucket(KeyValue):
    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._values: dict[str, _Value] = {}
        self._revision = 0

    def _live(self, key: str) -> _Value | None:
        held = self._values.get(key)
        if held is not None and self.ttl and time.monotonic() - held.at > self.ttl:
            del self._values[key]
            return None
        return held

    async def get(self, key: str) -> Entry | None:
        held = self._live(key)
        return None if held is None else Entry(key, held.value, held.revision)

    async def put(self, key: str, value: bytes) -> int:
        self._revision += 1
        self._values[key] = _Value(value, self._revision, time.monotonic())
        return self._revision

    async def create(self, key: str, value: bytes) -> int:
        if self._live(key) is not None:
            raise RevisionConflictError(f"the entry {key!r} exists already")
        return await self.put(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        held = self._live(key)
        if held is None or held.revision != revision:
            raise RevisionConflictError(f"the entry {key!r} was changed by another")
        return await self.put(key, value)

    async def delete(self, key: str, revision: int = 0) -> None:
        held = self._live(key)
        if revision and (held is None or held.revision != revision):
            raise RevisionConflictError(f"the entry {key!r} was changed by another")
        self._values.pop(key, None)

    async def entries(self, pattern: str = ">") -> list[Entry]:
        matching = [key for key in self._values if subject_matches(pattern, key)]
        live = [(key, self._live(key)) for key in matching]
        return [Entry(key, held.value, held.revision) for key, held in live if held is not None]


class MemoryBroker:
    """What several in-memory connections share; belongs to one event loop."""

    def __init__(self, *, max_payload: int = 1 << 20) -> None:
        self.max_payload = max_payload
        self.subscriptions: set[_MemorySubscription] = set()
        self.streams: dict[str, _Stream] = {}
        self.buckets: dict[str, _MemoryBucket] = {}
        self._turn = 0

    def connect(self, process: str = "") -> MemoryBus:
        """A new connection to this broker."""
        return MemoryBus(self, process=process or new_id("p"))

    def publish(self, message: Message) -> bool:
        """Deliver to all that match; returns whether anyone listens."""
        groups: dict[tuple[str, str], list[_MemorySubscription]] = {}
        heard = False
        for subscription in self.subscriptions:
            if subject_matches(subscription.pattern, message.subject):
                heard = True
                if subscription.queue:
                    key = (subscription.pattern, subscription.queue)
                    groups.setdefault(key, []).append(subscription)
                else:
                    subscription.deliver(message)
        for members in groups.values():
            self._turn += 1
            members[self._turn % len(members)].deliver(message)
        return heard

    def store(self, message: Message, message_id: str = "") -> int | None:
        """Keep the message in the stream that takes its subject; None if none does."""
        for stream in self.streams.values():
            if any(subject_matches(p, message.subject) for p in stream.spec.subjects):
                if message_id and message_id in stream.ids:
                    return stream.ids[message_id]
                sequence = stream.store(message.subject, message.data, message.headers)
                if message_id:
                    stream.ids[message_id] = sequence
                return sequence
        return None


class MemoryBus(Bus):
    """A connection to a ``MemoryBroker``; keeps the contract of ``Bus``."""

    def __init__(self, broker: MemoryBroker, *, process: str) -> None:
        self.broker = broker
        self.process = process
        self.stats = BusStats()
        self._subscriptions: list[_MemorySubscription] = []
        self._listeners: list[Callable[[BusEvent, str], None]] = []
        self._closed = False
        self._requests = 0

    @property
    def max_payload(self) -> int:
        """Bytes that one message may hold."""
        return self.broker.max_payload

    @property
    def connected(self) -> bool:
        """True until drained."""
        return not self._closed

    def _check(self, data: bytes) -> None:
        if self._closed:
            raise BusError("the bus is closed")
        if len(data) > self.max_payload:
            raise PayloadTooLargeError(
                f"a message of {len(data)} bytes is over the broker's limit of {self.max_payload}"
            )

    def send(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """See ``Bus.send``."""
        self._check(data)
        self.stats.sent += 1
        self.stats.sent_bytes += len(data)
        message = Message(subject, data, reply, headers)
        self.broker.store(message)
        self.broker.publish(message)

    async def sent(self, below: int = 0) -> None:
        """Nothing ever waits in memory."""

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout: float,
        headers: dict[str, str] | None = None,
    ) -> Message:
        """See ``Bus.request``."""
        self._check(data)
        self._requests += 1
        reply = f"_memory.{self.process}.{self._requests}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def take(message: Message) -> None:
            if not answer.done():
                answer.set_result(message)

        subscription = _MemorySubscription(self, reply, take, "")
        self.broker.subscriptions.add(subscription)
        try:
            self.stats.sent += 1
            self.stats.sent_bytes += len(data)
            message = Message(subject, data, reply, headers)
            stored = self.broker.store(message)
            if not self.broker.publish(message) and stored is None:
                raise NoRespondersError(f"nobody listens on {subject!r}")
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise BusTimeoutError(f"no answer on {subject!r} within {timeout:g} s") from None
        finally:
            await subscription.unsubscribe()

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """See ``Bus.subscribe``."""
        subscription = _MemorySubscription(self, subject, handler, queue)
        self.broker.subscriptions.add(subscription)
        self._subscriptions.append(subscription)
        return subscription

    async def flush(self, timeout: float = 10.0) -> None:
        """Let what was sent reach its handlers' queues."""
        await asyncio.sleep(0)

    def on_event(self, callback: Callable[[BusEvent, str], None]) -> None:
        """See ``Bus.on_event``; only "closed" ever happens in memory."""
        self._listeners.append(callback)

    async def drain(self, timeout: float = 10.0) -> None:
        """See ``Bus.drain``."""
        if self._closed:
            return
        for subscription in self._subscriptions:
            self.broker.subscriptions.discard(subscription)
        idle = asyncio.gather(*(s.idle() for s in self._subscriptions))
        try:
            await asyncio.wait_for(idle, timeout)
        except TimeoutError:
            _log.warning("handlers were still running when the bus closed", process=self.process)
        self._closed = True
        for callback in self._listeners:
            callback("closed", "drained")

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """See ``Bus.ensure_stream``."""
        held = self.broker.streams.get(spec.name)
        if held is None:
            self.broker.streams[spec.name] = _Stream(spec)
        else:
            held.spec = replace(spec)

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        headers: dict[str, str] | None = None,
        message_id: str = "",
        timeout: float = 10.0,
    ) -> int:
        """See ``Bus.append``."""
        self._check(data)
        message = Message(subject, data, "", headers)
        sequence = self.broker.store(message, message_id)
        if sequence is None:
            raise NoRespondersError(f"no stream takes {subject!r}")
        self.stats.sent += 1
        self.stats.sent_bytes += len(data)
        self.broker.publish(message)
        return sequence

    def _stream(self, name: str) -> _Stream:
        try:
            return self.broker.streams[name]
        except KeyError:
            raise BusError(f"there is no stream {name!r}") from None

    async def consumer(
        self,
        stream: str,
        *,
        durable: str,
        subjects: tuple[str, ...] = (),
        ack_wait: float = 30.0,
        max_waiting_acks: int = 1000,
        alone: bool = False,
        new: bool = False,
        kept_for: float = 0.0,
    ) -> Consumer:
        """See ``Bus.consumer``."""
        held = self._stream(stream)
        place = held.consumers.get(durable)
        if place is None:
            place = _Durable(held, subjects, ack_wait, max_waiting_acks)
            if new:
                place.next = held.last + 1
            held.consumers[durable] = place
        elif alone and place.waiting:
            place.next = min(place.waiting)
            place.waiting.clear()
        return _MemoryConsumer(place)

    async def drop_consumers(self, stream: str, prefix: str) -> int:
        """See ``Bus.drop_consumers``."""
        held = self._stream(stream).consumers
        names = [name for name in held if name.startswith(prefix)]
        for name in names:
            del held[name]
        return len(names)

    async def replay(
        self, stream: str, subjects: tuple[str, ...], *, idle: float = 1.0
    ) -> AsyncIterator[Message | None]:
        """See ``Bus.replay``."""
        held = self._stream(stream)
        place = _Durable(held, subjects, float("inf"), 1 << 62)
        while True:
            changed = held.changed
            found = place.take(100)
            for stored in found:
                place.forget(stored.sequence)
                yield Message(stored.subject, stored.data, "", stored.headers)
            if not found:
                try:
                    await asyncio.wait_for(changed.wait(), idle)
                except TimeoutError:
                    yield None

    async def read(
        self,
        stream: str,
        subjects: tuple[str, ...],
        *,
        newest: int = 0,
        patience: float = 30.0,
    ) -> AsyncIterator[Message]:
        """See ``Bus.read``."""
        found = {
            number: stored
            for number, stored in self._stream(stream).messages.items()
            if any(subject_matches(subject, stored.subject) for subject in subjects)
        }
        first = max(found, default=0) - newest if newest else 0
        for number, stored in found.items():
            if number > first:
                yield Message(stored.subject, stored.data, "", stored.headers)

    async def bucket(
        self,
        name: str,
        *,
        ttl: float = 0.0,
        history: int = 1,
    ) -> KeyValue:
        """See ``Bus.bucket``."""
        held = self.broker.buckets.setdefault(name, _MemoryBucket(ttl))
        held.ttl = ttl or held.ttl
        return held

    async def last(self, stream: str, subject: str, *, exact: bool = False) -> Message | None:
        """See ``Bus.last``."""
        for stored in reversed(self._stream(stream).messages.values()):
            if stored.subject == subject:
                return Message(stored.subject, stored.data, "", stored.headers)
        return None

    async def held(self, stream: str, subject: str) -> tuple[int, float]:
        """See ``Bus.held``."""
        messages = self._stream(stream).messages.values()
        found = [s for s in messages if subject_matches(subject, s.subject)]
        return len(found), time.monotonic() - found[0].at if found else 0.0

    async def purge(self, stream: str, subject: str, *, before: int = 0) -> None:
        """See ``Bus.purge``."""
        held = self._stream(stream)
        for sequence, stored in list(held.messages.items()):
            if subject_matches(subject, stored.subject) and (not before or sequence < before):
                held.remove(sequence)
