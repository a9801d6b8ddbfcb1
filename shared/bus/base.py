"""The contract of the bus; its words are NATS's words.

**What is promised.** Subscriptions outlive a lost connection. What ``send`` took while the
connection was away goes out, in order, once it is back; beyond a bound ``send`` raises. What
was in flight when the connection broke may be lost, as with any NATS publish: whoever needs
an answer asks again (calls do, see ``populace._runtime.caller``). ``request`` fails at once
when the connection breaks, and at once when nobody listens. ``append`` returns only when the
stream has stored the message. ``drain`` delivers what has arrived and sends what is waiting.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class Message:
    """A message as a handler gets it."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] | None = None

    def header(self, name: str) -> str | None:
        """A header's value, or None."""
        return self.headers.get(name) if self.headers else None


Handler = Callable[[Message], Awaitable[None] | None]
"""Takes one message; plain functions cost less than coroutines."""


class Subscription(abc.ABC):
    """What ``subscribe`` returns."""

    @abc.abstractmethod
    async def unsubscribe(self) -> None:
        """Stop receiving; what has arrived and isn't handled yet is dropped."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream that keeps what is published on its subjects."""

    name: str
    subjects: tuple[str, ...]
    work_queue: bool = False
    """Each message goes to one consumer and is removed once acknowledged."""
    keep: bool = False
    """Full, it refuses new messages rather than to lose old ones; work queues always do."""
    compressed: bool = False
    """Whether the broker compresses what it stores."""
    max_bytes: int = 1 << 30
    """Beyond this the oldest messages go, or new ones are refused (work queues, ``keep``)."""
    max_age: float = 7 * 86400.0
    """Seconds after which a message goes; 0: never."""
    description: str = ""


class Delivery(abc.ABC):
    """A message from a stream that waits for its acknowledgement."""

    subject: str
    data: bytes
    headers: Mapping[str, str] | None
    sequence: int
    attempt: int
    """1 at the first delivery, as far as the broker knows: one that is killed forgets the last."""
    stored_at: float
    """Unix time at which the stream took it, by the broker's clock."""

    @abc.abstractmethod
    async def ack(self) -> None:
        """Done: don't deliver it again."""

    @abc.abstractmethod
    async def nak(self, delay: float = 0.0) -> None:
        """Deliver it again, after ``delay`` seconds."""

    @abc.abstractmethod
    async def term(self) -> None:
        """Give it up: it can never be handled."""

    @abc.abstractmethod
    async def in_progress(self) -> None:
        """Still at work: start the acknowledgement's time anew."""


async def keep_alive(delivery: Delivery, every: float) -> None:
    """Tell the broker every so many seconds that a message is still at work, until cancelled."""
    while True:
        await asyncio.sleep(every)
        await delivery.in_progress()


class Consumer(abc.ABC):
    """Takes messages from a stream, as many as it wants."""

    @abc.abstractmethod
    async def fetch(self, limit: int, timeout: float) -> list[Delivery]:
        """Up to ``limit`` messages; waits up to ``timeout`` seconds for the first.

        Returns an empty list when none came, also when the connection was away.
        """

    @abc.abstractmethod
    async def left(self) -> int:
        """How many messages it has still to take, those that aren't acknowledged yet included.

        Raises:
            BusError: no answer.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop taking; the consumer's place in the stream is kept if it is durable."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in a bucket and the revision that wrote it."""

    key: str
    value: bytes
    revision: int


class KeyValue(abc.ABC):
    """A bucket of small values with revisions."""

    @abc.abstractmethod
    async def get(self, key: str) -> Entry | None:
        """The entry, or None if there is none."""

    @abc.abstractmethod
    async def put(self, key: str, value: bytes) -> int:
        """Write; returns the new revision."""

    @abc.abstractmethod
    async def create(self, key: str, value: bytes) -> int:
        """Write only if there is no entry.

        Raises:
            RevisionConflictError: there is one.
        """

    @abc.abstractmethod
    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write only if the entry still has the revision.

        Raises:
            RevisionConflictError: it has another.
        """

    async def write(self, key: str, value: bytes, revision: int) -> int:
        """Write what was read at a revision, 0 if there was nothing; returns the new revision.

        Raises:
            RevisionConflictError: it was changed since.
        """
        if revision:
            return await self.update(key, value, revision)
        return await self.create(key, value)

    @abc.abstractmethod
    async def delete(self, key: str, revision: int = 0) -> None:
        """Remove the entry, if there is one.

        Args:
            key: whose.
            revision: only if it still has this one; 0: whichever it has.

        Raises:
            RevisionConflictError: it has another.
        """

    @abc.abstractmethod
    async def entries(self, pattern: str = ">") -> list[Entry]:
        """All entries whose keys match (wildcards as in subjects), in no order."""


@dataclass(slots=True)
class BusStats:
    """Counters of one connection."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    reconnects: int = 0
    handler_errors: int = 0
    slow_consumers: int = 0
    """Times that a subscription's messages were dropped since it did not keep up."""
    errors: list[str] = field(default_factory=list)
    """The last few errors that the client reported aside, newest last."""


