"""Listeners: subscriptions to environments' events, and what they call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from populace.events import ANY, Condition, Event, matches
from shared.bus import Bus, Consumer, Delivery, Message, Subscription
from shared.codec import from_public, pack_plain, to_json
from shared.errors import BusError, CodecError, InvalidInputError
from shared.logs import get_logger
from shared.messages.control import ListenRequest, Rule
from shared.service import ask
from shared.subjects import Subjects

_log = get_logger(__name__)

_WAIT = 1.0
_KEPT_FOR = 86400.0
"""Seconds for which a durable listener's place is kept while nobody takes it; so are events."""
_LOOK_AGAIN = 0.02
_HANDLING = 15.0
"""Seconds after which an event that nobody has handled is delivered again."""

Deliver = Callable[[Event], Coroutine[Any, Any, None]]


class Rules:
    """At the source: which events also go out for listeners with a condition."""

    def __init__(self, bus: Bus, subjects: Subjects, run: str) -> None:
        self._bus = bus
        self._subjects = subjects
        self._run = run
        self._rules: dict[str, tuple[Rule, Condition | None]] = {}

    def learn(self, rules: list[Rule]) -> None:
        """Take over what the run's owner says is listened for."""
        self._rules = {
            rule.rule: (rule, Condition(rule.when) if rule.when else None) for rule in rules
        }

    def apply(self, told: dict[str, Any]) -> None:
        """Send an event to those for whom it is meant."""
        for rule, condition in self._rules.values():
            if not matches(told["name"], told["path"], rule.event, rule.path, below=rule.below):
                continue
            try:
                if condition is not None and not condition.holds(told):
                    continue
            except InvalidInputError as error:
                _log.warning("a listener's condition fails", listener=rule.rule, error=str(error))
                continue
            data = to_json(told) if rule.format == "json" else pack_plain(told)
            try:
                self._bus.send(self._subjects.env_matched(self._run, rule.rule), data)
            except BusError as error:
                _log.error("an event was not sent", listener=rule.rule, error=str(error))


@dataclass(eq=False)
class Listener:
    """A listener; ``await listener.remove()`` ends it."""

    event: str
    path: str
    below: bool
    when: str | None
    _ends: list[Callable[[], Awaitable[None]]] = field(default_factory=list, repr=False)
    removed: bool = False
    last: dict[str, int] = field(default_factory=dict, repr=False)
    """Numbers of the last events taken, by path; an event is not taken twice."""

    async def remove(self) -> None:
        """Listen no longer; events that have arrived already may still be handled."""
        if not self.removed:
            self.removed = True
            for end in self._ends:
                await end()


