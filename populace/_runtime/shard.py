"""A shard: some agents of one population, their mailboxes, and the calls to them."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from populace._random import round_key, stream_key
from populace._runtime.driver import CallTask, here
from populace._runtime.finished import Finished
from populace._runtime.flow import Account, Answered
from populace._runtime.reduce import Partial
from populace.agent import Agent
from populace.directory import Agents
from populace.errors import WireError, error_to_wire
from populace.placeholder import Placeholder, resolve
from populace.proxy import AgentProxy
from shared.errors import CodeError
from shared.messages import batch

if TYPE_CHECKING:
    from populace._runtime.cost import Cost
    from populace._runtime.worker import Worker
    from populace.personas.people import People

CREATE = "__init__"
MAX_CHAIN = 64
"""Calls within calls; beyond this they are taken for a cycle without an end."""
_SLICE = 1000
"""Calls that are begun before the event loop gets its turn."""
_PATIENCE = 0.5
"""Seconds in which something must move at a shard before it takes more calls than it should."""

_NOT_CALLABLE = frozenset(dir(Agent)) - {"interview"}


class Group:
    """A group of calls as it arrived: one method, many agents."""

    __slots__ = (
        "account",
        "args",
        "arrived",
        "backends",
        "caller",
        "cancelled",
        "chains",
        "cost_beside",
        "costs",
        "cursor",
        "done",
        "errors",
        "failed",
        "flow",
        "held",
        "indexes",
        "keep",
        "keys",
        "kwargs",
        "left",
        "method",
        "number",
        "on_done",
        "options",
        "ordered",
        "partial",
        "positions",
        "record",
        "references",
        "reported",
        "round",
        "seconds",
        "sequence",
        "shard",
        "storing",
        "storm",
        "streams",
        "tokens_new",
        "tokens_total",
        "unit",
        "unwritten",
        "values",
        "waiters",
    )

    def __init__(
        self,
        shard: Shard,
        account: Account,
        fields: list[Any],
        cost: int,
        *,
        references: bool = False,
    ) -> None:
        self.shard = shard
        self.account = account
        self.caller = account.caller
        self.references = references
        """Whether placeholders may stand among the arguments."""
        self.number, self.method, args, kwargs, indexes, options = fields
        intern = shard.worker.intern
        self.args = [batch.unpack_argument(a, intern) for a in args]
        self.kwargs = {k: batch.unpack_argument(v, intern) for k, v in kwargs.items()}
        self.indexes: Sequence[int] = batch.numbers(indexes)
        self.options: dict[str, Any] = options
        self.chains: list[list[Any]] | None = options.get("chains")
        self.keys: list[Any] | None = options.get("keys")
        """For calls to environments: what makes each the same call when it is made again."""
        self.storm: Sequence[str] = options.get("storm", ())
        """The events that led to these calls, each the cause of the next."""
        self.round: int = options.get("round", 0)
        self.arrived = 0.0
        """When it came (Unix time), if that is measured."""
        self.cursor = 0
        self.left = len(self.indexes)
        self.unit, self.cost_beside = divmod(cost, max(1, self.left))
        """What each call takes of its caller's window, and what is left over."""
        self.streams: bool = options.get("flow", False)
        """Whether the answers are counted by themselves, as they are read batch by batch."""
        self.flow = Answered() if self.streams else account.answered
        self.held = 0
        """Rows of answers that wait until their taker is ready."""
        self.keep: set[int] = set(options.get("keep", ()))
        reduce = options.get("reduce")
        self.partial: Partial | None = Partial(reduce[0], reduce[1]) if reduce else None
        self.record: dict[str, Any] | None = options.get("record")
        # Answers that wait for the next flush, in columns:
        self.positions: list[int] = []
        self.values: list[Any] = []
        self.errors: list[list[Any]] = []
        self.costs: list[Cost | None] = []
        self.seconds: list[float] = []
        self.backends: set[str] = set()
        self.sequence = 0
        self.done = 0
        self.failed = 0
        self.tokens_total = 0
        self.tokens_new = 0
        """Tokens of the answers that wait for the next flush."""
        self.reported = 0.0
        self.storing = 0
        """Batches of records on their way to the stream."""
        self.cancelled: set[int] | None = None
        self.unwritten: set[int] | None = None
        """Positions answered, and not journalled yet."""
        self.ordered: Sequence[str] = ()
        """Environments that want to know how many of these agents have finished."""
        self.on_done: Callable[[], None] | None = None
        """For calls that nobody but this process waits for: called when all have ended."""
        self.waiters: dict[int, list[tuple[str, int]]] | None = None
        """Who asked for the answer at a position before it was there."""

    def chain(self, position: int) -> list[Any]:
        """The calls that wait for the one at a position, outermost first."""
        chains = self.chains
        if not chains:
            return []
        return chains[0] if len(chains) == 1 else chains[position]

    def arguments(self, position: int) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for one agent."""
        args = [v[position] if column else _own(v) for column, v in self.args]
        kwargs = {k: v[position] if column else _own(v) for k, (column, v) in self.kwargs.items()}
        return args, kwargs

    @property
    def has_mutable(self) -> bool:
        """Whether an argument that all share could be changed by one of them."""
        return any(_is_mutable(v) for c, v in self.args if not c)

    @property
    def has_columns(self) -> bool:
        """Whether any argument differs from agent to agent."""
        return any(c for c, _ in self.args) or any(c for c, _ in self.kwargs.values())


class _Busy:
    """An agent that is at work: on what, and what waits for it."""

    __slots__ = ("active", "promised", "queue")

    def __init__(self, *active: CallTask) -> None:
        self.active = list(active)
        self.promised = False
        """Whether its next call is on its way already."""
        self.queue: deque[tuple[Group, int]] = deque()


class _Broken:
    """Stands where an agent would, had its constructor not raised."""

    __slots__ = ("error",)

    def __init__(self, error: WireError) -> None:
        self.error = error


class Shard:
    """Holds agents, and gives each one call at a time, in the order in which they came.

    Args:
        worker: the worker that it belongs to.
        shard_id: its name, a subject token.
        population: name of the population.
        cls: class of the agents, or None if each creation names its own.
        offset: number of its first agent within the population.
        size: how many agents it has; 0 if it grows.
    """

    def __init__(
        self,
        worker: Worker,
        shard_id: str,
        population: str,
        cls: type[Agent] | None,
        offset: int,
        size: int,
    ) -> None:
        self.worker = worker
        self.id = shard_id
        self.population = population
        self.cls = cls
        self.offset = offset
        self.round = 0
        self._stream_key = stream_key(worker.seed, population)
        self.round_key = round_key(self._stream_key, 0)
        """What the agents' random streams of this round start from."""
        self.agents: list[Any] = [None] * size
        self._grows = size == 0
        self.people: People | None = None
        """Who its agents are, where that was said."""
        self.some_did = self.some_remember = False
        """Whether any of its agents has called an environment, or has a memory: most don't, and
        need not be asked one by one."""
        self.made_of: dict[int, tuple[str, str | None]] = {}
        """Of single agents: the class, by import path and folder."""
        self.listeners: list[list[Any]] = []
        """What its agents listen to: index, and arguments of ``Worker.listen``."""
        self.finished = Finished(self) if worker.by_call else None
        """Calls that were finished in this round, where they are written down one by one."""
        self.changed = True
        """Whether anything was done here since its state was last written down."""
        self.replaying = False
        """Whether what is done now was done before, and is only done again."""
        self.others = Agents(worker.directory, population)
        """How its agents find others."""
        self._busy: dict[int, CallTask | _Busy] = {}
        """Agents at work: the call, or, where there is more to say, a ``_Busy``."""
        self._groups: deque[Group] = deque()
        self._ready: deque[tuple[Group, int]] = deque()
        self._pumping = False
        self._loop = asyncio.get_running_loop()
        self._accounts: dict[str, Account] = {}
        self._settled = 0
        """Calls answered so far."""
        self._relief: asyncio.TimerHandle | None = None

    def account(self, caller: str) -> Account:
        """What a caller, named by its inbox, has under way here."""
        found = self._accounts.get(caller)
        if found is None:
            found = self._accounts[caller] = Account(caller)
        return found

    def persona_columns(self, indexes: list[int]) -> dict[str, list[Any]] | None:
        """Attributes of some agents' personas, in columns; None if they have none."""
        return None if self.people is None else self.people.columns(indexes)

    def agent_name(self, index: int) -> str:
        """The agent's name: population and number."""
        return f"{self.population}/{self.offset + index}"

    def take(self, group: Group) -> None:
        """Accept a group of calls."""
        self.changed = True
        self._groups.append(group)
        self._schedule()

    def mix(self, indexes: Iterable[int]) -> None:
        """These agents have to do with others in this round; see ``finished``."""
        if self.finished is not None:
            self.finished.mix(indexes)

    @property
    def quiet(self) -> bool:
        """Whether no call is under way or waits."""
        return not (self._groups or self._ready or self._busy)

    def _schedule(self) -> None:
        # Never run at once: messages arrive inside a Task, and calls may not run inside one.
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        try:
            self._pump_some()
        finally:  # whatever went wrong with one call, the others go on
            if self._ready or self._groups:
                self._loop.call_soon(self._pump)
            else:
                self._pumping = False

    def _pump_some(self) -> None:
        budget = _SLICE
        while budget > 0 and self._ready:
            group, position = self._ready.popleft()
            budget -= 1
            self._next(group.indexes[position], group, position)
        while budget > 0 and self._groups:
            group = self._groups[0]
            stop = min(len(group.indexes), group.cursor + budget)
            budget -= stop - group.cursor
            if stop >= len(group.indexes):
                self._groups.popleft()
            count = stop - group.cursor
            group.account.begun += count * group.unit
            if (profile := self.worker.profile) is None:
                self._begin(group, stop)
            else:
                began = time.time()
                self._begin(group, stop)
                profile.begun(group.arrived, count, began)
            if group.account.due:
                self.worker.give_credit(self, group.account)

    def _begin(self, group: Group, stop: int) -> None:
        """Begin the calls of a group up to a position."""
        start, group.cursor = group.cursor, stop
        if group.round != self.round:
            self._enter_round(group.round)
        if group.method == CREATE:
            self._create(group, start, stop)
            return
        positions: Sequence[int] = range(start, stop)
        if self.finished is not None and self.finished.knows:
            positions = self.finished.answered(group, positions)
        function = self._method(self.cls, group.method) if self.cls is not None else None
        if (profile := self.worker.profile) is not None and function is not None:
            function = profile.timed(function)
        busy, agents, cancelled = self._busy, self.agents, group.cancelled
        simple = (
            function is not None
            and not group.has_columns
            and not group.kwargs
            and not group.has_mutable
        )
        shared = [value for _, value in group.args] if simple else []
        if simple and group.references and contains_placeholder(shared):
            simple = False
        here.group = group if simple else None
        for position in positions:
            index = group.indexes[position]
            if cancelled and position in cancelled:
                continue
            here.position = position
            if index in busy:
                self._enqueue(group, position, index)
            elif simple:
                agent = agents[index] if 0 <= index < len(agents) else None
                if not isinstance(agent, Agent):
                    self.answer_error(group, position, self._no_agent(index))
                    continue
                try:
                    result = function(agent, *shared)  # type: ignore[misc]
                except BaseException as error:
                    self.answer_error(group, position, _described(error))
                    continue
                if type(result) is CoroutineType:
                    self._start(group, position, index, result)
                else:
                    self.answer(group, position, result)
            else:
                self._invoke(group, position, index)
        here.group = None

    def _enter_round(self, number: int) -> None:
        self.round = number
        self.round_key = round_key(self._stream_key, number)

    def key_of_round(self, number: int) -> int:
        """What the agents' random streams of a round start from."""
        return self.round_key if number == self.round else round_key(self._stream_key, number)

    def _full(self, index: int) -> _Busy:
        """What is known of an agent at work, with room for what waits."""
        held = self._busy[index]
        if type(held) is CallTask:
            held = self._busy[index] = _Busy(held)
        assert isinstance(held, _Busy)
        return held

    def active(self, index: int) -> list[CallTask]:
        """The calls that an agent is at work on: one, or several where calls came round."""
        held = self._busy.get(index)
        if held is None:
            return []
        return list(held.active) if isinstance(held, _Busy) else [held]

    def queued(self, index: int) -> int:
        """How many calls wait for an agent that is at work."""
        held = self._busy.get(index)
        return len(held.queue) if isinstance(held, _Busy) else 0

    def task_of(self, group: Group, position: int) -> CallTask | None:
        """The call under way for a position of a group, if it is under way."""
        for task in self.active(group.indexes[position]):
            if task.group is group and task.position == position:
                return task
        return None

    def _enqueue(self, group: Group, position: int, index: int) -> None:
        """Queue a call to an agent at work, unless that work waits for this very call."""
        if group.chains and self._waits_for(index, group.chain(position)):
            self._invoke(group, position, index)
            return
        self._full(index).queue.append((group, position))
        if self.worker.profile is not None:
            self.worker.profile.begun(group.arrived, -1, time.time())
        group.account.parked += group.unit
        if group.account.crowded and self._relief is None:
            self._relief = self._loop.call_later(_PATIENCE, self._relieve, self._settled)
        if group.options.get("agent"):
            self.worker.cycles.watch(self, index, group, position)

    def _unpark(self, group: Group) -> None:
        """A call has left the queue of its agent."""
        account = group.account
        account.unpark(group.unit)
        if account.due:
            self.worker.give_credit(self, account)

    def _relieve(self, settled: int) -> None:
        """Give credit for calls in agents' queues if nothing moves, as a call without may help."""
        self._relief = None
        crowded = [account for account in self._accounts.values() if account.crowded]
        if crowded and settled != self._settled:
            self._relief = self._loop.call_later(_PATIENCE, self._relieve, self._settled)
            return
        for account in crowded:
            account.forgive()
            self.worker.give_credit(self, account)

    def _waits_for(self, index: int, chain: list[Any]) -> bool:
        """Whether a call that an agent is at work on is a link of the chain."""
        keys = [link[3:] for link in chain if link[0] == self.id and link[1] == index]
        return bool(keys) and any(
            [task.group.caller, task.group.number, task.position] in keys
            for task in self.active(index)
        )

    def admit(self, index: int, group: Group, position: int) -> None:
        """Run a queued call at once, though the agent is at work: it closes a circle."""
        busy = self._full(index)
        if (group, position) in busy.queue:
            busy.queue.remove((group, position))
            self._unpark(group)
            # Not at once: probes arrive inside a Task, and calls may not run inside one.
            self._loop.call_soon(self._let_in, index, group, position, list(busy.active))

    def _let_in(self, index: int, group: Group, position: int, among: list[CallTask]) -> None:
        if group.cancelled and position in group.cancelled:
            return
        if self.worker.profile is not None:
            self.worker.profile.begun(group.arrived, 1, time.time())
        if self.active(index) == among:
            self._invoke(group, position, index)
        elif index in self._busy:  # the circle opened by itself meanwhile: wait in turn
            self._full(index).queue.appendleft((group, position))
            group.account.parked += group.unit
            self._release(index)
        else:
            self._invoke(group, position, index)

    def _next(self, index: int, group: Group, position: int) -> None:
        """Run the next call that waited for an agent which is free now."""
        self._full(index).promised = False
        if self.worker.profile is not None:
            self.worker.profile.begun(group.arrived, 1, time.time())
        if not (group.cancelled and position in group.cancelled):
            self._invoke(group, position, index)
        self._release(index)

    def _release(self, index: int) -> None:
        """If the agent is free: let its next call run, or forget that it was busy."""
        busy = self._busy.get(index)
        if not isinstance(busy, _Busy) or busy.active or busy.promised:
            return
        if busy.queue:
            busy.promised = True
            group, position = busy.queue.popleft()
            self._ready.append((group, position))
            self._unpark(group)
            self._schedule()
        else:
            del self._busy[index]

    def _invoke(self, group: Group, position: int, index: int) -> None:
        """Run one call, whatever its shape."""
        agent = self.agents[index] if 0 <= index < len(self.agents) else None
        if not isinstance(agent, Agent):
            self.answer_error(group, position, self._no_agent(index))
            return
        if group.round != self.round:
            self._enter_round(group.round)
        if group.chains and len(chain := group.chain(position)) >= MAX_CHAIN:
            self.answer_error(group, position, _cycle_error(chain))
            return
        function = self._method(type(agent), group.method)
        if function is None:
            self.answer_error(
                group,
                position,
                [
                    "AttributeError",
                    f"{type(agent).__name__} has no method {group.method!r} that can be called",
                    "",
                ],
            )
            return
        try:
            args, kwargs = group.arguments(position)
            if group.references and contains_placeholder([args, kwargs]):
                result = _with_answers(function, agent, args, kwargs)
            else:
                if self.worker.profile is not None:
                    function = self.worker.profile.timed(function)
                outer = here.group, here.position
                here.group, here.position = group, position
                try:
                    result = function(agent, *args, **kwargs)
                finally:
                    here.group, here.position = outer
        except BaseException as error:
            self.answer_error(group, position, _described(error))
            return
        if type(result) is CoroutineType:
            self._start(group, position, index, result)
        else:
            self.answer(group, position, result)

    def _start(self, group: Group, position: int, index: int, coro: Any) -> None:
        """Drive a coroutine; if it waits, the agent is busy until it ends."""
        task = CallTask(self._loop, coro, self._finished, group, position, index)
        if index in self._busy:
            self._full(index).active.append(task)
        else:
            self._busy[index] = task
        self.worker.waiting += 1
        task.step()

    def _finished(self, task: CallTask, result: Any, failure: BaseException | None) -> None:
        group, position, index = task.group, task.position, task.index
        self.worker.waiting -= 1
        busy = self._busy[index]
        if busy is task:
            del self._busy[index]
        else:
            self._full(index).active.remove(task)
        seconds = time.monotonic() - task.started if task.started else 0.0
        if self.worker.profile is not None:
            self.worker.profile.lived += seconds
        if group.cancelled and position in group.cancelled:
            self.worker.dirty(group)  # nobody waits for it; the group may be over
        elif failure is None:
            self.answer(group, position, result, seconds, task.cost)
        else:
            error = _described(failure)
            self.answer_error(group, position, error, seconds, task.cost)
        if busy is not task:
            self._release(index)

    # Creating
    def _create(self, group: Group, start: int, stop: int) -> None:
        try:
            path = group.options.get("class")
            cls = (
                self.cls
                if path is None
                else self.worker.loader.load(path, Agent, group.options.get("folder"))
            )
            if cls is None:
                raise CodeError("the class of a single agent was not named")
        except CodeError as error:
            described = [type(error).__name__, str(error), ""]
            for position in range(start, stop):
                self._put(group.indexes[position], _Broken(described))
                self.answer_error(group, position, described)
            return
        plain = not group.has_columns and not group.kwargs and not group.has_mutable
        shared = [value for _, value in group.args]
        new, init, agents = cls.__new__, cls.__init__, self.agents
        if self.worker.profile is not None:
            init = self.worker.profile.timed(init)
        for position in range(start, stop):
            index = group.indexes[position]
            if index >= len(agents):
                agents.extend([None] * (index + 1 - len(agents)))
            if path is not None:
                self.made_of[index] = (path, group.options.get("folder"))
            here.group, here.position = group, position
            try:
                agent = agents[index] = new(cls)
                agent._shard = self
                agent._index = index
                if plain:
                    init(agent, *shared)
                else:
                    args, kwargs = group.arguments(position)
                    init(agent, *args, **kwargs)
            except BaseException as error:
                described = _described(error)
                agents[index] = _Broken(described)
                self.answer_error(group, position, described)
                continue
            self.answer(group, position, None)
        here.group = None
        self.worker.agents_created(stop - start)

    @property
    def numbers(self) -> range:
        """The numbers of its agents within the population, also of those that may still come."""
        return range(self.offset, sys.maxsize if self._grows else self.offset + len(self.agents))

    def _put(self, index: int, value: Any) -> None:
        if index >= len(self.agents):
            self.agents.extend([None] * (index + 1 - len(self.agents)))
        self.agents[index] = value

    def _no_agent(self, index: int) -> WireError:
        held = self.agents[index] if 0 <= index < len(self.agents) else None
        if isinstance(held, _Broken):
            kind, message, trace = held.error
            return [kind, f"the agent could not be created: {message}", trace]
        return ["LookupError", f"there is no agent {self.agent_name(index)}", ""]

    @staticmethod
    def _method(owner: type, name: str) -> Callable[..., Any] | None:
        if name.startswith("_") or (name in _NOT_CALLABLE and name not in vars(owner)):
            return None
        function = getattr(owner, name, None)
        return function if inspect.isfunction(function) else None

    # Answering
    def answer(
        self,
        group: Group,
        position: int,
        value: Any,
        seconds: float = 0.0,
        cost: Cost | None = None,
    ) -> None:
        """Hold an answer for the next flush."""
        group.positions.append(position)
        group.values.append(value)
        group.done += 1
        group.left -= 1
        self._settled += 1
        if group.record is not None:
            group.costs.append(cost)
            group.seconds.append(seconds)
        if cost is not None:
            tokens = cost.tokens
            group.tokens_total += tokens
            group.tokens_new += tokens
            group.backends.add(cost.backend)
        self.worker.dirty(group)

    def answer_error(
        self,
        group: Group,
        position: int,
        error: WireError,
        seconds: float = 0.0,
        cost: Cost | None = None,
    ) -> None:
        """Hold a failure for the next flush."""
        if error[2]:
            self.worker.report(f"{self.agent_name(group.indexes[position])}.{group.method}", error)
        group.errors.append([len(group.positions), error])
        group.failed += 1
        self.answer(group, position, None, seconds, cost)

    def is_queued(self, group: Group, position: int) -> bool:
        """Whether a call waits for its agent to be free."""
        busy = self._busy.get(group.indexes[position])
        here = isinstance(busy, _Busy) and (group, position) in busy.queue
        return here or (group, position) in self._ready

    def cancel(self, group: Group, positions: Sequence[int]) -> None:
        """End calls that nobody waits for any more; they are not answered."""
        if group.cancelled is None:
            group.cancelled = set()
        for position in positions:
            if position in group.cancelled:
                continue
            task = self.task_of(group, position)
            queued = position >= group.cursor
            if not queued and task is None:
                if not self.is_queued(group, position):
                    continue  # answered already
                busy = self._full(group.indexes[position])
                if (group, position) in busy.queue:
                    busy.queue.remove((group, position))
                    self._unpark(group)
            group.cancelled.add(position)
            group.left -= 1
            self.worker.forget(group, position)
            if task is not None:
                task.cancel()
        self.worker.dirty(group)


