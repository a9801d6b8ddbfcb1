"""A stage: the shard that holds one environment, its journal, and its events.

What is done to an environment is journalled in the order in which it was done, and answered
only when the journal has it. Another process can therefore take an environment over: it makes
it anew, does everything again in that order, and goes on. Three kinds of calls are told apart:

- plain methods, and ``async`` ones that wait by ``until`` alone, follow from state, arguments
  and the environment's random numbers; they are journalled when they begin, and done again;
- ``async`` methods that wait for others can't be done again; when such a call ends, the whole
  state and its outcome are journalled;
- ``readonly`` methods leave no trace: they draw from a copy of the random stream, and tell nothing.

What a method calls elsewhere is not called again when it is done again. Now and then, while nothing
is under way, the whole state is written down, and what stands before it in the journal is let go.

Each call carries a key, made of its caller, round and number. A call whose key was seen before
gets the answer of the first, and has no further effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from populace._random import AgentRandom
from populace._runtime.driver import CallTask, current_call
from populace._runtime.flow import Account
from populace._runtime.shard import CREATE, Group, Shard, _own
from populace.environment import OWN_USE, Environment, Until
from populace.errors import StateError, WireError
from shared.codec import pack_plain, plain, to_json
from shared.errors import BusError, CodecError, InvalidInputError, PopulaceError
from shared.logs import get_logger
from shared.messages import batch
from shared.streams import append_patiently

if TYPE_CHECKING:
    from populace._runtime.cost import Cost
    from populace._runtime.waves import Waves
    from populace._runtime.worker import Worker

_log = get_logger(__name__)

CALL, STATE, TAKEOVER, CANCEL, NUMBER, SNAPSHOT, LISTEN, UNLISTEN = range(8)
"""Kinds of journal entries: a call begun; the state after one that can't be done again; another
process takes over; a call cancelled while it was under way; the number of an event told by a call
whose outcome is still open; the whole state; a listener of the environment's own, and its end."""
MOST_EVENTS = 16
"""Events of which each led to the next, until they are taken for a storm without an end."""
_ROUNDS_KEPT = 2
_MOST_OUTCOMES = 1_000_000
"""Outcomes of one round's calls that are remembered, in case one is made again."""
_SNAPSHOT_EVERY = 64 << 20
"""Bytes of journal after which the whole state is written down."""
_ENTRY_ROOM = 4096
_SILENCE = 20
"""Seconds without a message after which a journal can't be read to its end."""

Key = tuple[Any, ...]
Outcome = tuple[Any, WireError | None]


class Entry:
    """Something done, on its way to the journal."""

    __slots__ = ("dropped", "key", "packed")

    def __init__(self, key: Key, packed: bytes) -> None:
        self.key = key
        self.packed = packed
        self.dropped = False
        """Whether it turned out to be a call that can't be done again."""


