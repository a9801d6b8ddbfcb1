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
_MOST_WATCHED = 64


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
            and self.placeholder.deadline == other.placeholder.deadline
        )


class OpenCall:
    """A group of calls that was sent and is not fully answered."""

    __slots__ = ("deadline", "group", "number", "seen", "shard", "timeout")

    def __init__(self, number: int, shard: str, group: list[Any], timeout: float) -> None:
        self.number = number
        self.shard = shard
        self.group = group
        """Kept until it is answered, so that it can be sent again."""
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
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
            error = failed.get(place)
            if error is None:
                _settle(placeholder, values[place])
            else:
                placeholder._set_error(
                    error_from_wire(placeholder.label, placeholder.method, error)
                )
        self.left -= len(positions)
        return self.left <= 0

    def kept(self, positions: Sequence[int]) -> bool:
        """Note that answers are kept where they were made."""
        for position in positions:
            self.placeholders[position]._set_kept()
        self.left -= len(positions)
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
            if by.calls is None:
                by.calls = set()
            elif len(by.calls) > _MOST_WATCHED:
                by.calls = {p for p in by.calls if not p.done()}
            by.calls.add(placeholder)
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
            if callable(segment):
                segment()
            else:
                self._send_queue(segment)

    def _send_queue(self, queue: dict[str, list[_Queued]]) -> None:
        """Send calls to single agents, one message per shard."""
        grouped: list[tuple[str, list[list[_Queued]]]] = []
        # First number every call, so that calls of this tick can refer to one another.
        for shard, entries in queue.items():
            groups: list[list[_Queued]] = []
            for entry in entries:
                if entry.placeholder.done():  # cancelled before it left
                    continue
                if groups and groups[-1][-1].like(entry):
                    groups[-1].append(entry)
                else:
                    groups.append([entry])
            for group in groups:
                self._calls += 1
                for position, entry in enumerate(group):
                    entry.placeholder.call = self._calls
                    entry.placeholder.position = position
            if groups:
                grouped.append((shard, groups))
        for shard, groups in grouped:
            self._send_groups(shard, groups)

    def _send_groups(self, shard: str, groups: list[list[_Queued]]) -> None:
        if (reason := self._refusal(shard)) is not None:
            for group in groups:
                for entry in group:
                    self._fail_entry(entry, reason)
            return
        opened = [self._open_singles(shard, group) for group in groups]
        message = [batch.CALLS, self.inbox, [call.group for call in opened]]
        try:
            data = self.codec.pack(message)
            if len(data) <= self.bus.max_payload:
                self.bus.send(self.subjects.run_call(self.run, shard), data)
                return
        except CodecError:
            pass
        except BusError as error:
            self._fail_open(opened, error)
            return
        # One of them can't travel, or together they are too large: take them apart.
        for call in opened:
            self._open.pop(call.number, None)
        self._send_apart(shard, groups)

    def _send_apart(self, shard: str, groups: list[list[_Queued]]) -> None:
        if len(groups) > 1:
            half = len(groups) // 2
            self._send_groups(shard, groups[:half])
            self._send_groups(shard, groups[half:])
            return
        (group,) = groups
        if len(group) > 1:
            half = len(group) // 2
            halves = group[:half], group[half:]
            for part in halves:
                self._calls += 1
                for position, entry in enumerate(part):
                    entry.placeholder.call = self._calls
                    entry.placeholder.position = position
            for part in halves:
                self._send_groups(shard, [part])
            return
        entry = group[0]
        try:
            size = len(self.codec.pack([entry.args, entry.kwargs]))
            reason: WireError = [
                PayloadTooLargeError.__name__,
                f"the arguments take {size} bytes, more than the {self.bus.max_payload} that "
                "one message may hold",
                "",
            ]
        except CodecError as error:
            reason = [CodecError.__name__, str(error), ""]
        self._fail_entry(entry, reason)

    def _open_singles(self, shard: str, entries: list[_Queued]) -> _OpenSingles:
        first = entries[0]
        placeholders = [entry.placeholder for entry in entries]
        options: dict[str, Any] = {}
        kept = [p.position for p in placeholders if p.used and not p.wanted]
        if kept:
            options["keep"] = kept
            for position in kept:
                placeholders[position].kept = True
        if first.class_path is not None:
            options["class"], options["folder"] = first.class_path
        if first.by is not None:
            options["chain"] = chain_of(first.by)
        options["round"] = self.round if first.by is None else first.by.group.round
        number = first.placeholder.call
        group = [
            number,
            first.method,
            [_column([e.args[i] for e in entries]) for i in range(len(first.args))],
            {k: _column([e.kwargs[k] for e in entries]) for k in first.kwargs},
            batch.column([e.index for e in entries]),
            options,
        ]
        timeout = first.placeholder.deadline or self.timeout
        call = _OpenSingles(number, shard, group, timeout, placeholders)
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
        if placeholder.call < 0:
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
        if self._lent:
            for key in [k for k, (_, since) in self._lent.items() if now - since > _LENT_FOR]:
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
            for number, sequence, positions, values, errors in fields[1]:
                call = self._open.get(number)
                if call is None or sequence in call.seen:
                    continue
                call.seen.add(sequence)
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
    """The calls that led to the one under way, outermost first: ``[shard, index, name]``."""
    group = task.group
    return [*group.chain, [group.shard.id, task.index, task.get_name()]]


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
