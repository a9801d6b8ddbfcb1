"""A stage: the shard that holds one environment, its journal, and its events.

What is done to an environment is journalled in the order in which it was done, and answered
only when the journal has it. Another process can therefore take an environment over: it makes
it anew, does everything again in that order, and goes on. Three kinds of calls are told apart:

- plain methods, and ``async`` ones that wait by ``until`` alone, follow from state, arguments
  and the environment's random numbers; they are journalled when they begin, and done again;
- ``async`` methods that wait for others can't be done again; when such a call ends, the whole
  state and its outcome are journalled;
- ``readonly`` methods leave no trace.

Each call carries a key, made of its caller, round and number. A call whose key was seen before
gets the answer of the first, and has no further effect.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from populace._random import AgentRandom
from populace._runtime.driver import CallTask, current_call
from populace._runtime.flow import Account
from populace._runtime.shard import CREATE, Group, Shard
from populace.environment import OWN_USE, Environment, Until
from populace.errors import WireError
from shared.codec import pack_plain, plain, to_json
from shared.errors import BusError, CodecError, PopulaceError
from shared.logs import get_logger
from shared.messages import batch
from shared.streams import append_patiently

if TYPE_CHECKING:
    from populace._runtime.waves import Waves
    from populace._runtime.worker import Worker

_log = get_logger(__name__)

CALL, STATE, TAKEOVER = range(3)
"""Kinds of journal entries."""
MOST_EVENTS = 16
"""Events of which each led to the next, until they are taken for a storm without an end."""
_KEPT_EVENTS = 2000
_ROUNDS_KEPT = 2
_ENTRY_ROOM = 4096

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
    """

    def __init__(self, worker: Worker, path: str, cls: type[Environment], epoch: int) -> None:
        super().__init__(worker, f"@{path}", f"@{path}", cls, 0, 1)
        self.path = path
        self.epoch = epoch
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
        self._replaying = False
        self.waves: Waves | None = None
        """Where calls gather, if they are applied in agent order."""
        self._replayed: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)
        self._waits = Account("")
        """Of calls that the journal holds; nobody is told of their credit."""

    def agent_name(self, index: int) -> str:
        """The environment's path."""
        return self.path

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
        if not self._is_readonly(group.method):
            self._under_way[key] = self._note(key, group, position)
        self._now = (group, position)
        try:
            if group.method == CREATE:
                self._create(group, position, position + 1)
            else:
                super()._invoke(group, position, index)
        finally:
            self._now = (None, 0)
        if 0 not in self._busy:
            self._resume()

    def _note(self, key: Key, group: Group, position: int) -> Entry | None:
        """Write a call down as it begins."""
        if self._replaying:
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
        tokens: int = 0,
        seconds: float = 0.0,
        backend: str = "",
    ) -> None:
        """See ``Shard.answer``."""
        failed = bool(group.errors) and group.errors[-1][0] == len(group.positions)
        error = group.errors[-1][1] if failed else None
        super().answer(group, position, value, tokens, seconds, backend)
        key = self._key_of(group, position)
        if key not in self._under_way:
            return
        entry = self._under_way.pop(key)
        outcome: Outcome = (value, error)
        self._done.setdefault(group.round, {})[key] = outcome
        if entry is not None and entry.dropped:
            self._note_state(key, group.round, outcome)
        for repeat, place in self._repeated.pop(key, ()):
            self._invoke(repeat, place, 0)

    def _note_state(self, key: Key, round_number: int, outcome: Outcome) -> None:
        """Write down what a call that can't be done again has led to."""
        environment = self.environment
        assert environment is not None
        row = [STATE, list(key), environment.snapshot(), _random_of(environment), round_number]
        try:
            packed = self.worker.codec.pack([*row, list(outcome), self._event_number])
        except CodecError as error:
            _log.error(
                "an environment's state can't be kept; it will be lost with its process",
                path=self.path,
                error=str(error),
            )
            return
        self._entries.append(Entry(key, packed))

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

    def _resume(self) -> None:
        """Go on with calls whose condition holds now, first come first served."""
        if self._resuming:
            return
        self._resuming = True
        try:
            while 0 not in self._busy:
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
        super()._finished(task, result, failure)
        if 0 not in self._busy:
            self._resume()

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
        group = self._call_now()[0]
        self._event_number += 1
        told = {
            "run": self.worker.run,
            "path": self.path,
            "name": name,
            "round": self.round if group is None else group.round,
            "number": self._event_number,
            "arguments": {k: plain(v) for k, v in arguments.items()},
            "value": plain(value),
            "by": self.caller_now(),
            "storm": [*(() if group is None else group.storm), f"{name} of {self.path}"],
        }
        if self._replaying:
            self._replayed.append(told)
        else:
            self._events.append(told)
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
            except PopulaceError as error:
                # Unanswered, the calls are made again by their callers, here or elsewhere.
                _log.error("an environment's journal fails", path=self.path, error=str(error))
                self.worker.abandon(self, str(error))
                return
            for action in then:
                action()

    async def _append(self, rows: list[bytes]) -> None:
        worker = self.worker
        subject = worker.subjects.env_journal(worker.run, self.path)
        limit = worker.bus.max_payload - _ENTRY_ROOM
        start = size = 0
        lots: list[list[bytes]] = []
        for i, row in enumerate(rows):
            if i > start and size + len(row) > limit:
                lots.append(rows[start:i])
                start, size = i, 0
            size += len(row) + 8
        if rows:
            lots.append(rows[start:])
        for lot in lots:
            worker.journalled += 1
            data = pack_plain([self.epoch, lot])
            name = f"{worker.run}/{self.path}/{self.epoch}/{worker.journalled}"
            await append_patiently(worker.bus, subject, data, headers={}, message_id=name)

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
            name = f"{worker.run}/{self.path}/event/{told['number']}"
            sends.append(append_patiently(worker.bus, subject, data, headers={}, message_id=name))
            worker.rules.apply(told)
        await asyncio.gather(*sends)

    # Taking over
    async def take_over(self) -> None:
        """Do again what the journal says was done, and go on from there.

        Raises:
            BusError: the journal can't be read.
        """
        worker = self.worker
        subject = worker.subjects.env_journal(worker.run, self.path)
        mark = f"{worker.id}/{self.epoch}"
        packed = worker.codec.pack([TAKEOVER, mark])
        await append_patiently(
            worker.bus, subject, pack_plain([self.epoch, [packed]]), headers={}, message_id=mark
        )
        rows: list[list[Any]] = []
        epoch = 0
        silent = 0
        found = False
        replay = worker.bus.replay(worker.subjects.stream_journal, (subject,))
        async for message in replay:
            if message is None:
                silent += 1
                if silent > 20:
                    raise BusError(f"the journal of {self.path} can't be read to its end")
                continue
            number, lot = worker.codec.unpack(message.data)
            if number < epoch:
                continue  # of a process that did not know yet that it was replaced
            epoch = number
            entries = [worker.codec.unpack(entry) for entry in lot]
            if entries[0][0] == TAKEOVER:
                if entries[0][1] == mark:
                    found = True
                    break
                continue
            rows.extend(entries)
        assert found
        # Not in here: calls may not run inside a Task, and this is one.
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(self._do_again, rows, over)
        await over
        if self._replayed:
            await self._tell(list(self._replayed))
            self._replayed.clear()
        _log.info("an environment was taken over", path=self.path, calls=len(rows))

    def _do_again(self, rows: list[list[Any]], over: asyncio.Future[None]) -> None:
        kept = {tuple(row[1]) for row in rows if row[0] == STATE}
        self._replaying = True
        try:
            for row in rows:
                if row[0] == STATE:
                    self._take_state(row)
                elif tuple(row[1]) not in kept:
                    self._do_one_again(row)
            over.set_result(None)
        except Exception as error:
            over.set_exception(error)
        finally:
            self._replaying = False

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
        _, key, state, random_state, round_number, outcome, events = row
        environment = self.environment
        if environment is None:
            return
        if round_number != self.round:
            self._enter_round(round_number)
        environment.restore(state)
        if random_state is not None:
            held = AgentRandom(0, random_state[0])
            held.state = random_state[1]
            environment._random = held
        self._event_number = max(self._event_number, events)
        self._done.setdefault(round_number, {})[tuple(key)] = (outcome[0], outcome[1])


def _random_of(environment: Environment) -> list[int] | None:
    held: AgentRandom | None = getattr(environment, "_random", None)
    return None if held is None else [held.key, held.state]


def _holds(until: Until) -> bool:
    try:
        return bool(until.condition())
    except Exception:  # it raises where it is awaited, which is where it belongs
        return True


def _storm_error(storm: Any, method: str, path: str) -> WireError:
    names = [*storm, f"{method} of {path}"]
    circle = " -> ".join(names[-4:])
    return ["event_storm", f"events go round without an end ({len(storm)} deep): {circle}", ""]
