"""The bus over NATS: nats-py with its traps fenced off.

What nats-py does that the contract must not show, and what is done here about it: an error
callback that raises kills the reader (ours never raise); ``publish`` swallows cancellation
(one publisher task does all plain publishing); a request waits its whole time after the
connection broke (ours fails at once); a handler that raises CancelledError ends its
subscription (caught); an empty or interrupted fetch raises (an empty list).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

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
from shared.bus.facts import BrokerFacts, broker_facts
from shared.errors import (
    BusDisconnectedError,
    BusError,
    BusOverflowError,
    BusTimeoutError,
    BusUnavailableError,
    NoRespondersError,
    PayloadTooLargeError,
    RevisionConflictError,
)
from shared.ids import new_id
from shared.logs import get_logger
from shared.settings import Settings

_log = get_logger(__name__)

_LIST_WITHIN = 20.0
_MOST_AT_ONCE, _TRIES = 1024, 30
"""Values that the broker gives by one request, and how often that is tried while they change."""
_CONSUMER_LEFT_FOR = 10.0
"""Seconds after which the broker removes a consumer whose maker could not."""

_OUTBOX_LIMIT = 256 << 20
_HEADROOM = 16 << 10
"""Bytes of a message left to headers and the protocol."""
_NO_MESSAGE, _OTHER_REVISION = 10037, 10071
"""Codes of JetStream's errors: a subject holds nothing; its last message is another."""
_READ_AT_ONCE, _READ_IDLE, _READ_PAUSE = 100, 2.0, 0.2
_PENDING_MESSAGES = 524_288
_PENDING_BYTES = 512 << 20


def without_secret(url: str) -> str:
    """A server address as it may be shown: the part before ``@`` is left out."""
    scheme, found, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if found else url.rpartition("@")[2]


class _Client(Client):
    """nats-py's client, which does not lose cancellations.

    It waits by ``asyncio.wait_for``, which before Python 3.12 forgets a cancellation that comes in
    the very moment in which what it waits for is there. A loop that was cancelled just then would
    go on for ever, and whoever awaits its end as well.
    """

    async def request(self, *args: Any, **kwargs: Any) -> Msg:
        found: Msg = await _heeding(super().request(*args, **kwargs))
        return found

    async def publish(self, *args: Any, **kwargs: Any) -> None:
        await _heeding(super().publish(*args, **kwargs))

    async def flush(self, *args: Any, **kwargs: Any) -> None:
        await _heeding(super().flush(*args, **kwargs))


async def _heeding(work: Awaitable[Any]) -> Any:
    """Await something, and be cancelled if that was asked for meanwhile."""
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    found = await work
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return found


class _NatsSubscription(Subscription):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def unsubscribe(self) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self._inner.unsubscribe()


class _NatsDelivery(Delivery):
    def __init__(self, message: Msg) -> None:
        self._message = message
        self.subject, self.data, self.headers = message.subject, message.data, message.headers
        meta = message.metadata
        self.sequence = meta.sequence.stream
        self.attempt = meta.num_delivered or 1
        self.stored_at = meta.timestamp.timestamp()

    async def ack(self) -> None:
        await self._tell(self._message.ack())

    async def nak(self, delay: float = 0.0) -> None:
        await self._tell(self._message.nak(delay=delay or None))

    async def term(self) -> None:
        await self._tell(self._message.term())

    async def in_progress(self) -> None:
        await self._tell(self._message.in_progress())

    async def _tell(self, word: Awaitable[None]) -> None:
        # A lost acknowledgement only means that the message comes once more.
        try:
            await word
        except nats.errors.Error as error:
            _log.warning("an acknowledgement was not sent", subject=self.subject, error=str(error))


