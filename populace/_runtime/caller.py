"""The calling side: gathers calls into batches, and settles placeholders when answers come.

Every process that calls agents has one: programs, directors, and workers themselves.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from populace._runtime.driver import CallTask, current_call
from populace.errors import (
    CallTimeoutError,
    PlaceholderLostError,
    WireError,
    WorkerLostError,
    error_from_wire,
)
from populace.placeholder import Placeholder, failure_in, find_placeholders
from shared.bus import Bus, Message
from shared.codec import FIRST_FREE_EXTENSION, Codec
from shared.errors import BusError, CodecError, PayloadTooLargeError, PopulaceError
from shared.logs import get_logger
from shared.messages import batch
from shared.subjects import Subjects

if TYPE_CHECKING:
    from populace.answers import Answers

_log = get_logger(__name__)

PLACEHOLDER_EXTENSION = FIRST_FREE_EXTENSION
AGENT_EXTENSION = FIRST_FREE_EXTENSION + 1
_SWEEP = 0.1
_FIRST_RECAP = 0.3
_SLOWEST_RECAP = 5.0
_MOST_RECAPPED = 10_000
_LENT_FOR = 600.0
_MOST_LENT = 100_000


class Column:
    """Values for the agents of a population, one each; made by ``populace.each``."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values


class _Queued:
    __slots__ = ("args", "by", "class_path", "index", "kwargs", "method", "placeholder")

    def __init__(
        self,
        placeholder: Placeholder[Any],
        index: int,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        class_path: tuple[str, str | None] | None,
        by: CallTask | None,
    ) -> None:
        self.placeholder = placeholder
        self.index = index
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.class_path = class_path
        self.by = by

    def like(self, other: _Queued) -> bool:
        """Whether both fit into one group of calls."""
        return (
            self.method == other.method
            and len(self.args) == len(other.args)
            and self.kwargs.keys() == other.kwargs.keys()
            and self.class_path == other.class_path
            and self.by is other.by
            and self.placeholder.wanted == other.placeholder.wanted
            and self.placeholder.deadline == other.placeholder.deadline
        )


class OpenCall:
    """A group of calls that was sent and is not fully answered."""

    __slots__ = ("deadline", "group", "number", "seen", "shard", "timeout", "tokens")

    def __init__(self, number: int, shard: str, group: list[Any], timeout: float) -> None:
        self.number = number
        self.shard = shard
        self.group = group
        """Kept until it is answered, so that it can be sent again."""
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.tokens = 0
        """Model tokens that the answers so far have cost."""
        self.seen: set[int] = set()
        """Numbers of the answer batches taken; a repeated one is dropped."""

    def answers(self, positions: Sequence[int], values: list[Any], errors: list[Any]) -> bool:
        """Take a batch of answers; returns whether the group is answered in full."""
        raise NotImplementedError

    def fail(self, error: WireError) -> None:
        """Fail all that is not answered."""
        raise NotImplementedError


class _OpenSingles(OpenCall):
    __slots__ = ("left", "placeholders")

    def __init__(
        self,
        number: int,
        shard: str,
        group: list[Any],
        timeout: float,
        placeholders: list[Placeholder[Any]],
    ) -> None:
        super().__init__(number, shard, group, timeout)
        self.placeholders = placeholders
        self.left = len(placeholders)

    def answers(self, positions: Sequence[int], values: list[Any], errors: list[Any]) -> bool:
        held = self.placeholders
        failed: dict[int, WireError] = dict(errors)
        for place, position in enumerate(positions):
            placeholder = held[position]
            if placeholder.done():
                continue  # cancelled or timed out here, and so counted already
            self.left -= 1
            error = failed.get(place)
            if error is None:
                _settle(placeholder, values[place])
            else:
                placeholder._set_error(
                    error_from_wire(placeholder.label, placeholder.method, error)
                )
        return self.left <= 0

    def kept(self, positions: Sequence[int]) -> bool:
        """Note that answers are kept where they were made."""
        for position in positions:
            if not self.placeholders[position].done():
                self.left -= 1
                self.placeholders[position]._set_kept()
        return self.left <= 0

    def fail(self, error: WireError) -> None:
        for placeholder in self.placeholders:
            placeholder._set_error(error_from_wire(placeholder.label, placeholder.method, error))