class Listening:
    """The listeners of one process in one run.

    Args:
        bus: the connection.
        subjects: the installation's subjects.
        run: the run.
        life: which life of it; what processes of earlier ones still tell is not heard.
    """

    def __init__(self, bus: Bus, subjects: Subjects, run: str, life: int) -> None:
        self._bus = bus
        self._subjects = subjects
        self._run = run
        self._life = life
        self._listeners: list[Listener] = []
        self._durable: list[tuple[Listener, Consumer]] = []
        self._shared: dict[str, tuple[Subscription, list[tuple[Listener, Deliver]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    async def add(
        self,
        path: str,
        event: str,
        deliver: Deliver,
        *,
        when: str | None = None,
        below: bool = False,
        durable: str | None = None,
        new: bool = False,
    ) -> Listener:
        """Begin to listen; returns once the broker knows.

        Args:
            path: of the environment.
            event: the event's name, or ``*`` for all.
            deliver: called with each event.
            when: a condition on it.
            below: whether environments below the path count as well.
            durable: a name, under which events are kept while nobody listens.
            new: whether a durable listener leaves out what was told before, which is so when a
                run is taken up again: it was handled then, or did not happen.

        Raises:
            InvalidInputError: the condition can't be read.
        """
        condition = Condition(when) if when else None
        listener = Listener(event, path, below, when)
        if durable is not None:
            await self._add_durable(listener, deliver, condition, durable, new)
        elif when is not None:
            rule = await self._ask_for_rule(listener)
            subject = self._subjects.env_matched(self._run, rule)
            subscription = await self._bus.subscribe(
                subject, lambda message: self._take(message, [(listener, deliver)])
            )
            listener._ends += [subscription.unsubscribe, lambda: self._drop_rule(rule)]
        else:
            for subject in self._patterns(listener):
                await self._add_shared(subject, listener, deliver)
        await self._bus.flush()
        self._listeners = [one for one in self._listeners if not one.removed]
        self._listeners.append(listener)
        return listener

    @property
    def listeners(self) -> list[Listener]:
        """Those that listen now."""
        return [one for one in self._listeners if not one.removed]

    def _patterns(self, listener: Listener) -> list[str]:
        name = listener.event
        here = [self._subjects.env_event(self._run, name, listener.path)] if listener.path else []
        if not listener.below:
            return here
        rest = f"{listener.path}.>" if listener.path else ">"
        return [*here, self._subjects.env_event(self._run, name, rest)]

    async def _add_shared(self, subject: str, listener: Listener, deliver: Deliver) -> None:
        """One subscription per subject, however many listen."""
        async with self._lock:
            held = self._shared.get(subject)
            if held is None:
                targets: list[tuple[Listener, Deliver]] = []
                subscription = await self._bus.subscribe(
                    subject, lambda message: self._take(message, targets)
                )
                held = self._shared[subject] = (subscription, targets)
            held[1].append((listener, deliver))

        async def end() -> None:
            async with self._lock:
                held[1].remove((listener, deliver))
                if not held[1]:
                    del self._shared[subject]
                    await held[0].unsubscribe()

        listener._ends.append(end)

    def _take(self, message: Message, targets: list[tuple[Listener, Deliver]]) -> None:
        event = Event.from_plain(from_public(message.data))
        for listener, deliver in list(targets):
            if self._fresh(listener, event):
                task = asyncio.ensure_future(deliver(event))
                self._tasks.add(task)
                task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("a listener raised", error=f"{type(error).__name__}: {error}")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a durable listener has ended", error=f"{type(error).__name__}: {error}")

    def _fresh(self, listener: Listener, event: Event) -> bool:
        if listener.removed or event.life < self._life:
            return False
        if event.number <= listener.last.get(event.path, 0):
            return False
        listener.last[event.path] = event.number
        return True

    # With a condition: the environment chooses
    async def _ask_for_rule(self, listener: Listener) -> str:
        request = ListenRequest(
            path=listener.path, event=listener.event, when=listener.when, below=listener.below
        )
        subject = self._subjects.run_owner(self._run, "listen")
        return (await ask(self._bus, subject, request, Rule, timeout=30, patience=5.0)).rule

    async def _drop_rule(self, rule: str) -> None:
        subject = self._subjects.run_owner(self._run, "unlisten")
        await ask(self._bus, subject, Rule(rule=rule), Rule, timeout=30)

    # Durable: the stream keeps what is missed
    async def _add_durable(
        self,
        listener: Listener,
        deliver: Deliver,
        condition: Condition | None,
        name: str,
        new: bool,
    ) -> None:
        consumer = await self._bus.consumer(
            self._subjects.stream_events,
            durable=name,
            subjects=tuple(self._patterns(listener)),
            ack_wait=_HANDLING,
            max_waiting_acks=1,  # or one that was not handled would come after later ones
            new=new,
            kept_for=_KEPT_FOR,
        )
        self._durable.append((listener, consumer))
        task = asyncio.ensure_future(self._follow(consumer, listener, deliver, condition))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

        async def end() -> None:
            task.cancel()
            await asyncio.wait({task})
            await consumer.close()

        listener._ends.append(end)

    async def caught_up(self, until: float) -> bool:
        """Wait until durable listeners have handled what was told so far.

        Args:
            until: the time (``time.monotonic``) after which it is not waited for any more.

        Returns:
            Whether they have.

        Raises:
            BusError: the broker does not say.
        """
        self._durable = [pair for pair in self._durable if not pair[0].removed]
        behind = list(self._durable)
        while behind:
            left = await asyncio.gather(*(consumer.left() for _, consumer in behind))
            behind = [one for one, count in zip(behind, left, strict=True) if count]
            if behind:
                if time.monotonic() > until:
                    return False
                await asyncio.sleep(_LOOK_AGAIN)
        return True

    async def _follow(
        self,
        consumer: Consumer,
        listener: Listener,
        deliver: Deliver,
        condition: Condition | None,
    ) -> None:
        while not listener.removed:
            for delivery in await consumer.fetch(1, _WAIT):
                event = self._read(delivery.data, condition)
                # One after the other, and acknowledged only when it was handled.
                if event is not None and self._fresh(listener, event):
                    await self._handle(delivery, deliver(event))
                await delivery.ack()

    @staticmethod
    def _read(data: bytes, condition: Condition | None) -> Event | None:
        """An event; None if it is not wanted, or none that can be read."""
        try:
            told = from_public(data)
            event = Event.from_plain(told)
            return event if condition is None or condition.holds(told) else None
        except InvalidInputError as error:
            _log.warning("a listener's condition fails", error=str(error))
        except (CodecError, TypeError) as error:
            _log.warning("an event can't be read", error=str(error))
        return None

    @staticmethod
    async def _handle(delivery: Delivery, handling: Coroutine[Any, Any, None]) -> None:
        """Wait for a handler, and keep the broker from thinking that it was forgotten."""
        task = asyncio.ensure_future(handling)
        try:
            while not (await asyncio.wait({task}, timeout=_HANDLING / 3))[0]:
                await delivery.in_progress()
        except asyncio.CancelledError:  # of this listener; not of what its handler waits for
            if task.done():
                await delivery.ack()
            else:
                task.cancel()
                await delivery.nak()  # whoever next listens under the name gets it at once
            raise
        if task.cancelled():
            _log.warning("a listener raised", error="CancelledError: what it awaited was cancelled")
        elif (error := task.exception()) is not None:
            _log.warning("a listener raised", error=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """End all; durable ones keep their place."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)


def path_of(environment: Any) -> str:
    """The path of an environment that is named by a proxy or by the path itself.

    Raises:
        InvalidInputError: it is something else.
    """
    if isinstance(environment, str):
        return environment
    shard = getattr(environment, "_shard", None)
    if isinstance(shard, str) and shard.startswith("@"):
        return shard[1:]
    raise InvalidInputError(f"{environment!r} is no environment; give its proxy or its path")


__all__ = ["ANY", "Listener", "Listening", "Rules", "path_of"]