class _NatsConsumer(Consumer):
    def __init__(
        self, js: JetStreamContext, stream: str, config: api.ConsumerConfig, pulls: set[Any]
    ) -> None:
        self._js, self._stream, self._config = js, stream, config
        self._inner: Any = None
        self._pulls = pulls
        self._made = False
        """Whether it is there already, and is to be left as it is."""

    async def begin_again(self) -> None:
        """Go back to the first message that an earlier taker left unacknowledged."""
        # A consumer can't go back. Another of a second name is made from there, and the first
        # removed only then, so that a crash between loses no place.
        first = self._config.durable_name or ""
        found: dict[str, tuple[int, int]] = {}
        for name in (first, f"{first}-2"):
            with contextlib.suppress(nats.js.errors.NotFoundError):
                info = await self._js.consumer_info(self._stream, name)
                floor = info.ack_floor.stream_seq if info.ack_floor is not None else 0
                start = (info.config.opt_start_seq or 1) - 1
                found[name] = max(floor, start), info.num_ack_pending or 0
        if not found:
            return
        best = max(found, key=lambda name: found[name])
        for name in found.keys() - {best}:
            await self._js.delete_consumer(self._stream, name)
        position, pending = found[best]
        self._config.durable_name = best
        self._made = True
        if pending:
            self._config.durable_name = first if best != first else f"{first}-2"
            self._config.deliver_policy = api.DeliverPolicy.BY_START_SEQUENCE
            self._config.opt_start_seq = position + 1
            await self._js.add_consumer(self._stream, self._config)
            await self._js.delete_consumer(self._stream, best)

    async def bind(self) -> None:
        if not self._made:
            with contextlib.suppress(nats.js.errors.BadRequestError):  # it is there, made otherwise
                await self._js.add_consumer(self._stream, self._config)
        self._inner = await self._js.pull_subscribe_bind(
            consumer=self._config.durable_name, stream=self._stream
        )
        self._pulls.add(self._inner)

    async def fetch(self, limit: int, timeout: float) -> list[Delivery]:
        try:
            if self._inner is None:
                await self.bind()
            messages = await self._inner.fetch(limit, timeout=timeout)
            return [_NatsDelivery(m) for m in messages]
        except TimeoutError:
            return []
        except (nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError):
            await asyncio.sleep(min(timeout, 0.2))
            return []
        except nats.errors.Error as error:
            # The consumer or its stream went away with the server, or is moving: bind anew.
            _log.warning("a fetch failed", stream=self._stream, error=str(error))
            self._made = False
            await self.close()
            await asyncio.sleep(min(timeout, 0.2))
            return []

    async def left(self) -> int:
        try:
            info = await self._js.consumer_info(self._stream, self._config.durable_name or "")
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"a place in {self._stream!r} can't be asked for: {error}") from error
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            self._pulls.discard(inner)
            with contextlib.suppress(nats.errors.Error):
                await inner.unsubscribe()