class Stage(Shard):
    """Holds one environment. See the module's text.

    Args:
        worker: the worker that it belongs to.
        path: the environment's path.
        cls: its class.
        epoch: rises each time that it is taken over.
        owner: the process that owns the run, and stays through that.
    """

    def __init__(
        self, worker: Worker, path: str, cls: type[Environment], epoch: int, owner: str = ""
    ) -> None:
        super().__init__(worker, f"@{path}", f"@{path}", cls, 0, 1)
        self.finished = None  # it has a journal
        self.path = path
        self.kind = cls
        self.epoch = epoch
        self.owner = owner
        self._entries: list[Entry] = []
        self._events: list[dict[str, Any]] = []
        self._then: list[Callable[[], None]] = []
        self._writer: asyncio.Task[None] | None = None
        self._done: dict[int, dict[Key, Outcome]] = {}
        self._under_way: dict[Key, Entry | None] = {}
        self._repeated: dict[Key, list[tuple[Group, int]]] = {}
        self._aside: list[tuple[CallTask, Until]] = []
        self._resuming = False
        self._now: tuple[Group | None, int] = (None, 0)
        self._event_number = 0
        self._written = 0
        """Bytes of journal since the last snapshot."""
        self._lot = 0
        self._reading = False
        self._own_listeners: list[list[Any]] = []
        """What the environment listens to: arguments of ``Worker.listen``."""
        self.waves: Waves | None = None
        """Where calls gather, if they are applied in agent order."""
        self._replayed: list[dict[str, Any]] = []
        """Events of the last lot of a journal that is done again."""
        self._waits = Account("")
        """Of calls that the journal holds; nobody is told of their credit."""

    def agent_name(self, index: int) -> str:
        """The environment's path."""
        return self.path

    @property
    def own_listeners(self) -> list[list[Any]]:
        """What the environment listens to: arguments of ``Worker.listen``."""
        return list(self._own_listeners)

    @property
    def environment(self) -> Environment | None:
        """The environment, once it was made."""
        held = self.agents[0]
        return held if isinstance(held, Environment) else None

    @staticmethod
    def _method(owner: type, name: str) -> Callable[..., Any] | None:
        return None if name in OWN_USE else Shard._method(owner, name)

    # Doing
    def _begin(self, group: Group, stop: int) -> None:
        start, group.cursor = group.cursor, stop
        if group.round != self.round:
            self._enter_round(group.round)
        for position in range(start, stop):
            if group.cancelled and position in group.cancelled:
                continue
            if self.waves is None or not self.waves.hold(group, position):
                self.apply(group, position)

    def apply(self, group: Group, position: int) -> None:
        """Begin a call, or queue it behind the one under way."""
        index = group.indexes[position]
        if 0 in self._busy and not self._is_readonly(group.method):
            self._enqueue(group, position, index)
        else:
            self._invoke(group, position, index)

    def _is_readonly(self, method: str) -> bool:
        return hasattr(getattr(self.cls, method, None), "_populace_readonly")

    def _enter_round(self, number: int) -> None:
        super()._enter_round(number)
        for old in [r for r in self._done if r <= number - _ROUNDS_KEPT]:
            del self._done[old]

    def _key_of(self, group: Group, position: int) -> Key:
        if group.keys is not None:
            return tuple(group.keys[position])
        return group.caller, group.number, position

    def _invoke(self, group: Group, position: int, index: int) -> None:
        key = self._key_of(group, position)
        known = self._done.get(group.round, {}).get(key)
        if known is not None:
            value, error = known
            if error is None:
                super().answer(group, position, value)
            else:
                super().answer_error(group, position, error)
            return
        if key in self._under_way:
            self._repeated.setdefault(key, []).append((group, position))
            return
        if len(group.storm) >= MOST_EVENTS:
            self.answer_error(group, position, _storm_error(group.storm, group.method, self.path))
            return
        if self._is_readonly(group.method):
            self._read(group, position, index)
            return
        self._under_way[key] = self._note(key, group, position)
        self._now = (group, position)
        try:
            if group.method == CREATE:
                self._create(group, position, position + 1)
            else:
                super()._invoke(group, position, index)
        finally:
            self._now = (None, 0)
        self._release(0)

    def _read(self, group: Group, position: int, index: int) -> None:
        """Run a method that leaves no trace."""
        held = self.environment
        before = None if held is None else _random_of(held)
        outer, self._now, self._reading = self._now, (group, position), True
        try:
            super()._invoke(group, position, index)
        finally:
            self._now, self._reading = outer, False
            if held is not None:
                _set_random(held, before)

    def _note(self, key: Key, group: Group, position: int) -> Entry | None:
        """Write a call down as it begins."""
        if self.replaying:
            return None
        args, kwargs = group.arguments(position)
        row = [CALL, list(key), group.method, args, kwargs, group.round, list(group.storm)]
        entry = Entry(key, self.worker.codec.pack(row))
        self._entries.append(entry)
        return entry

    def _start(self, group: Group, position: int, index: int, coro: Any) -> None:
        super()._start(group, position, index, coro)
        key = self._key_of(group, position)
        if key in self._under_way and not any(
            task.group is group and task.position == position for task, _ in self._aside
        ):
            # It waits for something else than this environment: only its outcome is kept.
            entry = self._under_way[key]
            if entry is not None:
                entry.dropped = True

    def answer(
        self,
        group: Group,
        position: int,
        value: Any,
        seconds: float = 0.0,
        cost: Cost | None = None,
    ) -> None:
        """See ``Shard.answer``."""
        value = _own(value)  # as it is now: it is sent later, when it may have changed
        failed = bool(group.errors) and group.errors[-1][0] == len(group.positions)
        error = group.errors[-1][1] if failed else None
        super().answer(group, position, value, seconds, cost)
        key = self._key_of(group, position)
        if key not in self._under_way:
            return
        entry = self._under_way.pop(key)
        outcome: Outcome = (value, error)
        self._remember(group.round, key, outcome)
        if entry is not None and entry.dropped:
            self._note_state(key, group.round, outcome)
        for repeat, place in self._repeated.pop(key, ()):
            self._invoke(repeat, place, 0)

    def _remember(self, round_number: int, key: Key, outcome: Outcome) -> None:
        done = self._done.setdefault(round_number, {})
        done[key] = outcome
        if len(done) > _MOST_OUTCOMES:
            del done[next(iter(done))]

    def _note_state(self, key: Key, round_number: int, outcome: Outcome) -> None:
        """Write down what a call that can't be done again has led to."""
        environment = self.environment
        assert environment is not None
        packed = self._packed_state([STATE, list(key)], round_number, [list(outcome)])
        if packed is not None:
            self._entries.append(Entry(key, packed))

    def _packed_state(self, head: list[Any], round_number: int, tail: list[Any]) -> bytes | None:
        """The whole state as a row; None if it can't be written down."""
        try:
            return self._pack_state(head, round_number, tail)
        except StateError as error:
            _log.error(
                "an environment's state can't be kept; it will be lost with its process",
                path=self.path,
                error=str(error),
            )
            return None

    def _pack_state(self, head: list[Any], round_number: int, tail: list[Any]) -> bytes:
        environment = self.environment
        assert environment is not None
        state = {k: v for k, v in environment.snapshot().items() if not k.startswith("__")}
        deeds = getattr(environment, "_deeds", 0)
        row = [state, _random_of(environment), round_number, self._event_number, deeds]
        try:
            return self.worker.codec.pack([*head, *row, *tail])
        except CodecError as error:
            kind = type(environment).__name__
            raise StateError(f"the environment {self.path!r} ({kind}): {error}") from None

    # Waiting aside
    def step_aside(self, task: CallTask, until: Until) -> None:
        """A call waits for the environment itself: let others in."""
        self._aside.append((task, until))
        held = self._busy.get(0)
        if held is task:
            del self._busy[0]
        elif held is not None:
            self._full(0).active.remove(task)
            self._release(0)

    def _release(self, index: int) -> None:
        """Go on with a call that stood aside, if it may; else with the next in the queue."""
        if self._resuming:
            return  # whoever resumes looks at all of them, and releases at the end
        self._resume()
        super()._release(index)

    def _free(self) -> bool:
        held = self._busy.get(0)
        return held is None or (
            not isinstance(held, CallTask) and not held.active and not held.promised
        )

    def _resume(self) -> None:
        """Go on with calls whose condition holds now, first come first served."""
        self._resuming = True
        try:
            while self._free():
                for i, (task, until) in enumerate(self._aside):
                    if _holds(until):
                        del self._aside[i]
                        self._mark_active(task)
                        task.wake(until)
                        break
                else:
                    return
        finally:
            self._resuming = False

    def _mark_active(self, task: CallTask) -> None:
        if 0 in self._busy:
            self._full(0).active.append(task)
        else:
            self._busy[0] = task

    def _finished(self, task: CallTask, result: Any, failure: BaseException | None) -> None:
        if task not in self.active(0):  # it was cancelled while it stood aside
            self._aside = [(t, u) for t, u in self._aside if t is not task]
            self._mark_active(task)
        group, position = task.group, task.position
        if group.cancelled and position in group.cancelled:
            self._note_cancelled(group, position)
        super()._finished(task, result, failure)
        self._release(0)

    def _note_cancelled(self, group: Group, position: int) -> None:
        """Write down that a call under way was cancelled, as what it did so far stays done."""
        key = self._key_of(group, position)
        if key not in self._under_way:
            return
        entry = self._under_way.pop(key)
        self._repeated.pop(key, None)
        outcome: Outcome = (None, ["cancelled", "the call was cancelled", ""])
        self._remember(group.round, key, outcome)
        if self.replaying:
            return
        if entry is not None and entry.dropped:
            self._note_state(key, group.round, outcome)
        else:
            packed = self.worker.codec.pack([CANCEL, list(key)])
            self._entries.append(Entry(key, packed))
        self._write_soon()

    def cancel(self, group: Group, positions: Sequence[int]) -> None:
        """See ``Shard.cancel``; calls that wait for their wave are taken out of it."""
        left = []
        for position in positions:
            if self.waves is not None and self.waves.remove(group, position):
                group.cancelled = {*(group.cancelled or ()), position}
                group.left -= 1
                self.worker.forget(group, position)
            else:
                left.append(position)
        super().cancel(group, left)

    def task_of(self, group: Group, position: int) -> CallTask | None:
        """See ``Shard.task_of``."""
        for task, _ in self._aside:
            if task.group is group and task.position == position:
                return task
        return super().task_of(group, position)

    def _call_now(self) -> tuple[Group | None, int]:
        """The call under way, as its group and position."""
        call = current_call()
        if call is not None and call.group.shard is self:
            return call.group, call.position
        return self._now

    def caller_now(self) -> str:
        """The agent whose call is under way; empty if it is none of an agent's."""
        group, position = self._call_now()
        return str(group.keys[position][0]) if group is not None and group.keys else ""

    # Events
    def emit(self, name: str, arguments: dict[str, Any], value: Any) -> None:
        """Have an event told once what led to it is journalled."""
        if self._reading:
            raise InvalidInputError(f"a @readonly method of {self.path} can't tell of events")
        group = self._call_now()[0]
        self._event_number += 1
        if current_call() is not None and not self.replaying:
            # Its call may yet turn out to be one that can't be done again.
            packed = self.worker.codec.pack([NUMBER, ["", self.path, 0], self._event_number])
            self._entries.append(Entry((), packed))
        told = {
            "run": self.worker.run,
            "life": self.worker.life,
            "path": self.path,
            "name": name,
            "round": self.round if group is None else group.round,
            "number": self._event_number,
            "arguments": {k: plain(v) for k, v in arguments.items()},
            "value": plain(value),
            "by": self.caller_now(),
            "storm": [*(() if group is None else group.storm), f"{name} of {self.path}"],
        }
        if self.replaying:
            self._replayed.append(told)
        else:
            self._events.append(told)
            self._write_soon()

    # Its own listeners
    def note_listener(self, arguments: list[Any]) -> None:
        """Have whoever takes over listen to this as well."""
        if arguments not in self._own_listeners:
            self._own_listeners.append(arguments)
            self._write_entry([LISTEN, ["", self.path, 0], arguments])

    def drop_listener(self, arguments: list[Any]) -> None:
        """Forget a listener that was removed."""
        if arguments in self._own_listeners:
            self._own_listeners.remove(arguments)
            self._write_entry([UNLISTEN, ["", self.path, 0], arguments])

    def _write_entry(self, row: list[Any]) -> None:
        self._entries.append(Entry((), self.worker.codec.pack(row)))
        self._write_soon()

    # Journal
    def commit(self, then: Callable[[], None]) -> None:
        """Do something once the journal holds all that was done so far."""
        self._then.append(then)
        self._write_soon()

    def _write_soon(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        """Write down, tell, answer; whatever gathers meanwhile is the next lot."""
        while self._entries or self._events or self._then:
            # A call under way may still turn out to be one that can't be done again; whether it
            # does is known by the end of the tick in which it began, and this runs later.
            entries, self._entries = self._entries, []
            events, self._events = self._events, []
            then, self._then = self._then, []
            try:
                await self._append([e.packed for e in entries if not e.dropped])
                if events:
                    await self._tell(events)
            except Exception as error:
                # Unanswered, the calls are made again by their callers, here or elsewhere.
                _log.error("an environment's journal fails", path=self.path, error=str(error))
                self.worker.abandon(self, f"{type(error).__name__}: {error}")
                return
            for action in then:
                action()
            if self._written > _SNAPSHOT_EVERY:
                await self._write_snapshot()

    async def _write_snapshot(self) -> None:
        """Write the whole state down, so that what stands before it can go."""
        if self._under_way or self._entries or self.environment is None:
            return  # later, when nothing is under way
        packed = self._packed_state(*self._whole_state())
        self._written = 0
        if packed is None:
            return
        worker = self.worker
        subject = worker.subjects.env_journal(worker.run, self.path)
        try:
            sequence = await self._append([packed])
            await worker.bus.purge(worker.subjects.stream_journal, subject, before=sequence)
        except PopulaceError as error:  # the calls before it are still there
            _log.warning("a snapshot was not written", path=self.path, error=str(error))

    def _whole_state(self) -> tuple[list[Any], int, list[Any]]:
        done = [
            [round_number, [[list(key), list(outcome)] for key, outcome in outcomes.items()]]
            for round_number, outcomes in self._done.items()
        ]
        return [SNAPSHOT, ["", "", 0]], self.round, [[done, self._own_listeners]]

    @property
    def quiet(self) -> bool:
        """See ``Shard.quiet``."""
        return super().quiet and not (self._under_way or self._entries or self._events)

    def packed(self) -> bytes:
        """The whole state, as a journal would hold it.

        Raises:
            StateError: it holds values that can't be written down.
        """
        if self.environment is None:
            raise StateError(f"the environment {self.path!r} was never made")
        head, round_number, tail = self._whole_state()
        return self._pack_state(head, round_number, tail)

    async def take_up(self, data: bytes) -> None:
        """Go on from a state that was written down, in a journal that begins with it.

        Raises:
            CodecError: it is no such state.
            BusError: the journal can't be written.
        """
        self._take_state(self.worker.codec.unpack(data))
        await self._append([data])
        for arguments in list(self._own_listeners):
            await self.worker.listen_again(self, arguments, new=True)
        self.changed = False

    async def _append(self, rows: list[bytes]) -> int:
        """Write rows down, in as few messages as they fit; returns the first one's sequence."""
        limit = self.worker.bus.max_payload - _ENTRY_ROOM
        self._lot += 1
        first = start = size = 0
        for i, row in enumerate(rows):
            if i > start and size + len(row) > limit:
                sequence = await self._append_some(rows[start:i])
                first = first or sequence
                start, size = i, 0
            size += len(row) + 8
        if rows:
            sequence = await self._append_some(rows[start:])
            first = first or sequence
        return first

    async def _append_some(self, rows: list[bytes]) -> int:
        limit = self.worker.bus.max_payload - _ENTRY_ROOM
        if len(rows) > 1 or len(rows[0]) <= limit:
            return await self._append_message(rows, 0, 1)
        whole = rows[0]
        count = -(-len(whole) // limit)
        first = 0
        for number in range(count):
            part = whole[number * limit : (number + 1) * limit]
            sequence = await self._append_message([part], number, count)
            first = first or sequence
        return first

    async def _append_message(self, rows: list[bytes], number: int, count: int) -> int:
        worker = self.worker
        subject = worker.subjects.env_journal(worker.run, self.path)
        worker.journalled += 1
        data = pack_plain([self.epoch, self._lot, number, count, rows])
        self._written += len(data)
        name = f"{worker.run}/{self.path}/{worker.id}/{self.epoch}/{worker.journalled}"
        return await append_patiently(worker.bus, subject, data, headers={}, message_id=name)

    async def _tell(self, events: list[dict[str, Any]]) -> None:
        worker = self.worker
        as_json = worker.results_format == "json"
        sends = []
        for told in events:
            data = to_json(told) if as_json else pack_plain(told)
            if len(data) > worker.bus.max_payload:
                _log.error("an event is too large to be told", path=self.path, name=told["name"])
                continue
            subject = worker.subjects.env_event(worker.run, told["name"], self.path)
            # Told again after a takeover, it has the same name, and so is stored once.
            # The owner's is part of it: a run may have the name of one that was deleted.
            name = f"{self.owner}/{worker.scope}/{self.path}/event/{told['number']}"
            sends.append(append_patiently(worker.bus, subject, data, headers={}, message_id=name))
            worker.rules.apply(told)
        await asyncio.gather(*sends)

    # Taking over
    async def take_over(self, *, made: bool) -> None:
        """Do again what the journal says was done, and go on from there.

        Args:
            made: whether the environment was made, as far as its owner knows.

        Raises:
            BusError: the journal can't be read, or its beginning has gone.
        """
        worker = self.worker
        mark = f"{worker.id}/{self.path}/{self.epoch}"
        await self._append([worker.codec.pack([TAKEOVER, mark])])
        rows = await self._read_journal(mark)
        if (rows or made) and not any(_begins(row) for _, row in rows):
            raise BusError(
                f"the environment {self.path!r} can't be taken over: its journal has lost its "
                "beginning, as the broker keeps the latest of all journals alone"
            )
        # Not in here: calls may not run inside a Task, and this is one.
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(self._do_again, rows, over)
        await over
        for arguments in list(self._own_listeners):
            await worker.listen_again(self, arguments)
        # What the last lot led to may not have been told; streams leave out what they have.
        if self._replayed:
            await self._tell(self._replayed)
            self._replayed = []
        _log.info("an environment was taken over", path=self.path, calls=len(rows))

    async def _read_journal(self, mark: str) -> list[tuple[int, list[Any]]]:
        """All entries that count, up to the mark, each with the number of its lot."""
        worker = self.worker
        subject = worker.subjects.env_journal(worker.run, self.path)
        rows: list[tuple[int, list[Any]]] = []
        epoch = lots = silent = 0
        last = (0, 0)
        parts: list[bytes] = []
        replay = worker.bus.replay(worker.subjects.stream_journal, (subject,))
        async for message in replay:
            if message is None:
                silent += 1
                if silent > _SILENCE:
                    break
                continue
            number, lot, part, count, packed = worker.codec.unpack(message.data)
            if number < epoch:
                continue  # of a process that did not know yet that it was replaced
            if number > epoch:
                epoch, parts = number, []
            if (number, lot) != last:
                last, lots = (number, lot), lots + 1
            if count > 1:
                if len(parts) < part:
                    continue  # of a row whose beginning has gone
                parts = [*(parts if part else []), packed[0]]
                if part < count - 1:
                    continue
                packed, parts = [b"".join(parts)], []
            for one in packed:
                entry = worker.codec.unpack(one)
                if entry[0] == TAKEOVER:
                    if entry[1] == mark:
                        return rows
                elif entry[0] == SNAPSHOT:
                    rows = [(lots, entry)]
                else:
                    rows.append((lots, entry))
        raise BusError(f"the journal of {self.path} can't be read to its end")

    def _do_again(self, rows: list[tuple[int, list[Any]]], over: asyncio.Future[None]) -> None:
        kept = {tuple(row[1]) for _, row in rows if row[0] == STATE}
        self.replaying = True
        at = 0
        try:
            for lot, row in rows:
                if lot != at:
                    at = lot
                    self._replayed.clear()  # earlier lots' were told before this was written
                if row[0] in (STATE, SNAPSHOT):
                    self._take_state(row)
                elif row[0] == CANCEL:
                    self._cancel_again(tuple(row[1]))
                elif row[0] == LISTEN:
                    self._own_listeners.append(row[2])
                elif row[0] == UNLISTEN:
                    self._own_listeners.remove(row[2])
                elif row[0] == NUMBER:
                    self._event_number = max(self._event_number, row[2])
                elif tuple(row[1]) not in kept:
                    self._do_one_again(row)
            over.set_result(None)
        except Exception as error:
            over.set_exception(error)
        finally:
            self.replaying = False

    def _cancel_again(self, key: Key) -> None:
        for task, _ in list(self._aside):
            group, position = task.group, task.position
            if self._key_of(group, position) == key:
                group.cancelled = {position}
                self._aside = [(t, u) for t, u in self._aside if t is not task]
                self._mark_active(task)
                task.step(asyncio.CancelledError())

    def _do_one_again(self, row: list[Any]) -> None:
        _, key, method, args, kwargs, round_number, storm = row
        fields = [
            0,
            method,
            [[batch.SHARED, a] for a in args],
            {k: [batch.SHARED, v] for k, v in kwargs.items()},
            [0, 1],
            {"round": round_number, "keys": [key], "storm": storm},
        ]
        group = Group(self, self._waits, fields, 0)
        if 0 in self._busy:
            self._full(0).queue.append((group, 0))
        else:
            if round_number != self.round:
                self._enter_round(round_number)
            self._invoke(group, 0, 0)

    def _take_state(self, row: list[Any]) -> None:
        kind, key, state, random_state, round_number, events, deeds, rest = row
        environment = self.environment
        if environment is None:
            if kind != SNAPSHOT:
                return
            environment = self.kind.__new__(self.kind)
            environment._shard = self
            environment._index = 0
            self.agents[0] = environment
        if round_number != self.round:
            self._enter_round(round_number)
        environment.restore(state)
        _set_random(environment, random_state)
        environment._deeds = deeds
        self._event_number = max(self._event_number, events)
        if kind == SNAPSHOT:
            self._own_listeners = rest[1]
            for number, outcomes in rest[0]:
                for one, outcome in outcomes:
                    self._remember(number, tuple(one), (outcome[0], outcome[1]))
            return
        self._remember(round_number, tuple(key), (rest[0], rest[1]))
        self._release(0)


def _begins(row: list[Any]) -> bool:
    """Whether an environment can be made by a row of its journal."""
    return bool(row[0] == SNAPSHOT or (row[0] == CALL and row[2] == CREATE))


def _random_of(environment: Environment) -> list[int] | None:
    held: AgentRandom | None = getattr(environment, "_random", None)
    return None if held is None else [held.key, held.state]


def _set_random(environment: Environment, kept: list[int] | None) -> None:
    if kept is None:
        if hasattr(environment, "_random"):
            del environment._random
        return
    held = AgentRandom(0, kept[0])
    held.state = kept[1]
    environment._random = held


def _holds(until: Until) -> bool:
    try:
        return bool(until.condition())
    except Exception:  # it raises where it is awaited, which is where it belongs
        return True


def _storm_error(storm: Any, method: str, path: str) -> WireError:
    names = [*storm, f"{method} of {path}"]
    circle = " -> ".join(names[-4:])
    return ["event_storm", f"events go round without an end ({len(storm)} deep): {circle}", ""]