BusEvent = Literal["disconnected", "reconnected", "closed", "slow_consumer"]


class Bus(abc.ABC):
    """One connection to a broker."""

    process: str
    """Name of this connection's process: a token, part of its inboxes' subjects."""
    stats: BusStats

    @property
    @abc.abstractmethod
    def max_payload(self) -> int:
        """Bytes that one message may hold, headers included."""

    @property
    @abc.abstractmethod
    def connected(self) -> bool:
        """Whether the connection is up right now."""

    @abc.abstractmethod
    def send(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish without waiting; messages leave in the order of the calls.

        Raises:
            BusOverflowError: too much is waiting already.
            PayloadTooLargeError: the message is over ``max_payload``.
            BusError: the bus is closed.
        """

    @abc.abstractmethod
    async def sent(self, below: int = 0) -> None:
        """Wait until at most ``below`` bytes wait to leave this process."""

    @abc.abstractmethod
    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout: float,
        headers: dict[str, str] | None = None,
    ) -> Message:
        """Publish, and wait for one answer.

        Raises:
            NoRespondersError: nobody listens there.
            BusTimeoutError: no answer within ``timeout`` seconds.
            BusDisconnectedError: the connection broke meanwhile.
        """

    @abc.abstractmethod
    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Have the handler called for each message, one after the other.

        ``*`` stands for one token and ``>`` for the rest. Of the subscribers with the same
        queue, one gets each message. What a handler raises is logged and counted.
        """

    @abc.abstractmethod
    async def flush(self, timeout: float = 10.0) -> None:
        """Wait until the broker has taken all that was sent and subscribed."""

    @abc.abstractmethod
    def on_event(self, callback: Callable[[BusEvent, str], None]) -> None:
        """Be told when the connection is lost, back or closed, and of dropped messages."""

    @abc.abstractmethod
    async def drain(self, timeout: float = 10.0) -> None:
        """Stop taking messages, handle those that arrived, send what is waiting, close."""

    # What lasts
    @abc.abstractmethod
    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Make the stream, or bring an existing one to this specification."""

    @abc.abstractmethod
    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        headers: dict[str, str] | None = None,
        message_id: str = "",
        timeout: float = 10.0,
    ) -> int:
        """Publish to a stream and wait until it is stored; returns its sequence number.

        A message whose ``message_id`` was stored before (within two minutes) isn't again.

        Raises:
            NoRespondersError: no stream takes the subject.
            BusTimeoutError: not acknowledged in time.
            BusError: the stream refused it (it is full, say).
        """

    @abc.abstractmethod
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
        """Take messages as one of the consumers of this durable name, from where they are.

        Unacknowledged messages are delivered again after ``ack_wait`` seconds. Who takes
        ``alone`` gets what another before it left unacknowledged at once, and in its order. A
        ``new`` one, if there is none of the name, begins with what comes from now on. A place that
        nobody has taken for ``kept_for`` seconds is forgotten (0: never).
        """

    @abc.abstractmethod
    async def drop_consumers(self, stream: str, prefix: str) -> int:
        """Forget all durable names of a stream that begin so; returns how many there were.

        Raises:
            BusError: no answer.
        """

    @abc.abstractmethod
    def replay(
        self, stream: str, subjects: tuple[str, ...], *, idle: float = 1.0
    ) -> AsyncIterator[Message | None]:
        """What the stream holds on the subjects, oldest first, then what comes.

        Yields None whenever nothing came for ``idle`` seconds. Never ends by itself.
        """

    @abc.abstractmethod
    def read(
        self,
        stream: str,
        subjects: tuple[str, ...],
        *,
        newest: int = 0,
        patience: float = 30.0,
    ) -> AsyncIterator[Message]:
        """What the stream holds on the subjects by now, oldest first; then it ends.

        What is added meanwhile may come too. Each message comes once, whatever becomes of the
        connection. With ``newest``, only those come that are among so many last numbers of the
        stream, counted from the last of these subjects.

        Raises:
            BusError: nothing came for ``patience`` seconds though there is more.
        """

    @abc.abstractmethod
    async def last(self, stream: str, subject: str, *, exact: bool = False) -> Message | None:
        """The latest message that the stream holds on a subject (no wildcards), or None.

        In a cluster any copy may answer, which may lag behind, unless it must be ``exact``.

        Raises:
            BusError: there is no such stream, or no answer.
        """

    @abc.abstractmethod
    async def held(self, stream: str, subject: str) -> tuple[int, float]:
        """How many messages a stream holds on a subject, and how old the oldest is, in seconds.

        The subject may have wildcards. Of a work queue those count that are not acknowledged yet.

        Raises:
            BusError: there is no such stream, or no answer.
        """

    @abc.abstractmethod
    async def purge(self, stream: str, subject: str, *, before: int = 0) -> None:
        """Remove what the stream holds on a subject (wildcards as usual).

        With ``before``, only what has a lower sequence number goes.
        """

    @abc.abstractmethod
    async def bucket(self, name: str, *, ttl: float = 0.0, history: int = 1) -> KeyValue:
        """A key-value bucket, made if needed; entries go after ``ttl`` seconds (0: never)."""