class _NatsBucket(KeyValue):
    def __init__(self, bus: NatsBus, inner: Any, ttl: float) -> None:
        self._bus = bus
        self._inner = inner
        self.ttl = ttl
        """The time to live that was asked for here."""
        self._batched = bus.batched
        """Whether the broker gives all values by one request: not so before NATS 2.11."""

    async def get(self, key: str) -> Entry | None:
        try:
            found = await self._inner.get(key)
        except nats.js.errors.KeyNotFoundError:
            return None
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"the entry {key!r} can't be read: {error}") from error
        return Entry(key, found.value or b"", found.revision)

    async def put(self, key: str, value: bytes) -> int:
        try:
            return int(await self._inner.put(key, value))
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"the entry {key!r} can't be written: {error}") from error

    async def create(self, key: str, value: bytes) -> int:
        return await self._conditional(key, self._inner.create(key, value))

    async def update(self, key: str, value: bytes, revision: int) -> int:
        return await self._conditional(key, self._inner.update(key, value, last=revision))

    async def _conditional(self, key: str, write: Awaitable[Any]) -> int:
        try:
            return int(await write)
        except nats.js.errors.KeyWrongLastSequenceError:
            raise RevisionConflictError(
                f"the entry {key!r} exists already or was changed by another"
            ) from None
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"the entry {key!r} can't be written: {error}") from error

    async def delete(self, key: str, revision: int = 0) -> None:
        try:
            await self._inner.delete(key, last=revision or None)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _OTHER_REVISION:
                raise BusError(f"the entry {key!r} can't be deleted: {error}") from error
            raise RevisionConflictError(f"the entry {key!r} was changed by another") from None
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"the entry {key!r} can't be deleted: {error}") from error

    async def entries(self, pattern: str = ">") -> list[Entry]:
        try:
            async with asyncio.timeout(_LIST_WITHIN):
                # Where there are copies, any of them would answer, which may lag behind.
                for _ in range(_TRIES):
                    if not self._batched:
                        break
                    found = await self._at_once(pattern)
                    if found is not None:
                        return found
                return await self._one_by_one(pattern)
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"a bucket can't be read: {error}") from error

    async def _at_once(self, pattern: str) -> list[Entry] | None:
        """All entries by one request (NATS 2.11 and later); None: it can't be done so."""
        client, inner = self._bus._client, self._inner
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        found: list[Entry] = []
        try:
            asked = json.dumps({"multi_last": [f"{inner._pre}{pattern}"], "batch": _MOST_AT_ONCE})
            subject = f"{self._bus._js._prefix}.DIRECT.GET.{inner._stream}"
            await client.publish(subject, asked.encode(), reply=inbox)
            while True:
                message = await subscription.next_msg(_LIST_WITHIN)
                headers = message.headers or {}
                status = headers.get("Status")
                if status == "204":
                    return found
                if status == "404":
                    # Nothing there; or a value was replaced while it was read: then once more.
                    return None if found or "Result" not in headers.get("Description", "") else []
                if status is not None:
                    if status != "413":  # too many: it may be otherwise another time
                        self._batched = False
                    return None
                if not _is_gone(headers):
                    key = headers["Nats-Subject"].removeprefix(inner._pre)
                    found.append(Entry(key, message.data, int(headers["Nats-Sequence"])))
        finally:
            await subscription.unsubscribe()

    async def _one_by_one(self, pattern: str) -> list[Entry]:
        """All entries by a consumer, which is removed again: a stream has room for some alone."""
        found: list[Entry] = []
        watcher = await self._inner.watch(
            pattern, ignore_deletes=True, inactive_threshold=_CONSUMER_LEFT_FOR
        )
        try:
            async for entry in watcher:
                if not entry:  # the end of what is there
                    break
                found.append(Entry(entry.key, entry.value or b"", entry.revision or 0))
        finally:
            name = watcher._sub._consumer
            await watcher.stop()
            with contextlib.suppress(TimeoutError, nats.errors.Error):  # it goes by itself
                await self._bus._js.delete_consumer(self._inner._stream, name)
        return found


def _is_gone(headers: Mapping[str, str]) -> bool:
    """Whether a message of a bucket says that a key was deleted, or has expired."""
    return headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers


class NatsBus(Bus):
    """A connection to NATS; make one with ``NatsBus.connect``."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.stats = BusStats()
        self._client = _Client()
        self._js: JetStreamContext
        self._listeners: list[Callable[[BusEvent, str], None]] = []
        self._outbox: deque[tuple[str, bytes, str, dict[str, str] | None]] = deque()
        self._outbox_bytes = 0
        self._outbox_filled = asyncio.Event()
        self._outbox_drained = asyncio.Event()
        self._publisher: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()
        self._up = asyncio.Event()
        self._pulls: set[Any] = set()
        """Pull subscriptions; nats-py's drain would wait for what they hold back."""
        self._closed = False
        self._replicas = 1
        self.batched = True
        """Whether values of buckets are had by direct requests, many at once: not where there are
        copies, any of which would answer."""
        self._buckets: dict[str, _NatsBucket] = {}
        self._last_error = ""

    @classmethod
    async def connect(cls, settings: Settings, url: str, *, process: str = "") -> NatsBus:
        """Connect, trying for ``settings.connect_timeout`` seconds.

        Args:
            settings: credentials, prefix and time-out.
            url: one address, or several with commas between.
            process: this process's name (a token); default: a fresh one.

        Raises:
            BusUnavailableError: no broker answered, or it refused us; the message says which.
        """
        bus = cls(process or new_id("p"))
        bus._replicas = settings.replicas
        bus.batched = settings.replicas == 1
        options: dict[str, Any] = {
            "servers": [u.strip() for u in url.split(",") if u.strip()],
            "name": bus.process,
            "inbox_prefix": settings.subjects.inbox_prefix(bus.process),
            "connect_timeout": 2,
            "reconnect_time_wait": 0.2,
            "max_reconnect_attempts": -1,
            "ping_interval": 20,
            "pending_size": 8 << 20,
            "error_cb": bus._on_error,
            "disconnected_cb": bus._on_disconnected,
            "reconnected_cb": bus._on_reconnected,
            "closed_cb": bus._on_closed,
        }
        if settings.nats_creds:
            options["user_credentials"] = str(settings.nats_creds)
        if settings.nats_user and settings.nats_password:
            options["user"] = settings.nats_user
            options["password"] = settings.nats_password.get_secret_value()
        if settings.nats_token:
            options["token"] = settings.nats_token.get_secret_value()
        shown = ", ".join(without_secret(u) for u in options["servers"])
        try:
            await asyncio.wait_for(bus._client.connect(**options), settings.connect_timeout)
        except TimeoutError:
            reason = bus._last_error or "no answer"
            await bus._abandon()
            raise BusUnavailableError(
                f"no NATS broker could be reached at {shown} within "
                f"{settings.connect_timeout:g} s ({reason}); start one with 'populace up', or set "
                "POPULACE_NATS_URL to one that runs"
            ) from None
        except (nats.errors.Error, OSError, ValueError) as error:
            await bus._abandon()
            raise BusUnavailableError(
                f"the NATS broker at {shown} can't be used: {error or type(error).__name__}"
            ) from None
        bus._js = bus._client.jetstream(timeout=5)
        bus._up.set()
        bus._publisher = asyncio.create_task(bus._publish_all(), name="bus-publisher")
        return bus

    async def _abandon(self) -> None:
        self._closed = True
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._client.close(), 2)

    # Callbacks of the client; none may raise.
    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        self._last_error = text
        self.stats.errors = [*self.stats.errors[-9:], text]
        if isinstance(error, nats.errors.SlowConsumerError):
            self.stats.slow_consumers += 1
            _log.error("messages were dropped: a subscriber is too slow", subject=error.subject)
            self._tell("slow_consumer", error.subject)
        elif self._up.is_set():
            _log.warning("the broker connection reports an error", error=text)

    async def _on_disconnected(self) -> None:
        if self._closed:
            return
        self._up.clear()
        self._broken.set()
        self._broken = asyncio.Event()
        self._tell("disconnected", self._last_error)

    async def _on_reconnected(self) -> None:
        self.stats.reconnects += 1
        self._up.set()
        _log.info("reconnected to the broker", reconnects=self.stats.reconnects)
        self._tell("reconnected", "")

    async def _on_closed(self) -> None:
        self._up.clear()
        self._broken.set()
        self._tell("closed", self._last_error)

    def _tell(self, event: BusEvent, detail: str) -> None:
        for callback in self._listeners:
            try:
                callback(event, detail)
            except Exception:
                _log.exception("a bus listener raised")

    @property
    def max_payload(self) -> int:
        """Bytes that one message may hold: the broker's limit less room for headers."""
        return max(1024, int(self._client.max_payload) - _HEADROOM)

    @property
    def connected(self) -> bool:
        """Whether the connection is up right now."""
        return self._up.is_set() and not self._closed

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
        if self._outbox_bytes + len(data) > _OUTBOX_LIMIT:
            raise BusOverflowError(
                f"over {_OUTBOX_LIMIT >> 20} MB wait to be sent; the broker is away or too slow"
            )
        self._outbox.append((subject, data, reply, headers))
        self._outbox_bytes += len(data)
        self._outbox_filled.set()

    async def _publish_all(self) -> None:
        """Publish what ``send`` took, in order, while the connection is up."""
        client, outbox = self._client, self._outbox
        current = asyncio.current_task()
        assert current is not None
        while True:
            if not outbox:
                self._outbox_drained.set()
                self._outbox_filled.clear()
                await self._outbox_filled.wait()
            if not self._up.is_set():
                await self._up.wait()
            subject, data, reply, headers = outbox[0]
            try:
                await client.publish(subject, data, reply=reply, headers=headers)
            except nats.errors.OutboundBufferLimitError:
                await asyncio.sleep(0.01)  # the connection is going down: keep it and try again
                continue
            except nats.errors.ConnectionClosedError:
                return
            except Exception as error:
                _log.error("a message could not be sent", subject=subject, error=str(error))
            if current.cancelling():
                return
            outbox.popleft()
            self._outbox_bytes -= len(data)
            self.stats.sent += 1
            self.stats.sent_bytes += len(data)
            if self._outbox_bytes < (1 << 20):
                self._outbox_drained.set()

    async def sent(self, below: int = 0) -> None:
        """See ``Bus.sent``."""
        while self._outbox_bytes > below and not self._closed:
            self._outbox_drained.clear()
            await self._outbox_drained.wait()

    async def _unless_broken(self, work: Awaitable[Any], subject: str) -> Any:
        """Await work on the wire, but give up at once when the connection breaks."""
        if self._closed:
            raise BusError("the bus is closed")
        broken = asyncio.ensure_future(self._broken.wait())
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise BusDisconnectedError(f"the connection broke while waiting on {subject!r}")
            return task.result()
        finally:
            for pending in (broken, task):
                if not pending.done():
                    pending.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await pending

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
        try:
            answer = await self._unless_broken(
                self._client.request(subject, data, timeout=timeout, headers=headers), subject
            )
        except nats.errors.NoRespondersError:
            raise NoRespondersError(f"nobody listens on {subject!r}") from None
        except TimeoutError:
            raise BusTimeoutError(f"no answer on {subject!r} within {timeout:g} s") from None
        except nats.errors.Error as error:
            raise BusError(f"a request on {subject!r} failed: {error}") from error
        return Message(answer.subject, answer.data, "", answer.headers)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """See ``Bus.subscribe``."""
        stats = self.stats

        async def take(message: Msg) -> None:
            stats.received += 1
            stats.received_bytes += len(message.data)
            try:
                result = handler(
                    Message(message.subject, message.data, message.reply, message.headers)
                )
                if result is not None:
                    await result
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                stats.handler_errors += 1
                _log.error("a message handler was cancelled from within", subject=subject)
            except Exception as error:
                stats.handler_errors += 1
                _log.error("a message handler raised", subject=subject, exc_info=error)

        try:
            inner = await self._client.subscribe(
                subject,
                queue=queue,
                cb=take,
                pending_msgs_limit=_PENDING_MESSAGES,
                pending_bytes_limit=_PENDING_BYTES,
            )
        except nats.errors.Error as error:
            raise BusError(f"can't subscribe to {subject!r}: {error}") from error
        return _NatsSubscription(inner)

    async def flush(self, timeout: float = 10.0) -> None:
        """See ``Bus.flush``."""
        deadline = time.monotonic() + timeout
        try:
            await asyncio.wait_for(self.sent(), timeout)
            await self._client.flush(max(1, math.ceil(deadline - time.monotonic())))
        except (TimeoutError, nats.errors.Error) as error:
            raise BusTimeoutError(
                f"the broker did not take everything within {timeout:g} s"
            ) from error

    def on_event(self, callback: Callable[[BusEvent, str], None]) -> None:
        """See ``Bus.on_event``."""
        self._listeners.append(callback)

    async def drain(self, timeout: float = 10.0) -> None:
        """See ``Bus.drain``."""
        if self._closed:
            return
        if self.connected:
            for pull in list(self._pulls):
                with contextlib.suppress(nats.errors.Error):
                    await pull.unsubscribe()
            try:
                await asyncio.wait_for(self.sent(), timeout)
                await asyncio.wait_for(self._client.drain(), timeout)
                await asyncio.wait_for(self.sent(), 1.0)
            except (TimeoutError, nats.errors.Error) as error:
                _log.warning("the bus could not be drained in time", error=str(error))
        elif self._outbox:
            _log.error("messages were never sent: the broker is away", count=len(self._outbox))
        self._closed = True
        if self._publisher is not None:
            self._publisher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._publisher
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._client.close(), 2)

    # What lasts
    async def ensure_stream(self, spec: StreamSpec) -> None:
        """See ``Bus.ensure_stream``."""
        config = api.StreamConfig(
            name=spec.name,
            subjects=list(spec.subjects),
            description=spec.description or None,
            retention=(
                api.RetentionPolicy.WORK_QUEUE if spec.work_queue else api.RetentionPolicy.LIMITS
            ),
            discard=(
                api.DiscardPolicy.NEW if spec.work_queue or spec.keep else api.DiscardPolicy.OLD
            ),
            allow_direct=True,
            compression=api.StoreCompression.S2 if spec.compressed else None,
            max_bytes=spec.max_bytes,
            max_age=spec.max_age,
            storage=api.StorageType.FILE,
            duplicate_window=120.0,
            num_replicas=self._replicas,
        )
        try:
            try:
                await self._js.add_stream(config)
            except nats.js.errors.BadRequestError:  # there is one with other settings
                await self._js.update_stream(config)
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(
                f"the stream {spec.name!r} can't be set up (is JetStream on?): {error}"
            ) from error

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
        if message_id:
            headers = {**(headers or {}), "Nats-Msg-Id": message_id}
        try:
            ack = await self._unless_broken(
                self._js.publish(subject, data, timeout=timeout, headers=headers), subject
            )
        except nats.js.errors.NoStreamResponseError:
            raise NoRespondersError(f"no stream takes {subject!r}") from None
        except TimeoutError:
            raise BusTimeoutError(
                f"{subject!r} was not acknowledged within {timeout:g} s"
            ) from None
        except nats.errors.Error as error:
            raise BusError(f"{subject!r} was refused by its stream: {error}") from error
        self.stats.sent += 1
        self.stats.sent_bytes += len(data)
        return int(ack.seq)

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
        config = api.ConsumerConfig(
            durable_name=durable,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ack_wait,
            max_ack_pending=max_waiting_acks,
            filter_subjects=list(subjects) or None,
            deliver_policy=api.DeliverPolicy.NEW if new else api.DeliverPolicy.ALL,
            inactive_threshold=kept_for or None,
        )
        consumer = _NatsConsumer(self._js, stream, config, self._pulls)
        try:
            if alone:
                await consumer.begin_again()
            await consumer.bind()
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"can't take messages from the stream {stream!r}: {error}") from error
        return consumer

    async def drop_consumers(self, stream: str, prefix: str) -> int:
        """See ``Bus.drop_consumers``."""
        dropped = offset = 0
        try:
            while page := await self._js.consumers_info(stream, offset=offset):
                names = [info.name for info in page if info.name.startswith(prefix)]
                for name in names:
                    with contextlib.suppress(nats.js.errors.NotFoundError):
                        await self._js.delete_consumer(stream, name)
                dropped += len(names)
                offset += len(page) - len(names)
        except nats.js.errors.NotFoundError:  # no such stream
            pass
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"consumers of {stream!r} can't be dropped: {error}") from error
        return dropped

    async def replay(
        self, stream: str, subjects: tuple[str, ...], *, idle: float = 1.0
    ) -> AsyncIterator[Message | None]:
        """See ``Bus.replay``."""
        last = given = breaks = 0
        inner: Any = None
        try:
            while True:
                try:
                    if inner is None:
                        breaks = self.stats.reconnects
                        inner, _ = await self._reader(stream, subjects, last)
                        given = 0
                    messages = await inner.fetch(100, timeout=idle)
                except TimeoutError:
                    if inner is not None and breaks != self.stats.reconnects:
                        # The last messages may have been sent into the connection that broke.
                        await self._end_reader(inner)
                        inner = None
                    yield None
                    continue
                except nats.errors.Error as error:
                    if self._closed:
                        raise BusError("the bus is closed") from error
                    _log.debug("reading a stream again", stream=stream, error=str(error))
                    inner = None
                    await asyncio.sleep(0.2)
                    yield None
                    continue
                whole = _without_gaps(messages, given)
                given += len(whole)
                for message in whole:
                    last = message.metadata.sequence.stream
                    yield Message(message.subject, message.data, "", message.headers)
                if len(whole) < len(messages):
                    await self._end_reader(inner)
                    inner = None
        finally:
            if inner is not None:
                await self._end_reader(inner)

    async def _reader(self, stream: str, subjects: tuple[str, ...], last: int) -> tuple[Any, int]:
        """Begin to read a stream after a sequence number; also gives how much there is to read."""
        config = api.ConsumerConfig(
            filter_subjects=list(subjects),
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=60.0,
            mem_storage=True,
            deliver_policy=(api.DeliverPolicy.BY_START_SEQUENCE if last else api.DeliverPolicy.ALL),
            opt_start_seq=last + 1 if last else None,
        )
        info = await self._js.add_consumer(stream, config)
        inner = await self._js.pull_subscribe_bind(consumer=info.name, stream=stream)
        self._pulls.add(inner)
        return inner, info.num_pending or 0

    async def _ends_at(self, stream: str, subjects: tuple[str, ...]) -> int:
        """The last number under some subjects, as the stream's leader has it.

        A reader is served from any one copy. That of a node that has just come back may end early.
        """
        end = 0
        for subject in subjects:
            try:
                found = await self._js.get_last_msg(stream, subject, direct=False)
            except nats.js.errors.NotFoundError as error:
                if error.err_code != _NO_MESSAGE:
                    raise
            else:
                end = max(end, found.seq or 0)
        return end

    async def _end_reader(self, inner: Any) -> None:
        self._pulls.discard(inner)
        with contextlib.suppress(nats.errors.Error):
            await inner.unsubscribe()

    async def read(
        self,
        stream: str,
        subjects: tuple[str, ...],
        *,
        newest: int = 0,
        patience: float = 30.0,
    ) -> AsyncIterator[Message]:
        """See ``Bus.read``."""
        last = end = given = 0
        inner: Any = None
        heard = time.monotonic()
        try:
            while True:
                messages: Sequence[Any] = ()
                try:
                    if inner is None:
                        end = await self._ends_at(stream, subjects)
                        if newest and not last:
                            last = max(0, end - newest)
                        if end <= last:
                            return
                        inner, left = await self._reader(stream, subjects, last)
                        given = 0
                        if left == 0:
                            raise TimeoutError("a copy of it lags behind")
                    came = await inner.fetch(min(left, _READ_AT_ONCE), timeout=_READ_IDLE)
                    messages = _without_gaps(came, given)
                    if not messages:
                        raise TimeoutError("what was under way is lost")
                except (TimeoutError, nats.errors.Error) as error:
                    # What was under way when a connection broke does not come again by itself.
                    if self._closed or time.monotonic() - heard > patience:
                        raise BusError(f"the stream {stream!r} can't be read: {error}") from error
                    _log.debug("reading a stream again", stream=stream, error=str(error))
                    if inner is not None:
                        await self._end_reader(inner)
                        inner = None
                    await asyncio.sleep(_READ_PAUSE)
                    continue
                heard = time.monotonic()
                for message in messages:
                    last = message.metadata.sequence.stream
                    yield Message(message.subject, message.data, "", message.headers)
                given += len(messages)
                left -= len(messages)
                if last >= end:
                    return
                # The copy that was read ends before the leader's, or some were lost on their way.
                if left <= 0 or len(messages) < len(came):
                    await self._end_reader(inner)
                    inner = None
        finally:
            if inner is not None:
                await self._end_reader(inner)

    async def bucket(self, name: str, *, ttl: float = 0.0, history: int = 1) -> KeyValue:
        """See ``Bus.bucket``."""
        held = self._buckets.get(name)
        if held is not None and (not ttl or ttl == held.ttl):
            return held
        try:
            inner = await self._js.create_key_value(
                config=api.KeyValueConfig(
                    bucket=name,
                    history=history,
                    ttl=ttl or None,
                    replicas=self._replicas,
                    direct=self.batched,
                )
            )
        except nats.js.errors.BadRequestError:  # there is one with other settings
            inner = await self._with_ttl(name, ttl)
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(
                f"the bucket {name!r} can't be set up (is JetStream on?): {error}"
            ) from error
        held = self._buckets[name] = _NatsBucket(self, inner, ttl)
        return held

    async def _with_ttl(self, name: str, ttl: float) -> Any:
        """A bucket that is there: who names no time to live may have made it before who does."""
        try:
            inner = await self._js.key_value(name)
            config = (await self._js.stream_info(f"KV_{name}")).config
            if ttl and config.max_age != ttl:
                config.max_age = ttl
                config.duplicate_window = min(ttl, config.duplicate_window or ttl)
                await self._js.update_stream(config)
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"the bucket {name!r} can't be used: {error}") from error
        return inner

    async def last(self, stream: str, subject: str, *, exact: bool = False) -> Message | None:
        """See ``Bus.last``."""
        try:
            found = await self._js.get_last_msg(stream, subject, direct=not exact)
        except nats.js.errors.NotFoundError:
            return None
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"the stream {stream!r} can't be read: {error}") from error
        return Message(subject, found.data or b"", "", found.headers)

    async def held(self, stream: str, subject: str) -> tuple[int, float]:
        """See ``Bus.held``."""
        try:
            info = await self._js.stream_info(stream, subjects_filter=subject)
            count = sum((info.state.subjects or {}).values())
            if not count:
                return 0, 0.0
            first = await self._js.get_msg(stream, seq=1, subject=subject, next=True)
        except nats.js.errors.NotFoundError:
            return 0, 0.0  # taken in between, or there is no such stream
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"the stream {stream!r} can't be read: {error}") from error
        age = dt.datetime.now(dt.UTC) - first.time if first.time is not None else dt.timedelta()
        return count, max(0.0, age.total_seconds())

    async def facts(self) -> BrokerFacts:
        """What the broker says of itself and its streams."""
        return await broker_facts(self._client, self._js)

    async def purge(self, stream: str, subject: str, *, before: int = 0) -> None:
        """See ``Bus.purge``."""
        try:
            await self._js.purge_stream(stream, subject=subject, seq=before or None)
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"the stream {stream!r} can't be purged: {error}") from error


def _without_gaps(messages: Sequence[Any], given: int) -> Sequence[Any]:
    """Messages of a reader up to the first that is missing.

    A reader acknowledges nothing, so the broker takes for delivered what it sent into a connection
    that was breaking, and goes on behind it when that is back.

    Args:
        messages: as they came.
        given: how many this reader has given before.
    """
    for place, message in enumerate(messages):
        if message.metadata.sequence.consumer != given + place + 1:
            return messages[:place]
    return messages