_IMMUTABLE = (str, int, float, bool, bytes, type(None))


def _is_mutable(value: Any) -> bool:
    if type(value) is tuple:
        return any(map(_is_mutable, value))
    return type(value) not in _IMMUTABLE and not isinstance(value, (Placeholder, AgentProxy))


def _own(value: Any) -> Any:
    """An agent's own copy of an argument that was sent once for all: none sees another's."""
    return copy.deepcopy(value) if _is_mutable(value) else value


def _described(error: BaseException) -> WireError:
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-12)
        trace = "".join(lines)[-8000:]
    except Exception:  # an exception whose text can't be had
        trace = "".join(traceback.format_tb(error.__traceback__, limit=-12))
    return error_to_wire(error, trace)


def _cycle_error(chain: list[Any]) -> WireError:
    names = [link[2] for link in chain]
    last = len(names) - 1
    # The circle: from the last time the outermost repeated call was entered.
    back = next((i for i in range(last - 1, -1, -1) if names[i] == names[last]), 0)
    circle = " -> ".join(names[back:])
    return ["call_cycle", f"calls go round without an end ({len(chain)} deep): {circle}", ""]


async def _with_answers(
    function: Callable[..., Any], agent: Any, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a method once the placeholders among its arguments are answered.

    Parameters annotated ``Placeholder`` get theirs as they are.
    """
    names, raw = _parameters(function)
    args = [
        value if (names[i] if i < len(names) else "*") in raw else await resolve(value)
        for i, value in enumerate(args)
    ]
    kwargs = {k: v if k in raw else await resolve(v) for k, v in kwargs.items()}
    result = function(agent, *args, **kwargs)
    return await result if type(result) is CoroutineType else result


@functools.lru_cache(maxsize=4096)
def _parameters(function: Callable[..., Any]) -> tuple[list[str], set[str]]:
    """A method's parameters after the first, and those that want placeholders as they are."""
    parameters = inspect.signature(function).parameters
    raw = {name for name, p in parameters.items() if "Placeholder" in str(p.annotation)}
    return list(parameters)[1:], raw


def contains_placeholder(value: Any) -> bool:
    """Whether there is a placeholder anywhere in lists, tuples and dicts."""
    kind = type(value)
    if kind is list or kind is tuple:
        return any(map(contains_placeholder, value))
    if kind is dict:
        return any(map(contains_placeholder, value.values()))
    return isinstance(value, Placeholder)
