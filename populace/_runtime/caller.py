"""The calling side: gathers calls into batches, and settles placeholders when answers come.

Every process that calls agents has one: programs, directors, and workers themselves.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from populace._runtime import pieces
from populace._runtime.driver import CallTask, PlainCall, calling
from populace._runtime.flow import ANSWER_WINDOW, Lane, call_cost
from populace._runtime.open_calls import Column, OpenCall, OpenPart, OpenSingles, Queued
from populace._runtime.profile import Profile
from populace._runtime.references import PLACEHOLDER_EXTENSION, References
from populace.errors import CallTimeoutError, WireError, error_from_wire
from populace.placeholder import Placeholder, find_placeholders
from shared.bus import Bus, Message
from shared.codec import Codec
from shared.errors import BusError, CodecError, PayloadTooLargeError, PopulaceError
from shared.logs import get_logger
from shared.messages import batch
from shared.subjects import ENVIRONMENT, Subjects

if TYPE_CHECKING:
    from populace.answers import Answers

_log = get_logger(__name__)

AGENT_EXTENSION = PLACEHOLDER_EXTENSION + 1
_SWEEP = 0.1
_FIRST_RECAP = 0.3
_SLOWEST_RECAP = 5.0
_MOST_RECAPPED = 10_000
_MOST_PER_GROUP = 4096

Maker = Callable[[], list[OpenCall]]
"""Packs calls when their turn comes."""


class Caller:
    """Sends calls to shards, and receives their answers in one inbox.

    Args:
        bus: the connection; its process name is part of the inbox's subject.
        codec: packs arguments and answers; placeholders and proxies are registered with it.
        scope: of the run whose agents are called, see ``Subjects.scope``.
        timeout: seconds without any sign of progress after which a call has failed.
        profile: where to note how long answers were under way.
    """

    def __init__(
        self,
        bus: Bus,
        codec: Codec,
        subjects: Subjects,
        scope: str,
        *,
        timeout: float,
        profile: Profile | None = None,
    ) -> None:
        self.bus = bus
        self.codec = codec
        self.subjects = subjects
        self.scope = scope
        self.timeout = timeout
        self._profile = profile
        self.inbox = subjects.inbox(bus.process, "a")
        self.references = References(self)
        self.round = 0
        self._queue: dict[str, list[Queued]] = {}
        self._segments: list[dict[str, list[Queued]] | Callable[[], None]] = []
        """What goes out before the queue, in order: queues, and senders of population calls."""
        self._scheduled = False
        self._calls = 0
        self._deeds = 0
        """Calls to environments so far that no agent made."""
        self.steps = 0
        """Population calls so far."""
        self._lanes: dict[str, Lane] = {}
        self._open: dict[int, OpenCall] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._lost: dict[str, str] = {}
        self._pieces = pieces.Assembler()
        self._recap_step = _SLOWEST_RECAP
        self._recap_at = time.monotonic() + _SLOWEST_RECAP
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        """Begin to receive answers."""
        await self.bus.subscribe(self.inbox, self._receive)
        self.bus.on_event(self._bus_event)

    def close(self, reason: str) -> None:
        """Fail whatever is open; nothing can be called any more."""
        self._closed = True
        for lane in self._lanes.values():
            self._give_up(lane)
        for open_call in list(self._open.values()):
            open_call.fail(["closed", reason, ""])
        self._open.clear()
        self.references.close(reason)
        if self._sweeper is not None:
            self._sweeper.cancel()

    def subject_of(self, shard: str) -> str:
        """Where a shard listens."""
        return self.subjects.run_call(self.scope, shard)

    def placeholder_of(self, number: int, position: int) -> Placeholder[Any] | None:
        """The placeholder of a call to a single agent, while it is open."""
        call = self._open.get(number)
        return call.placeholders[position] if isinstance(call, OpenSingles) else None

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
        by = calling()
        if by is not None:
            by.note_call(placeholder)
            by.group.shard.mix([by.index])
        key = self._key(by) if shard[0] == ENVIRONMENT else None
        if by is not None and by.group.shard.replaying:
            return placeholder  # it was made when this was done for the first time
        self._queue.setdefault(shard, []).append(
            Queued(placeholder, index, method, args, kwargs, class_path, by, self.round, key)
        )
        self._schedule()
        return placeholder

    def next_step(self) -> int:
        """A number for a population call, the same at all of its shards; it rises."""
        self.steps += 1
        return self.steps

    def _key(self, by: CallTask | PlainCall | None) -> list[Any]:
        """What makes a call to an environment the same when it is made again.

        ``[who, where, number]``: an agent counts its own, and is the same wherever it lives;
        others count by process, which is ``where``.
        """
        if by is not None:
            agent = by.group.shard.agents[by.index]
            return [agent.id, "", agent._next_deed()]
        self._deeds += 1
        return ["", self.inbox, self._deeds]

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

    def _send_queue(self, queue: dict[str, list[Queued]]) -> None:
        """Send calls to single agents."""
        groups: list[tuple[str, list[Queued]]] = []
        for shard, entries in queue.items():
            reason = self.refusal(shard)
            here: list[Queued] = []
            for entry in entries:
                if reason is not None:
                    self._fail_entry(entry, reason)
                elif entry.placeholder.done():  # cancelled before it left
                    continue
                elif here and len(here) < _MOST_PER_GROUP and here[-1].like(entry):
                    here.append(entry)
                else:
                    here = [entry]
                    groups.append((shard, here))
        for made, calls in self._pack_groups(groups).items():
            self._push(made, calls)

    def _pack_groups(self, groups: list[tuple[str, list[Queued]]]) -> dict[str, list[OpenCall]]:
        """Number, pack and open calls; by shard.

        Every call is numbered before any is packed, so that calls of one tick can refer to one
        another. Where a group must be divided, which changes numbers, all is packed anew.
        """
        while True:
            for _, group in groups:
                self._calls += 1
                for position, entry in enumerate(group):
                    entry.placeholder.call = self._calls
                    entry.placeholder.position = position
            rows = [self._pack_group(group) for _, group in groups]
            if all(row is not None for row in rows):
                break
            groups = [
                (shard, part)
                for (shard, group), row in zip(groups, rows, strict=True)
                for part in ([group] if row is not None else self._divide(group))
            ]
        packed: dict[str, list[OpenCall]] = {}
        for (shard, group), row in zip(groups, rows, strict=True):
            assert row is not None
            placeholders = [entry.placeholder for entry in group]
            own = placeholders[0].deadline
            cost = call_cost(len(row), len(group))
            number = placeholders[0].call
            call = OpenSingles(number, shard, row, cost, own or self.timeout, placeholders)
            if own:
                call.start_clock()
                heapq.heappush(self._deadlines, (call.deadline, number))
            packed.setdefault(shard, []).append(call)
        return packed

    def _pack_group(self, group: list[Queued]) -> bytes | None:
        """A group as a row; None if it can't travel as one."""
        try:
            row = self.codec.pack(self._columns(group))
            if len(group) == 1:
                pieces.check_size(len(row), "the arguments take")
        except (CodecError, PayloadTooLargeError):
            return None
        return row if len(group) == 1 or len(row) <= self.bus.max_payload else None

    def _divide(self, group: list[Queued]) -> list[list[Queued]]:
        """A group that can't travel as two; a single call that can't travel at all fails."""
        if len(group) > 1:
            half = len(group) // 2
            return [group[:half], group[half:]]
        entry = group[0]
        try:
            pieces.check_size(
                len(self.codec.pack([entry.args, entry.kwargs])), "the arguments take"
            )
        except (CodecError, PayloadTooLargeError) as error:
            self._fail_entry(entry, [type(error).__name__, str(error), ""])
        return []

    def _columns(self, entries: list[Queued]) -> list[Any]:
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
            if first.placeholder.wanted:
                options["chains"] = [chain_of(e.by) for e in entries if e.by is not None]
            options["agent"] = True
            if first.storm:
                options["storm"] = first.storm
        if first.key is not None:
            options["keys"] = [e.key for e in entries]
        options["round"] = first.round
        return [
            first.placeholder.call,
            first.method,
            [_column([e.args[i] for e in entries]) for i in range(len(first.args))],
            {k: _column([e.kwargs[k] for e in entries]) for k in first.kwargs},
            batch.column([e.index for e in entries]),
            options,
        ]

    def refusal(self, shard: str) -> WireError | None:
        """Why a shard can't be called, if it can't."""
        if self._closed:
            return ["closed", "the connection to the agents is closed", ""]
        if shard in self._lost:
            return ["worker_lost", self._lost[shard], ""]
        return None

    def _fail_entry(self, entry: Queued, error: WireError) -> None:
        placeholder = entry.placeholder
        placeholder._set_error(error_from_wire(placeholder.label, placeholder.method, error))

    def call_part(
        self,
        answers: Answers[Any],
        shard: str,
        method: str,
        args: list[Any],
        kwargs: dict[str, Any],
        indexes: Sequence[int],
        offset: int,
        options: dict[str, Any],
        timeout: float | None,
    ) -> None:
        """Send a population call to some agents of a shard, when its turn comes.

        ``offset`` is the place of the first of them within the population.
        ``args`` and ``kwargs`` may hold ``Column``s, whose values are for these indexes.
        """
        by = calling()
        options = {**options, "flow": True, "round": self.round if by is None else by.group.round}
        if by is not None:
            options["chains"] = [chain_of(by)]
            options["agent"] = True
            by.group.shard.mix([by.index])

        def make(part: slice) -> list[OpenCall]:
            if answers.cancelled():
                return []
            here = indexes[part]
            self._calls += 1
            number = self._calls
            columns = [
                number,
                method,
                [_shared_or_column(a, part) for a in args],
                {k: _shared_or_column(v, part) for k, v in kwargs.items()},
                batch.column(here),
                options,
            ]
            row, error = b"", self.refusal(shard)
            if error is None:
                try:
                    row = self.codec.pack(columns)
                    if len(row) > self.bus.max_payload:
                        if len(here) > 1 and _has_columns(args, kwargs):
                            half = (part.start + part.stop) // 2
                            return [
                                *make(slice(part.start, half)),
                                *make(slice(half, part.stop)),
                            ]
                        pieces.check_size(len(row), "the arguments take")
                except PopulaceError as refused:
                    error = [type(refused).__name__, str(refused), ""]
            cost = call_cost(len(row), len(here))
            first = offset + part.start
            call = OpenPart(
                number, shard, row, cost, timeout or self.timeout, answers, first, len(here)
            )
            if error is not None:
                call.fail(error)
                return []
            answers._parts.add(number)
            return [call]

        self._push(shard, lambda: make(slice(0, len(indexes))))

    # Sending
    def _push(self, shard: str, item: list[OpenCall] | Maker) -> None:
        """Send calls to a shard behind those that wait already."""
        lane = self._lanes.get(shard)
        if lane is None:
            lane = self._lanes[shard] = Lane(shard, time.monotonic())
        if not lane.backlog:
            lane.moved = time.monotonic()
        lane.backlog.append(item if callable(item) else self._register(item))
        self._pump(lane)

    def _register(self, calls: list[OpenCall]) -> list[OpenCall]:
        self._open.update((call.number, call) for call in calls)
        return calls

    def _pump(self, lane: Lane) -> None:
        """Send what there is credit for."""
        backlog = lane.backlog
        while backlog and lane.open:
            item = backlog.popleft()
            self._send_some(lane, self._register(item()) if callable(item) else item)
        if not backlog:
            lane.moved = time.monotonic()
        self.keep_sweeping()

    def _send_some(self, lane: Lane, calls: list[OpenCall]) -> None:
        """Send as many of these rows as one message and the credit allow; put back the rest."""
        limit = self.bus.max_payload - 512  # the inbox's name, and what msgpack adds
        leaving: list[OpenCall] = []
        stop = size = 0
        while stop < len(calls) and lane.open:
            call = calls[stop]
            if call.number in self._open:  # else it was cancelled, or is overdue
                size += len(call.row) + 16
                if leaving and size > limit:
                    break
                lane.sent += call.cost
                leaving.append(call)
            stop += 1
        if stop < len(calls):
            lane.backlog.appendleft(calls[stop:])
        if not leaving:
            return
        try:
            self._send_calls(lane.shard, leaving)
        except BusError as error:
            lane.sent -= sum(call.cost for call in leaving)
            self._fail_open(leaving, [type(error).__name__, str(error), ""])
            return
        for call in leaving:
            call.sent = True
            if not call.deadline:
                call.start_clock()
                heapq.heappush(self._deadlines, (call.deadline, call.number))
            if isinstance(call, OpenSingles) and call.cancelled:
                self._send_cancel(call.shard, call.number, call.cancelled)

    def _send_calls(self, shard: str, calls: Sequence[OpenCall]) -> None:
        rows, costs = [call.row for call in calls], [call.cost for call in calls]
        data = self.codec.pack([batch.CALLS, self.inbox, rows, costs, time.time()])
        pieces.send(self.bus, self.codec, self.subject_of(shard), data)

    def _fail_open(self, calls: Sequence[OpenCall], error: WireError) -> None:
        for call in calls:
            self._open.pop(call.number, None)
            call.fail(error)

    def _give_up(self, lane: Lane) -> None:
        """Have what waits for a shard that takes no calls any more fail."""
        backlog, lane.backlog = lane.backlog, type(lane.backlog)()
        for item in backlog:
            if callable(item):
                item()  # finds that the shard is refused, and fails

    def keep_sweeping(self) -> None:
        """Look after time-outs as long as anything is open."""
        if self._sweeper is None and not self._closed:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP, self._sweep)

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
            reason = f"no answer within {seconds:g} s"
            placeholder._set_error(
                CallTimeoutError(placeholder.label, placeholder.method, "timeout", reason)
            )

    def cancel(self, placeholder: Placeholder[Any]) -> None:
        """Tell the worker that nobody waits for this call any more."""
        if placeholder.call >= 0 and placeholder._source is None:
            call = self._open.get(placeholder.call)
            if isinstance(call, OpenSingles):
                call.left -= 1
                if call.left <= 0:
                    self._open.pop(call.number, None)
                if not call.sent:  # the cancellation must not come before the call
                    call.cancelled.append(placeholder.position)
                    return
            self._send_cancel(placeholder.shard, placeholder.call, [placeholder.position])

    def cancel_part(self, number: int) -> None:
        """End what is left of a population call at one shard."""
        part = self._open.pop(number, None)
        if part is not None and part.sent:
            self._send_cancel(part.shard, number, None)

    def _send_cancel(self, shard: str, number: int, positions: list[int] | None) -> None:
        packed = None if positions is None else batch.column(positions)
        data = self.codec.pack([batch.CANCEL, self.inbox, number, packed])
        try:
            self.bus.send(self.subject_of(shard), data)
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
            if call.paused:  # its answers wait for this side
                call.start_clock()
            if call.deadline > now:  # it made progress since
                heapq.heappush(self._deadlines, (call.deadline, number))
                continue
            del self._open[number]
            if call.sent:
                self._send_cancel(call.shard, number, None)
            call.fail(["timeout", f"no answer within {call.timeout:g} s", ""])
        for lane in self._lanes.values():
            if lane.backlog and now - lane.moved > self.timeout:
                self._fail_backlog(lane)
        if now >= self._recap_at:
            if self.bus.connected:
                self._recap(now)
            else:
                self._recap_at = now + _FIRST_RECAP
        self.references.sweep(now)
        if self._open or not self.references.idle or any(x.backlog for x in self._lanes.values()):
            self.keep_sweeping()

    def _fail_backlog(self, lane: Lane) -> None:
        """Fail calls that waited for a shard's credit for too long."""
        reason = f"no answer within {self.timeout:g} s; its shard did not even take the call"
        backlog, lane.backlog = lane.backlog, type(lane.backlog)()
        for item in backlog:
            self._fail_open(item() if callable(item) else item, ["timeout", reason, ""])

    def shards_lost(self, shards: Sequence[str], reason: str) -> None:
        """Fail all calls to shards whose worker is gone, and all later ones."""
        for shard in shards:
            self._lost[shard] = reason
        lost = set(shards)
        for call in [c for c in self._open.values() if c.shard in lost]:
            del self._open[call.number]
            call.fail(["worker_lost", reason, ""])
        for shard in lost & self._lanes.keys():
            self._give_up(self._lanes.pop(shard))
        self.references.shards_lost(lost, reason)

    def shards_moved(self, shards: Sequence[str]) -> None:
        """Ask the new holders of these shards after all calls that were not answered."""
        moved = set(shards)
        if not moved:
            return
        numbers = [c.number for c in self._open.values() if c.shard in moved and c.sent]
        for shard in moved & self._lanes.keys():
            lane = self._lanes[shard]
            lane.sent = lane.credited = 0  # the new holder counts from nothing
            lane.taken = lane.told = 0
        self._send_again(numbers)
        for shard in moved & self._lanes.keys():
            self._pump(self._lanes[shard])

    # Answers
    def _receive(self, message: Message) -> None:
        self._handle(message.data)

    def _handle(self, data: bytes) -> None:
        fields = batch.check(self.codec.unpack(data))
        kind = fields[0]
        if kind == batch.ANSWERS:
            self._answered(*fields[1:])
        elif kind == batch.SUMMARY:
            for number, done, failed, tokens, peek, partial in fields[1]:
                part = self._open.get(number)
                if isinstance(part, OpenPart) and part.summary(done, failed, tokens, peek, partial):
                    self._open.pop(number, None)
                    if self._profile is not None:
                        self._profile.arrived(fields[2], part.size)
        elif kind == batch.DONE:
            for number, sequence, positions in fields[1]:
                singles = self._open.get(number)
                if not isinstance(singles, OpenSingles) or sequence in singles.seen:
                    continue
                singles.seen.add(sequence)
                if singles.kept(batch.numbers(positions)):
                    self._open.pop(number, None)
        elif kind == batch.CREDIT:
            self._credit(fields[1], fields[2])
        elif kind == batch.FETCHED:
            self.references.fetched(fields[1])
        elif kind == batch.FETCH:
            self.references.lend(fields[1], fields[2])
        elif kind == batch.UNKNOWN:
            self._send_again(fields[1])
        elif kind == batch.REFUSED:
            for number, error in fields[1]:
                refused = self._open.pop(number, None)
                if refused is not None:
                    refused.fail(error)
        elif kind == batch.PIECE:
            whole = self._pieces.take(fields)
            if whole is not None:
                self._handle(whole)
        else:
            raise CodecError(f"a message of kind {kind} does not belong in an inbox")

    def _answered(self, shard: str, charge: int, rows: Sequence[bytes], sent: float) -> None:
        for row in rows:
            number, sequence, positions, values, errors, tokens = self.codec.unpack(row)
            call = self._open.get(number)
            if call is None or sequence in call.seen:
                continue
            call.seen.add(sequence)
            call.tokens += tokens
            if self._profile is not None:
                self._profile.arrived(sent, len(values))
            if call.answers(batch.numbers(positions), values, errors, len(row)):
                self._open.pop(number, None)
        lane = self._lanes.get(shard)
        if lane is not None and charge:
            told = lane.take(charge)
            if told is not None:
                self._send_taken(shard, 0, told)

    def _credit(self, shard: str, begun: int) -> None:
        lane = self._lanes.get(shard)
        if lane is not None:
            lane.credit(begun, time.monotonic())
            self._pump(lane)

    def part_taken(self, part: OpenPart, size: int) -> None:
        """Note that answers of a population call were taken, so that more may come."""
        part.untaken -= size
        if part.number in self._open and part.taken - part.told >= ANSWER_WINDOW // 4:
            part.told = part.taken
            part.start_clock()
            self._send_taken(part.shard, part.number, part.taken)

    def _send_taken(self, shard: str, number: int, taken: int) -> None:
        data = self.codec.pack([batch.TAKEN, self.inbox, [[number, taken]]])
        try:
            self.bus.send(self.subject_of(shard), data)
        except BusError as error:  # a recap will tell it again
            _log.warning("a worker was not told what was taken", shard=shard, error=str(error))

    def _bus_event(self, event: str, detail: str) -> None:
        if event == "closed" and not self._closed:
            self.close(f"the connection to the broker is closed ({detail})")
        elif event in ("reconnected", "slow_consumer"):
            # Messages are lost. Soon, and again while the workers may be away themselves.
            self._recap_step = _FIRST_RECAP
            self._recap_at = time.monotonic() + _FIRST_RECAP

    def _recap(self, now: float) -> None:
        """Ask the workers after calls that made no progress for a while.

        Messages may be lost when any connection breaks, the worker's included, of which this
        side hears nothing. A worker that is merely busy has nothing to answer.
        """
        since = now - self._recap_step
        by_shard: dict[str, list[list[int]]] = {
            lane.shard: [] for lane in self._lanes.values() if lane.backlog
        }
        under_way = dict.fromkeys(self._lanes, 0)
        for call in self._open.values():
            if call.sent and call.shard in under_way:
                under_way[call.shard] += call.cost
            if call.sent and not call.paused and call.deadline - call.timeout <= since:
                rows = by_shard.setdefault(call.shard, [])
                if len(rows) < _MOST_RECAPPED:
                    rows.append([call.number, len(call.seen), call.taken])
        for shard, cost in under_way.items():
            # What was lost on the way, and then given up, takes no room any more.
            lane = self._lanes[shard]
            lane.sent = min(lane.sent, lane.credited + cost)
            self._pump(lane)
        for shard, rows in by_shard.items():
            data = self.codec.pack([batch.RECAP, self.inbox, rows])
            try:
                self.bus.send(self.subject_of(shard), data)
            except BusError as error:
                _log.warning("calls could not be asked after", shard=shard, error=str(error))
        self.references.ask_again()
        self._recap_step = min(_SLOWEST_RECAP, self._recap_step * 2)
        self._recap_at = now + self._recap_step

    def _send_again(self, numbers: list[int]) -> None:
        for number in numbers:
            call = self._open.get(number)
            if call is not None and call.sent:
                _log.warning("calls were lost on the way and are sent again", shard=call.shard)
                self._send_calls(call.shard, [call])


def chain_of(task: CallTask | PlainCall) -> list[Any]:
    """The calls that wait for what the one under way does, outermost first.

    Each is ``[shard, index, name, caller's inbox, call, position]``.
    """
    group = task.group
    key = [group.caller, group.number, task.position]
    return [*group.chain(task.position), [group.shard.id, task.index, task.get_name(), *key]]


def _column(values: list[Any]) -> list[Any]:
    first = values[0]
    if all(value is first for value in values):
        return [batch.SHARED, first]
    return batch.pack_values(values)


def _shared_or_column(value: Any, part: slice) -> list[Any]:
    if isinstance(value, Column):
        return batch.pack_values(value.values[part])
    return [batch.SHARED, value]


def _has_columns(args: list[Any], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(v, Column) for v in (*args, *kwargs.values()))