class OpenPart(OpenCall):
    """The part of a population call that went to one shard (or a slice of it)."""

    __slots__ = ("agents", "answered", "offset", "size")

    def __init__(
        self,
        number: int,
        shard: str,
        group: list[Any],
        timeout: float,
        agents: Answers[Any],
        offset: int,
        size: int,
    ) -> None:
        super().__init__(number, shard, group, timeout)
        self.agents = agents
        self.offset = offset
        """The first agent's number within the population."""
        self.size = size
        self.answered = 0

    def answers(self, positions: Sequence[int], values: list[Any], errors: list[Any]) -> bool:
        self.deadline = time.monotonic() + self.timeout
        self.answered += len(positions)
        self.agents._tokens_of[self.number] = self.tokens
        self.agents._take(self.offset, positions, values, errors)
        return self.answered >= self.size

    def summary(
        self, done: int, failed: int, tokens: int, peek: float | None, partial: list[Any] | None
    ) -> bool:
        self.deadline = time.monotonic() + self.timeout
        self.agents._progress(self.number, done, failed, tokens, peek)
        if partial is None:
            return False
        self.agents._take_partial(self.size, partial)
        return True

    def fail(self, error: WireError) -> None:
        self.agents._part_failed(self, error)


class Caller:
    """Sends calls to shards, and receives their answers in one inbox.

    Args:
        bus: the connection; its process name is part of the inbox's subject.
        codec: packs arguments and answers; placeholders and proxies are registered with it.
        run: the run whose agents are called.
        timeout: seconds without any sign of progress after which a call has failed.
    """

    def __init__(
        self, bus: Bus, codec: Codec, subjects: Subjects, run: str, *, timeout: float
    ) -> None:
        self.bus = bus
        self.codec = codec
        self.subjects = subjects
        self.run = run
        self.timeout = timeout
        self.inbox = subjects.inbox(bus.process, "a")
        self.references = 0
        """Placeholders that came in messages so far; workers look whether it rose."""
        self.bad_objects = 0
        """Objects in messages that could not be made again."""
        self.round = 0
        self._queue: dict[str, list[_Queued]] = {}
        self._segments: list[dict[str, list[_Queued]] | Callable[[], None]] = []
        """What goes out before the queue, in order: queues, and senders of population calls."""
        self._scheduled = False
        self._calls = 0
        self._fetches: dict[int, Placeholder[Any]] = {}
        self._open: dict[int, OpenCall] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._lent: dict[tuple[int, int], tuple[Placeholder[Any], float]] = {}
        self._lost: dict[str, str] = {}
        self._recap_step = _SLOWEST_RECAP
        self._recap_at = time.monotonic() + _SLOWEST_RECAP
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        codec.register(
            PLACEHOLDER_EXTENSION, Placeholder, self._encode_placeholder, self._decode_placeholder
        )

        codec.on_bad_object = self._bad_object

    async def start(self) -> None:
        """Begin to receive answers."""
        await self.bus.subscribe(self.inbox, self._receive)
        self.bus.on_event(self._bus_event)

    def close(self, reason: str) -> None:
        """Fail whatever is open; nothing can be called any more."""
        self._closed = True
        for open_call in list(self._open.values()):
            open_call.fail(["closed", reason, ""])
        self._open.clear()
        for placeholder in list(self._fetches.values()):
            placeholder._set_error(
                PlaceholderLostError(
                    placeholder.label, placeholder.method, "placeholder_lost", reason
                )
            )
        self._fetches.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()

    # Calling
    def call(
        self,
        shard: str,
        index: int,
        label: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        class_path: tuple[str, str | None] | None = None,
    ) -> Placeholder[Any]:
        """Queue a call to one agent; it leaves at the end of this tick of the event loop."""
        placeholder: Placeholder[Any] = Placeholder(self, shard, label, method)
        for value in (*args, *kwargs.values()):
            for used in find_placeholders(value):
                used.used = True
        by = current_call()
        if by is not None:
            by.note_call(placeholder)
        self._queue.setdefault(shard, []).append(
            _Queued(placeholder, index, method, args, kwargs, class_path, by)
        )
        self._schedule()
        return placeholder

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def enqueue(self, sender: Callable[[], None]) -> None:
        """Have ``sender`` called at the end of this tick, in its place among the calls."""
        if self._queue:
            self._segments.append(self._queue)
            self._queue = {}
        self._segments.append(sender)
        self._schedule()

    def _flush(self) -> None:
        """Send what was queued in this tick, in order."""
        self._scheduled = False
        segments, self._segments = [*self._segments, self._queue], []
        self._queue = {}
        for segment in segments:
            try:
                if callable(segment):
                    segment()
                else:
                    self._send_queue(segment)
            except Exception:  # one population's trouble is not the others'
                _log.exception("calls could not be sent")

    def _send_queue(self, queue: dict[str, list[_Queued]]) -> None:
        """Send calls to single agents, one message per shard."""
        messages: list[tuple[str, list[list[_Queued]]]] = []
        for shard, entries in queue.items():
            groups: list[list[_Queued]] = []
            for entry in entries:
                if entry.placeholder.done():  # cancelled before it left
                    continue
                if groups and groups[-1][-1].like(entry):
                    groups[-1].append(entry)
                else:
                    groups.append([entry])
            reason = self._refusal(shard)
            if reason is not None:
                for entry in entries:
                    self._fail_entry(entry, reason)
            elif groups:
                messages.append((shard, groups))
        # Number every call first, so that calls of this tick can refer to one another; and
        # where messages must be divided, which changes numbers, do so before any leaves.
        self._number(messages)
        packed = [self._pack(groups) for _, groups in messages]
        if any(message is None for message in packed):
            messages = [
                (shard, part)
                for (shard, groups), message in zip(messages, packed, strict=True)
                for part in ([groups] if message is not None else self._divide(groups))
            ]
            self._number(messages)
            packed = [self._pack(groups) for _, groups in messages]
        for (shard, groups), message in zip(messages, packed, strict=True):
            self._send_message(shard, groups, message)

    def _number(self, messages: list[tuple[str, list[list[_Queued]]]]) -> None:
        for _, groups in messages:
            for group in groups:
                self._calls += 1
                for position, entry in enumerate(group):
                    entry.placeholder.call = self._calls
                    entry.placeholder.position = position

    def _pack(self, groups: list[list[_Queued]]) -> tuple[list[list[Any]], bytes] | None:
        """These groups as rows, and the message that holds them; None if it can't travel."""
        rows = [self._row(group) for group in groups]
        try:
            data = self.codec.pack([batch.CALLS, self.inbox, rows])
        except CodecError:
            return None
        return (rows, data) if len(data) <= self.bus.max_payload else None

    def _divide(self, groups: list[list[_Queued]]) -> list[list[list[_Queued]]]:
        """The groups as several messages that fit; what can't travel at all fails here."""
        if len(groups) > 1:
            half = len(groups) // 2
            halves = [groups[:half], groups[half:]]
        elif len(groups[0]) > 1:
            half = len(groups[0]) // 2
            halves = [[groups[0][:half]], [groups[0][half:]]]
        else:
            self._fail_entry(groups[0][0], self._why_not(groups[0][0]))
            return []
        return [
            part
            for piece in halves
            for part in ([piece] if self._pack(piece) is not None else self._divide(piece))
        ]

    def _why_not(self, entry: _Queued) -> WireError:
        """Why a call can't travel."""
        try:
            size = len(self.codec.pack([entry.args, entry.kwargs]))
        except CodecError as error:
            return [CodecError.__name__, str(error), ""]
        reason = (
            f"the arguments take {size} bytes, more than the {self.bus.max_payload} that one "
            "message may hold"
        )
        return [PayloadTooLargeError.__name__, reason, ""]

    def _send_message(
        self,
        shard: str,
        groups: list[list[_Queued]],
        message: tuple[list[list[Any]], bytes] | None,
    ) -> None:
        rows, data = message if message is not None else ([self._row(g) for g in groups], b"")
        opened = [
            self._open_singles(shard, row, group) for row, group in zip(rows, groups, strict=True)
        ]
        try:
            if message is None:  # it fitted before its calls were numbered
                raise PayloadTooLargeError("a message grew beyond what the broker takes")
            self.bus.send(self.subjects.run_call(self.run, shard), data)
        except BusError as error:
            self._fail_open(opened, error)

    def _row(self, entries: list[_Queued]) -> list[Any]:
        """A group of calls as it travels."""
        first = entries[0]
        options: dict[str, Any] = {}
        kept = [e.placeholder for e in entries if e.placeholder.used and not e.placeholder.wanted]
        if kept:
            options["keep"] = [placeholder.position for placeholder in kept]
            for placeholder in kept:
                placeholder.kept = True
        if first.class_path is not None:
            options["class"], options["folder"] = first.class_path
        if first.by is not None:
            # A caller that goes on without the answer is no link: nothing waits for this call.
            options["chain"] = chain_of(first.by) if first.placeholder.wanted else []
            options["agent"] = True
        options["round"] = self.round if first.by is None else first.by.group.round
        return [
            first.placeholder.call,
            first.method,
            [_column([e.args[i] for e in entries]) for i in range(len(first.args))],
            {k: _column([e.kwargs[k] for e in entries]) for k in first.kwargs},
            batch.column([e.index for e in entries]),
            options,
        ]

    def _open_singles(self, shard: str, row: list[Any], entries: list[_Queued]) -> _OpenSingles:
        placeholders = [entry.placeholder for entry in entries]
        timeout = placeholders[0].deadline or self.timeout
        call = _OpenSingles(placeholders[0].call, shard, row, timeout, placeholders)
        self._track(call)
        return call

    def _track(self, call: OpenCall) -> None:
        self._open[call.number] = call
        heapq.heappush(self._deadlines, (call.deadline, call.number))
        self._keep_sweeping()

    def _keep_sweeping(self) -> None:
        if self._sweeper is None and not self._closed:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP, self._sweep)

    def _refusal(self, shard: str) -> WireError | None:
        if self._closed:
            return ["closed", "the connection to the agents is closed", ""]
        if shard in self._lost:
            return ["worker_lost", self._lost[shard], ""]
        return None

    def _fail_entry(self, entry: _Queued, error: WireError) -> None:
        placeholder = entry.placeholder
        placeholder._set_error(error_from_wire(placeholder.label, placeholder.method, error))

    def _fail_open(self, calls: Sequence[OpenCall], error: PopulaceError) -> None:
        for call in calls:
            self._open.pop(call.number, None)
            call.fail([type(error).__name__, str(error), ""])

    def call_part(
        self,
        answers: Answers[Any],
        shard: str,
        method: str,
        args: list[Any],
        kwargs: dict[str, Any],
        indexes: range,
        offset: int,
        options: dict[str, Any],
        timeout: float | None,
    ) -> list[int]:
        """Send a population call to a slice of a shard; returns the numbers of the calls.

        ``args`` and ``kwargs`` may hold ``Column``s, whose values are for these indexes.
        """
        self._calls += 1
        number = self._calls
        by = current_call()
        options = {**options, "round": self.round if by is None else by.group.round}
        if by is not None:
            options["chain"] = chain_of(by)
            options["agent"] = True
        group = [
            number,
            method,
            [_shared_or_column(a) for a in args],
            {k: _shared_or_column(v) for k, v in kwargs.items()},
            batch.span(indexes.start, indexes.stop),
            options,
        ]
        part = OpenPart(
            number, shard, group, timeout or self.timeout, answers, offset, len(indexes)
        )
        if (reason := self._refusal(shard)) is not None:
            part.fail(reason)
            return [number]
        try:
            data = self.codec.pack([batch.CALLS, self.inbox, [group]])
            self._track(part)
            self.bus.send(self.subjects.run_call(self.run, shard), data)
        except PayloadTooLargeError as error:
            self._open.pop(number, None)
            if len(indexes) == 1 or not _has_columns(args, kwargs):
                part.fail([type(error).__name__, str(error), ""])
                return [number]
            half = len(indexes) // 2
            return [
                sent
                for cut in (slice(0, half), slice(half, len(indexes)))
                for sent in self.call_part(
                    answers,
                    shard,
                    method,
                    [_cut(a, cut) for a in args],
                    {k: _cut(v, cut) for k, v in kwargs.items()},
                    indexes[cut],
                    offset + cut.start,
                    options,
                    timeout,
                )
            ]
        except (CodecError, BusError) as error:
            self._open.pop(number, None)
            part.fail([type(error).__name__, str(error), ""])
        return [number]

    # Ending calls
    def set_timeout(self, placeholder: Placeholder[Any], seconds: float) -> None:
        """Give one call its own bound, counted from now."""
        if placeholder.call < 0 and placeholder._source is None:
            placeholder.deadline = seconds
            return
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._time_out_one, placeholder, seconds)

    def _time_out_one(self, placeholder: Placeholder[Any], seconds: float) -> None:
        if not placeholder.done():
            self.cancel(placeholder)
            placeholder._set_error(self._timeout_error(placeholder, seconds))

    @staticmethod
    def _timeout_error(placeholder: Placeholder[Any], seconds: float) -> CallTimeoutError:
        return CallTimeoutError(
            placeholder.label, placeholder.method, "timeout", f"no answer within {seconds:g} s"
        )

    def cancel(self, placeholder: Placeholder[Any]) -> None:
        """Tell the worker that nobody waits for this call any more."""
        if placeholder.call >= 0 and placeholder._source is None:
            call = self._open.get(placeholder.call)
            if isinstance(call, _OpenSingles):
                call.left -= 1
                if call.left <= 0:
                    self._open.pop(call.number, None)
            self._send_cancel(placeholder.shard, placeholder.call, [placeholder.position])

    def cancel_part(self, number: int) -> None:
        """End what is left of a population call at one shard."""
        part = self._open.pop(number, None)
        if part is not None:
            self._send_cancel(part.shard, number, None)

    def _send_cancel(self, shard: str, number: int, positions: list[int] | None) -> None:
        packed = None if positions is None else batch.column(positions)
        data = self.codec.pack([batch.CANCEL, self.inbox, number, packed])
        try:
            self.bus.send(self.subjects.run_call(self.run, shard), data)
        except BusError as error:
            _log.warning("a cancellation was not sent", shard=shard, error=str(error))

    def _sweep(self) -> None:
        """Fail what is overdue."""
        self._sweeper = None
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            call = self._open.get(number)
            if call is None:
                continue
            if call.deadline > now:  # it made progress since
                heapq.heappush(self._deadlines, (call.deadline, number))
                continue
            del self._open[number]
            self._send_cancel(call.shard, number, None)
            call.fail(["timeout", f"no answer within {call.timeout:g} s", ""])
        if now >= self._recap_at:
            if self.bus.connected:
                self._recap(now)
            else:
                self._recap_at = now + _FIRST_RECAP
        while self._lent:  # oldest first
            key, (_, since) = next(iter(self._lent.items()))
            if now - since < _LENT_FOR and len(self._lent) < _MOST_LENT:
                break
            del self._lent[key]
        if self._open or self._lent or self._fetches:
            self._keep_sweeping()

    def shards_lost(self, shards: Sequence[str], reason: str) -> None:
        """Fail all calls to shards whose worker is gone, and all later ones."""
        for shard in shards:
            self._lost[shard] = reason
        lost = set(shards)
        for call in [c for c in self._open.values() if c.shard in lost]:
            del self._open[call.number]
            call.fail(["worker_lost", reason, ""])
        for number, placeholder in list(self._fetches.items()):
            if placeholder.shard in lost:
                del self._fetches[number]
                placeholder._set_error(
                    WorkerLostError(placeholder.label, placeholder.method, "worker_lost", reason)
                )

    # Answers
    def _receive(self, message: Message) -> None:
        fields = batch.check(self.codec.unpack(message.data))
        kind = fields[0]
        if kind == batch.ANSWERS:
            for number, sequence, positions, values, errors, tokens in fields[1]:
                call = self._open.get(number)
                if call is None or sequence in call.seen:
                    continue
                call.seen.add(sequence)
                call.tokens += tokens
                if call.answers(batch.numbers(positions), values, errors):
                    self._open.pop(number, None)
        elif kind == batch.SUMMARY:
            for number, done, failed, tokens, peek, partial in fields[1]:
                part = self._open.get(number)
                if isinstance(part, OpenPart) and part.summary(done, failed, tokens, peek, partial):
                    self._open.pop(number, None)
        elif kind == batch.DONE:
            for number, sequence, positions in fields[1]:
                singles = self._open.get(number)
                if not isinstance(singles, _OpenSingles) or sequence in singles.seen:
                    continue
                singles.seen.add(sequence)
                if singles.kept(batch.numbers(positions)):
                    self._open.pop(number, None)
        elif kind == batch.FETCHED:
            self._fetched(*fields[1:])
        elif kind == batch.FETCH:
            self._lend(*fields[1:])
        elif kind == batch.UNKNOWN:
            self._send_again(fields[1])
        elif kind == batch.REFUSED:
            for number, error in fields[1]:
                refused = self._open.pop(number, None)
                if refused is not None:
                    refused.fail(error)
        else:
            raise CodecError(f"a message of kind {kind} does not belong in an inbox")

    def _bus_event(self, event: str, detail: str) -> None:
        if event == "closed" and not self._closed:
            self.close(f"the connection to the broker is closed ({detail})")
        elif event == "reconnected":
            # Soon, and again while the workers may still be away themselves.
            self._recap_step = _FIRST_RECAP
            self._recap_at = time.monotonic() + _FIRST_RECAP

    def _recap(self, now: float) -> None:
        """Ask the workers after calls that made no progress for a while.

        Messages may be lost when any connection breaks, the worker's included, of which this
        side hears nothing. A worker that is merely busy has nothing to answer.
        """
        since = now - self._recap_step
        by_shard: dict[str, list[list[int]]] = {}
        for call in self._open.values():
            if call.deadline - call.timeout <= since:
                rows = by_shard.setdefault(call.shard, [])
                if len(rows) < _MOST_RECAPPED:
                    rows.append([call.number, len(call.seen)])
        for shard, rows in by_shard.items():
            data = self.codec.pack([batch.RECAP, self.inbox, rows])
            try:
                self.bus.send(self.subjects.run_call(self.run, shard), data)
            except BusError as error:
                _log.warning("calls could not be asked after", shard=shard, error=str(error))
        for number, placeholder in self._fetches.items():
            subject = self.subjects.run_call(self.run, placeholder.shard)
            self._send_fetch(subject, number, self._source_of(placeholder))
        self._recap_step = min(_SLOWEST_RECAP, self._recap_step * 2)
        self._recap_at = now + self._recap_step

    def _send_again(self, numbers: list[int]) -> None:
        for number in numbers:
            call = self._open.get(number)
            if call is not None:
                _log.warning("calls were lost on the way and are sent again", shard=call.shard)
                data = self.codec.pack([batch.CALLS, self.inbox, [call.group]])
                self.bus.send(self.subjects.run_call(self.run, call.shard), data)

    # References to answers
    def _encode_placeholder(self, placeholder: Placeholder[Any]) -> list[Any]:
        label, method = placeholder.label, placeholder.method
        if placeholder._source is not None and not placeholder._here():
            return ["r", *placeholder._source, label, method]
        if placeholder._here():
            try:
                return ["v", placeholder._get()]
            except asyncio.CancelledError:
                return ["e", ["cancelled", "the call was cancelled", ""], label, method]
            except PopulaceError as error:
                kind = getattr(error, "kind", type(error).__name__)
                text = getattr(error, "message", str(error))
                trace = getattr(error, "remote_traceback", "")
                return ["e", [kind, text, trace], label, method]
        kept = placeholder.kept
        if not kept:
            self._lent[(placeholder.call, placeholder.position)] = (placeholder, time.monotonic())
        where = (self.inbox, placeholder.call, placeholder.position, placeholder.shard, kept)
        return ["r", *where, label, method]

    def _decode_placeholder(self, parts: list[Any]) -> Any:
        if parts[0] == "v":
            return parts[1]
        self.references += 1
        if parts[0] == "e":
            failed: Placeholder[Any] = Placeholder(self, "", parts[2], parts[3])
            failed._set_error(error_from_wire(parts[2], parts[3], parts[1]))
            return failed
        _, inbox, call, position, shard, kept, label, method = parts
        return Placeholder._remote(self, (inbox, call, position, shard, kept), label, method)

    def _bad_object(self, error: CodecError) -> Placeholder[Any]:
        """Stands for an argument that can't be read: its call fails, others don't."""
        self.references += 1
        self.bad_objects += 1
        failed: Placeholder[Any] = Placeholder(self, "", "", "")
        failed._set_error(error)
        return failed

    def fetch(self, placeholder: Placeholder[Any]) -> None:
        """Ask the worker that made an answer (or keeps it) to send it here."""
        if (reason := self._refusal(placeholder.shard)) is not None:
            placeholder._set_error(error_from_wire(placeholder.label, placeholder.method, reason))
            return
        self._calls += 1
        number = self._calls
        self._fetches[number] = placeholder
        asyncio.get_running_loop().call_later(self.timeout, self._fetch_overdue, number)
        subject = self.subjects.run_call(self.run, placeholder.shard)
        self._send_fetch(subject, number, self._source_of(placeholder))
        self._keep_sweeping()

    def _source_of(self, placeholder: Placeholder[Any]) -> tuple[str, int, int, str, bool]:
        return placeholder._source or (
            self.inbox,
            placeholder.call,
            placeholder.position,
            placeholder.shard,
            True,
        )

    def _send_fetch(self, subject: str, number: int, source: tuple[Any, ...]) -> None:
        inbox, call, position, _, kept = source
        message = [batch.FETCH, self.inbox, number, [inbox, call, position], kept]
        self.bus.send(subject, self.codec.pack(message))

    def _fetch_overdue(self, number: int) -> None:
        placeholder = self._fetches.pop(number, None)
        if placeholder is not None:
            placeholder._set_error(self._timeout_error(placeholder, self.timeout))

    def _fetched(self, number: int, outcome: int, content: Any) -> None:
        placeholder = self._fetches.get(number)
        if placeholder is None:
            return
        if outcome == batch.ASK_CALLER and placeholder._source is not None:
            self._send_fetch(placeholder._source[0], number, placeholder._source)
            return
        del self._fetches[number]
        if outcome == batch.OK:
            _settle(placeholder, content)
        elif outcome == batch.FAILED:
            placeholder._set_error(error_from_wire(placeholder.label, placeholder.method, content))
        else:
            reason = content or "its worker does not know of it"
            placeholder._set_error(
                PlaceholderLostError(
                    placeholder.label, placeholder.method, "placeholder_lost", reason
                )
            )

    def _lend(self, asker: str, number: int, key: list[Any], _kept: bool) -> None:
        """Answer a worker that was sent here for an answer which this caller has received."""
        held = self._lent.get((key[1], key[2]))

        def send(outcome: int, content: Any) -> None:
            self.bus.send(asker, self.codec.pack([batch.FETCHED, number, outcome, content]))

        if held is None:
            send(batch.GONE, "its caller let go of it")
            return

        def reply(placeholder: Placeholder[Any]) -> None:
            packed = self._encode_placeholder(placeholder)
            if packed[0] == "v":
                send(batch.OK, packed[1])
            else:
                send(batch.FAILED, packed[1])

        held[0].add_done_callback(reply)


def _settle(placeholder: Placeholder[Any], value: Any) -> None:
    """Give a placeholder its answer, or the error that stands for one that can't be read."""
    failure = failure_in(value)
    if failure is None:
        placeholder._set_value(value)
    else:
        placeholder._set_error(failure)


def chain_of(task: CallTask) -> list[Any]:
    """The calls that wait for what the one under way does, outermost first.

    Each is ``[shard, index, name, caller's inbox, call, position]``.
    """
    group = task.group
    key = [group.caller, group.number, task.position]
    return [*group.chain, [group.shard.id, task.index, task.get_name(), *key]]


def _column(values: list[Any]) -> list[Any]:
    first = values[0]
    if all(value is first for value in values):
        return [False, first]
    return [True, values]


def _shared_or_column(value: Any) -> list[Any]:
    return [True, list(value.values)] if isinstance(value, Column) else [False, value]


def _has_columns(args: list[Any], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(v, Column) for v in (*args, *kwargs.values()))


def _cut(value: Any, part: slice) -> Any:
    return Column(value.values[part]) if isinstance(value, Column) else value
