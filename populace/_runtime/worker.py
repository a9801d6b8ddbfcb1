"""A worker: holds shards for one run, answers calls in batches, and calls other agents."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil

from populace._runtime import pieces
from populace._runtime.caller import Caller
from populace._runtime.cycles import Cycles
from populace._runtime.driver import mark_child_tasks, set_profile
from populace._runtime.flow import Account
from populace._runtime.kept import Kept, Key
from populace._runtime.listening import Listener, Listening, Rules, path_of
from populace._runtime.looking import Looking
from populace._runtime.outbox import Outbox
from populace._runtime.profile import Meter, TimedCodec
from populace._runtime.records import Recorder, batch_of
from populace._runtime.reduce import has_part
from populace._runtime.saving import StateStore, pack_shard, unpack_shard
from populace._runtime.shard import Group, Shard
from populace._runtime.stage import Stage
from populace._runtime.waves import Waves
from populace.agent import Agent
from populace.directory import Directory
from populace.environment import Environment
from populace.errors import StateError
from populace.events import Event
from populace.models.client import ModelClient
from populace.models.kept import Part
from populace.personas.people import load_people
from populace.proxy import AgentProxy, register_proxies
from shared.bus import Bus, Message, Subscription
from shared.code import CodeLoader, import_path
from shared.codec import Codec, from_public, pack_plain, plain, writable
from shared.errors import (
    CodecError,
    InvalidInputError,
    PayloadTooLargeError,
    PopulaceError,
    RemoteError,
)
from shared.logs import get_logger
from shared.messages import batch
from shared.messages.control import (
    Assignment,
    EnvironmentMade,
    EnvironmentRequest,
    OpenShard,
    Populations,
    SaveShards,
    Settled,
    ShardOpened,
    ShardsLost,
    ShardsSaved,
    WorkerStats,
)
from shared.messages.inspection import Look
from shared.service import ask, serve
from shared.settings import load_settings
from shared.subjects import ENVIRONMENT, Subjects

_log = get_logger(__name__)

_PROGRESS_EVERY = 0.25
_REMEMBERED = 100_000
_EARLY_FOR = 10.0
_REPORTED = 100
_FREEZE_EVERY = 50_000
_MOST_TEXTS = 100_000
_QUIET_WITHIN, _LOOK_AGAIN = 5.0, 0.002
"""Seconds that calls under way at a round's end get to come to theirs before the state is kept."""
_TOLD_WITHIN = 30.0
"""Seconds that messages between agents get to be stored before it; as long as that is tried."""

_PLAIN = frozenset({str, int, float, bool, type(None)})

CallKey = tuple[str, int]
"""Caller's inbox and its number of the call."""


class Worker:
    """Serves one run.

    Args:
        bus: this worker's connection.
        subjects: the installation's subjects.
        assignment: which run, under which name.
        loader: finds the classes of agents.
        models: through which agents ask language models.
        call_timeout: bound for the calls that agents make.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        assignment: Assignment,
        loader: CodeLoader,
        models: ModelClient,
        *,
        call_timeout: float,
    ) -> None:
        self.bus = bus
        self.subjects = subjects
        self.id = assignment.worker
        self.run = assignment.run
        self.life = assignment.life
        self.by_call = assignment.by_call
        """Whether finished calls are written down one by one."""
        self._again = assignment.recall
        self._messages = assignment.record_messages
        self.scope = subjects.scope(assignment.run, assignment.life)
        """What this life's processes call one another under."""
        self.seed = assignment.seed
        self.loader = loader
        self.models = models
        self._meter = Meter() if assignment.profile else None
        self.profile = self._meter.profile if self._meter is not None else None
        """Where time is noted, if it is measured."""
        self.codec = TimedCodec(loader, self.profile) if self.profile else Codec(loader)
        self.caller = Caller(bus, self.codec, subjects, self.scope, timeout=call_timeout)
        self._states = StateStore(bus, subjects, self.run, self.life)
        register_proxies(self.codec, self.caller)
        self.directory = Directory(self.caller)
        self.rules = Rules(bus, subjects, self.run)
        """Which events go to listeners with a condition."""
        self.results_format = assignment.results_format
        self.journalled = 0
        """Messages written to journals, which numbers them."""
        self.ordered: dict[str, list[str]] = {}
        """Population to the environments that apply its agents' calls in agent order."""
        self._listening = Listening(bus, subjects, self.run, self.life)
        self._internal = Account("")
        self.cycles = Cycles(self)
        self._unmark: Callable[[], None] | None = None
        self.waiting = 0
        """Calls whose coroutine is under way."""
        self._recorder = Recorder(bus, subjects, self.run, assignment.results_format)
        self._shards: dict[str, Shard] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._dirty: dict[Group, None] = {}
        self._flushing = False
        self._stopping = False
        self._open: dict[CallKey, Group] = {}
        self._finished: OrderedDict[CallKey, None] = OrderedDict()
        self._early: dict[Key, list[tuple[str, int]]] = {}
        self._kept = Kept()
        self._outbox = Outbox(bus, self.codec, self.dirty)
        self._pieces = pieces.Assembler()
        self._storing: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        """Messages between agents that are being stored: no round is committed without them."""
        self._calls = 0
        self._heard = 0
        """Events that its agents and environments have heard."""
        self.give_up: Callable[[], None] | None = None
        """Ends the process, where it is a worker's own."""
        self.listener_failures = 0
        """Events whose handler raised."""
        self._reported: set[tuple[str, str]] = set()
        self._unfrozen = 0
        self._texts: dict[str, str] = {}

    def intern(self, text: str) -> str:
        """The one copy of a text that many arguments repeat, such as a persona."""
        if len(self._texts) >= _MOST_TEXTS:
            self._texts.clear()
        return self._texts.setdefault(text, text)

    async def start(self) -> None:
        """Begin to listen."""
        self._unmark = mark_child_tasks(asyncio.get_running_loop())
        set_profile(self.profile)
        await self.caller.start()
        await self.models.start()
        await self.bus.subscribe(self.subjects.run_lost(self.scope), self._shards_lost)
        await serve(self.bus, self.subjects.worker(self.id, "open"), OpenShard, self._open_shard)
        await serve(self.bus, self.subjects.worker(self.id, "close"), OpenShard, self._close_shard)
        await serve(self.bus, self.subjects.worker(self.id, "know"), Populations, self._know)
        await serve(self.bus, self.subjects.worker(self.id, "save"), SaveShards, self._save)
        await serve(self.bus, self.subjects.worker(self.id, "settle"), SaveShards, self._settle)
        await serve(self.bus, self.subjects.worker(self.id, "stats"), Assignment, self._stats)
        looking = Looking(self)
        await serve(self.bus, self.subjects.worker(self.id, "look"), Look, looking.look)
        await serve(self.bus, self.subjects.worker(self.id, "held"), Look, looking.held)
        await self.bus.flush()

    async def stop(self) -> None:
        """Finish storing records, and fail what is still open."""
        self._stopping = True  # what fails from here on fails because of it
        if self._storing or self._telling:
            await asyncio.wait(self._storing | self._telling, timeout=10)
        await self._listening.close()
        self.caller.close("the worker was stopped")
        await self.models.close()
        if self._unmark is not None:
            self._unmark()

    # Control
    async def _open_shard(self, request: OpenShard) -> ShardOpened:
        if request.shard in self._shards:
            raise InvalidInputError(f"the shard {request.shard!r} is open already")
        if request.shard[0] == ENVIRONMENT:
            return await self._open_stage(request)
        cls = None
        if request.class_path:
            cls = self.loader.load(request.class_path, Agent, request.folder)
        shard = Shard(self, request.shard, request.population, cls, request.offset, request.size)
        if request.people is not None:
            stop = request.offset + request.size
            shard.people = await asyncio.to_thread(
                load_people,
                request.people,
                (*self.loader.roots, load_settings().personas_dir.resolve()),
                request.people_count,
                request.offset,
                stop,
            )
        if request.saved is not None:
            data = await self._states.read(request.shard, request.saved)
            shard.listeners = unpack_shard(shard, data, self._load_agent)
            shard.changed = False
            if shard.finished is not None:
                for number in self._again:
                    await shard.finished.read(number)
        self._shards[request.shard] = shard
        await self._listen_for_calls(shard)
        for index, *arguments in shard.listeners:
            await self._listen_as_before(shard, index, arguments, new=True)
        return ShardOpened(shard=request.shard)

    def part(self) -> Part:
        """The agents that are here, environments included."""
        found: dict[str, list[range]] = {}
        for shard in self._shards.values():
            found.setdefault(shard.population, []).append(shard.numbers)
        return Part(found)

    def _load_agent(self, path: str, folder: str | None) -> type[Agent]:
        cls: type[Agent] = self.loader.load(path, Agent, folder)
        return cls

    async def _open_stage(self, request: OpenShard) -> ShardOpened:
        path = request.shard[1:]
        cls = self.loader.load(request.class_path or "", Environment, request.folder)
        stage = Stage(self, path, cls, request.epoch, request.owner)
        if request.members is not None:
            stage.waves = Waves(stage, request.members, request.member_count)
        if request.saved is not None:
            await stage.take_up(await self._states.read(request.shard, request.saved))
        elif request.epoch > 1:
            await stage.take_over(made=request.made)
        self._shards[request.shard] = stage
        await self._listen_for_calls(stage)
        return ShardOpened(shard=request.shard)

    async def _listen_for_calls(self, shard: Shard) -> None:
        subject = self.subjects.run_call(self.scope, shard.id)
        self._subscriptions[shard.id] = await self.bus.subscribe(
            subject, lambda message: self._receive(shard, message)
        )
        await self.bus.flush()

    async def _save(self, request: SaveShards) -> ShardsSaved:
        """Write down what has changed since the last time, once nothing is under way."""
        shards = [shard for shard in self._shards.values() if shard.changed]
        await self._quiet(shards)
        await self._told()
        for shard in shards:
            if shard.finished is not None:
                shard.finished.forget()
        saved = ShardsSaved(unquiet=sum(not shard.quiet for shard in shards))
        for shard in shards:
            try:
                data = shard.packed() if isinstance(shard, Stage) else pack_shard(shard)
            except StateError as error:
                saved.problem = saved.problem or str(error)
                continue
            shard.changed = not shard.quiet  # what is under way will change it
            try:
                saved.parts[shard.id] = await self._states.write(request.round, shard.id, data)
            except BaseException:
                shard.changed = True
                raise
        return saved

    async def _quiet(self, shards: Iterable[Shard]) -> None:
        """Wait until no call is under way in these shards, for some seconds."""
        until = time.monotonic() + _QUIET_WITHIN
        while not all(shard.quiet for shard in shards):
            await asyncio.sleep(_LOOK_AGAIN)
            if time.monotonic() > until:
                return

    async def _told(self) -> None:
        """Wait until messages between agents are stored: no commit brings back what is lost."""
        if self._telling:
            _, late = await asyncio.wait(set(self._telling), timeout=_TOLD_WITHIN)
            if late:
                _log.error("messages are not recorded when their round ends", batches=len(late))

    async def _settle(self, _: SaveShards) -> Settled:
        """Take all events that were told, do what they lead to, and say how much that was."""
        await self.bus.flush()
        await asyncio.sleep(0)
        if not await self._listening.caught_up(time.monotonic() + _QUIET_WITHIN):
            _log.warning("durable listeners have not handled all events yet", run=self.run)
        await self._quiet(self._shards.values())
        return Settled(activity=self._calls + self._heard)

    async def _close_shard(self, request: OpenShard) -> ShardOpened:
        """Let go of a shard."""
        if self._shards.pop(request.shard, None) is not None:
            await self._subscriptions.pop(request.shard).unsubscribe()
        return ShardOpened(shard=request.shard)

    async def _know(self, request: Populations) -> Populations:
        self.directory.learn(request.known)
        self.directory.learn_environments(request.environments)
        self.rules.learn(request.rules)
        self.ordered.update(request.ordered)
        for shard, holder in request.moved.items():
            if holder != self.id and shard in self._shards:  # it was thought dead: it is replaced
                await self._close_shard(OpenShard(shard=shard, population=shard))
        moved = {shard[1:] for shard in request.moved}
        for group in self._open.values():  # the new holder knows nothing of who has finished
            if paths := moved.intersection(group.ordered):
                self._tell_finished(group, group.options["step"], sorted(paths))
        self.caller.shards_moved(list(request.moved))
        self.caller.shards_lost(list(request.lost), "its worker was lost before")
        return Populations()

    def _shards_lost(self, message: Message) -> None:
        lost = ShardsLost.model_validate(from_public(message.data))
        self.caller.shards_lost(lost.shards, lost.reason)

    async def _stats(self, _: Assignment) -> WorkerStats:
        process = psutil.Process()
        times = process.cpu_times()
        return WorkerStats(
            worker=self.id,
            run=self.run,
            pid=os.getpid(),
            agents=sum(isinstance(a, Agent) for s in self._shards.values() for a in s.agents),
            shards=len(self._shards),
            calls=self._calls,
            waiting=self.waiting,
            rss=process.memory_info().rss,
            cpu=times.user + times.system,
            listener_failures=self.listener_failures,
            profile=None if self._meter is None else self._meter.usage().plain(),
            sent_bytes=self.bus.stats.sent_bytes,
            received_bytes=self.bus.stats.received_bytes,
        )

    def report(self, call: str, error: list[Any]) -> None:
        """Log an agent's exception, the first of each kind."""
        method = call.rpartition(".")[2]
        if (method, error[0]) not in self._reported and len(self._reported) < _REPORTED:
            self._reported.add((method, error[0]))
            _log.warning(
                "an agent raised", call=call, error=f"{error[0]}: {error[1]}", trace=error[2]
            )

    def open_group(self, inbox: str, number: int) -> Group | None:
        """A group of calls that isn't answered in full."""
        return self._open.get((inbox, number))

    def agents_created(self, count: int) -> None:
        """Tell the garbage collector that these are here to stay, every so many."""
        self._unfrozen += count
        if self._unfrozen >= _FREEZE_EVERY:
            self._unfrozen = 0
            gc.freeze()

    # Receiving
    def _receive(self, shard: Shard, message: Message) -> None:
        self._handle(shard, message.data)

    def _handle(self, shard: Shard, data: bytes) -> None:
        fields = batch.check(self.codec.unpack(data))
        kind = fields[0]
        if kind == batch.CALLS:
            for row, cost in zip(fields[2], fields[3], strict=True):
                self._take_group(shard, fields[1], row, cost, fields[4])
        elif kind == batch.CANCEL:
            group = self._open.get((fields[1], fields[2]))
            if group is not None:
                every = range(len(group.indexes))
                positions = every if fields[3] is None else batch.numbers(fields[3])
                if fields[3] is None and group.streams:  # nobody takes what is held back
                    group.flow.held.clear()
                    group.held = 0
                shard.cancel(group, positions)
        elif kind == batch.FETCH:
            for number, key, kept in fields[2]:
                self._fetch(fields[1], number, tuple(key), expected=kept)
        elif kind == batch.RECAP:
            self._recap(shard, fields[1], fields[2])
        elif kind == batch.TAKEN:
            self._taken(shard, fields[1], fields[2])
        elif kind == batch.MEMBERS and isinstance(shard, Stage) and shard.waves is not None:
            shard.waves.finished(*fields[1:])
        elif kind == batch.PROBE:
            self.cycles.receive(shard, fields[1], fields[2])
        elif kind == batch.PIECE:
            whole = self._pieces.take(fields)
            if whole is not None:
                self._handle(shard, whole)
        else:
            raise CodecError(f"a message of kind {kind} does not belong to a shard")

    def _take_group(self, shard: Shard, caller: str, row: bytes, cost: int, sent: float) -> None:
        account = shard.account(caller)
        references = self.caller.references.seen
        columns: Any = None
        try:
            columns = self.codec.unpack(row)
            found = self.caller.references.seen != references
            group = Group(shard, account, columns, cost, references=found)
        except (PopulaceError, TypeError, ValueError, IndexError) as error:
            _log.error("a group of calls can't be read", shard=shard.id, error=str(error))
            account.begun += cost
            if isinstance(columns, list) and columns and isinstance(columns[0], int):
                described = [type(error).__name__, str(error), ""]
                self._outbox.send(caller, [batch.REFUSED, [[columns[0], described]]])
            return
        if "agent" in group.options:
            shard.mix(group.indexes)
        key = (caller, group.number)
        if key in self._open or key in self._finished:
            return  # it was sent twice, since the connection broke
        account.begun += group.cost_beside
        self._open[key] = group
        if (step := group.options.get("step")) and self.ordered.get(shard.population):
            group.ordered = self.ordered[shard.population]
            self._tell_finished(group, step)
        self._calls += len(group.indexes)
        if self.profile is not None:
            group.arrived = time.time()
            self.profile.sent += max(0.0, group.arrived - sent) * len(group.indexes)
        if self._early:
            for early in [k for k in self._early if k[:2] == key]:
                for asker in self._early.pop(early):
                    self._wait(group, early[2], asker)
        shard.take(group)

    def _tell_finished(self, group: Group, step: int, paths: Sequence[str] | None = None) -> None:
        """Tell environments that apply calls in agent order how many will make no more."""
        data = self.codec.pack([batch.MEMBERS, group.shard.id, group.number, step, group.done])
        for path in group.ordered if paths is None else paths:
            self.bus.send(self.caller.subject_of(f"{ENVIRONMENT}{path}"), data)

    def give_credit(self, shard: Shard, account: Account) -> None:
        """Tell a caller how far its calls have begun."""
        account.told = account.credit
        self._outbox.send(account.caller, [batch.CREDIT, shard.id, account.told])

    def _taken(self, shard: Shard, caller: str, rows: list[list[int]]) -> None:
        """A caller has taken answers: more may go."""
        for number, size in rows:
            if number:
                group = self._open.get((caller, number))
                flow = None if group is None else group.flow
            else:
                flow = shard.account(caller).answered
            if flow is not None:
                flow.taken = max(flow.taken, size)
                self._outbox.release(flow)

    # Answering
    def dirty(self, group: Group) -> None:
        """Have the group's new answers sent at the end of this tick."""
        if self._stopping:
            return
        self._dirty[group] = None
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        dirty, self._dirty = self._dirty, {}
        summaries: dict[str, list[Any]] = {}
        for group in dirty:
            positions, values, errors = group.positions, group.values, group.errors
            group.positions, group.values, group.errors = [], [], []
            if positions and group.caller:
                if isinstance(group.shard, Stage):
                    self._deliver_later(group.shard, group, positions, values, errors)
                elif self.by_call and "step" in group.options and "agent" not in group.options:
                    self._deliver_written(group, positions, values, errors)
                else:
                    self._deliver(group, positions, values, errors)
            if group.ordered and positions:
                self._tell_finished(group, group.options["step"])
            if group.partial is not None:
                self._report(group, summaries)
            if group.left <= 0 and not group.storing and not group.held:
                if group.on_done is not None:
                    group.on_done()
                self._finish(group)
        for caller, rows in summaries.items():
            self._send_summaries(caller, rows)
        self._outbox.flush()

    def _deliver(
        self, group: Group, positions: list[int], values: list[Any], errors: list[Any]
    ) -> None:
        """Send, keep, record or summarise answers."""
        if self._messages and "agent" in group.options:
            self._record_messages(group, positions, values, errors)
        if group.partial is not None or group.record is not None:
            _sort_out_unusable(group, values, errors)
        row: list[Any] | None = None
        if group.partial is None and not group.keep:
            row = self._answer_columns(group, positions, values, errors)
        if group.record is not None:
            self._record(group, positions, values, errors, row)
        if group.waiters:
            self._serve_waiters(group, positions, values, errors)
        if group.partial is not None:
            self._summarise(group, positions, values, errors)
        elif group.keep:
            self._answer_or_keep(group, positions, values, errors)
        elif group.record is None and row is not None:
            self._outbox.answer(group, row)

    def _deliver_later(
        self, stage: Stage, group: Group, positions: list[int], values: list[Any], errors: list[Any]
    ) -> None:
        """The same, once the environment's journal has what was done."""
        group.storing += 1
        if group.unwritten is None:
            group.unwritten = set()
        group.unwritten.update(positions)

        def journalled() -> None:
            group.storing -= 1
            assert group.unwritten is not None
            group.unwritten.difference_update(positions)
            self._deliver(group, positions, values, errors)
            self.dirty(group)

        stage.commit(journalled)

    def _deliver_written(
        self, group: Group, positions: list[int], values: list[Any], errors: list[Any]
    ) -> None:
        """The same, once it is written down that these calls are finished."""
        group.storing += 1
        if group.unwritten is None:
            group.unwritten = set()
        group.unwritten.update(positions)
        costs, group.costs = group.costs, []
        seconds, group.seconds = group.seconds, []
        tokens, group.tokens_new = group.tokens_new, 0

        async def write() -> None:
            assert group.shard.finished is not None
            try:
                await group.shard.finished.write(group, positions, values, errors, costs, seconds)
            finally:
                group.storing -= 1
                assert group.unwritten is not None
                group.unwritten.difference_update(positions)
                # As they were when these answers came; what came since waits in them.
                later = group.costs, group.seconds, group.tokens_new
                group.costs, group.seconds, group.tokens_new = costs, seconds, tokens
                self._deliver(group, positions, values, errors)
                group.costs, group.seconds = later[0], later[1]
                group.tokens_new += later[2]
                self.dirty(group)

        task = asyncio.ensure_future(write())
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    def abandon(self, stage: Stage, reason: str) -> None:
        """An environment can't go on here: where that helps, its process makes room for another."""
        _log.critical("an environment can't go on", path=stage.path, reason=reason)
        if self.give_up is not None:
            self.give_up()

    # Environments and their events
    async def make_environment(
        self, cls: type[Environment], path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AgentProxy:
        """Have the run's owner make an environment; returns a proxy of it.

        Raises:
            InvalidInputError: the path is taken, or can't be one; the class can't be loaded.
        """
        class_path = self.loader.path_of(cls)
        folder = None if self.loader.is_installed(class_path) else import_path(cls)[1]
        request = EnvironmentRequest(
            path=path,
            class_path=class_path,
            folder=None if folder is None else str(folder),
            arguments=self.codec.pack([list(args), kwargs]).hex(),
        )
        subject = self.subjects.run_owner(self.run, "environment")
        try:
            await ask(self.bus, subject, request, EnvironmentMade, timeout=60, patience=5.0)
        except RemoteError as error:
            raise InvalidInputError(str(error)) from None
        self.directory.learn_environments({path: cls.__name__})
        return self.directory.environment(path)

    async def listen(
        self,
        shard: Shard,
        index: int,
        environment: Any,
        event: str,
        method: str,
        *,
        when: str | None,
        below: bool,
        durable: bool,
        new: bool = False,
    ) -> Listener:
        """Have events delivered into an agent's mailbox."""
        agent = shard.agents[index]
        if shard._method(type(agent), method) is None:
            raise InvalidInputError(
                f"{type(agent).__name__} has no method {method!r} that could handle events"
            )
        path = path_of(environment)
        name = None
        if durable:
            token = f"{shard.agent_name(index)}/{path}/{event}/{method}"
            digest = hashlib.blake2b(token.encode(), digest_size=16).hexdigest()
            name = self.subjects.listener(self.run, self.life, digest)

        async def deliver(told: Event) -> None:
            await self._call_here(shard, index, method, told)

        listener = await self._listening.add(
            path, event, deliver, when=when, below=below, durable=name, new=new
        )
        arguments = [path, event, method, when, below, durable]
        if not isinstance(shard, Stage):
            noted = [index, *arguments]
            if noted not in shard.listeners:
                shard.listeners.append(noted)

            async def forget_here() -> None:
                if noted in shard.listeners:
                    shard.listeners.remove(noted)

            listener._ends.append(forget_here)
        else:
            shard.note_listener(arguments)

            async def forget() -> None:
                shard.drop_listener(arguments)

            listener._ends.append(forget)
        return listener

    async def listen_again(self, stage: Stage, arguments: list[Any], *, new: bool = False) -> None:
        """Take up a listener of an environment that lived elsewhere.

        Args:
            stage: the environment's.
            arguments: as they were noted.
            new: see ``Listening.add``.
        """
        await self._listen_as_before(stage, 0, arguments, new=new)

    async def _listen_as_before(
        self, shard: Shard, index: int, arguments: list[Any], *, new: bool
    ) -> None:
        path, event, method, when, below, durable = arguments
        await self.listen(
            shard, index, path, event, method, when=when, below=below, durable=durable, new=new
        )

    async def _call_here(self, shard: Shard, index: int, method: str, event: Event) -> None:
        """Call a method of an agent here with an event; its failure is logged, and counted."""
        self._heard += 1
        options: dict[str, Any] = {"round": event.round, "storm": event.storm}
        if isinstance(shard, Stage):  # it hears of each event once
            options["keys"] = [[event.by, f"{event.path}>{method}", event.number]]
        shard.mix([index])
        fields = [0, method, [[batch.SHARED, event]], {}, [index, index + 1], options]
        group = Group(shard, self._internal, fields, 0)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def over() -> None:
            if not done.done():
                done.set_result(None)

        group.on_done = (lambda: shard.commit(over)) if isinstance(shard, Stage) else over
        shard.take(group)
        await done
        self.listener_failures += group.failed

    def _finish(self, group: Group) -> None:
        key = (group.caller, group.number)
        if self._open.pop(key, None) is not None:
            self._finished[key] = None
            while len(self._finished) > _REMEMBERED:
                self._finished.popitem(last=False)

    @staticmethod
    def _answer_columns(
        group: Group, positions: list[int], values: list[Any], errors: list[Any]
    ) -> list[Any]:
        group.sequence += 1
        tokens, group.tokens_new = group.tokens_new, 0
        return [group.number, group.sequence, batch.column(positions), values, errors, tokens]

    def _answer_or_keep(
        self,
        group: Group,
        positions: list[int],
        values: list[Any],
        errors: list[Any],
    ) -> None:
        """Keep here what others will ask for; the caller only learns that it is done."""
        failed: dict[int, Any] = dict(errors)
        kept: list[int] = []
        sent: list[tuple[int, Any]] = []
        for place, position in enumerate(positions):
            if position not in group.keep:
                sent.append((place, position))
                continue
            outcome, content = batch.OK, values[place]
            if place in failed:
                outcome, content = batch.FAILED, failed[place]
            try:
                packed = self.codec.pack(content)
            except CodecError as error:
                outcome = batch.FAILED
                packed = self.codec.pack(["CodecError", str(error), ""])
            self._kept.put((group.caller, group.number, position), outcome, packed)
            kept.append(position)
        if kept:
            group.sequence += 1
            row = [group.number, group.sequence, batch.column(kept)]
            self._outbox.send(group.caller, [batch.DONE, [row]], {group.number})
        if sent:
            places = {place: i for i, (place, _) in enumerate(sent)}
            self._outbox.answer(
                group,
                self._answer_columns(
                    group,
                    [position for _, position in sent],
                    [values[place] for place, _ in sent],
                    [[places[place], error] for place, error in errors if place in places],
                ),
            )

    # Summaries and records
    def _summarise(
        self, group: Group, positions: list[int], values: list[Any], errors: list[Any]
    ) -> None:
        partial = group.partial
        assert partial is not None
        if errors:
            offset = group.shard.offset
            for place, error in errors:
                agent = offset + group.indexes[positions[place]]
                partial.add_failure(error[0], error[1], agent)
            failed = {place for place, _ in errors}
            values = [v for place, v in enumerate(values) if place not in failed]
        partial.add(values)

    def _report(self, group: Group, summaries: dict[str, list[Any]]) -> None:
        assert group.partial is not None
        over = group.left <= 0 and not group.storing
        now = asyncio.get_running_loop().time()
        if not over and now - group.reported < _PROGRESS_EVERY:
            return
        group.reported = now
        summaries.setdefault(group.caller, []).append(
            [
                group.number,
                group.done,
                group.failed,
                group.tokens_total,
                group.partial.mean,
                group.partial.pack() if over else None,
            ]
        )

    def _send_summaries(self, caller: str, rows: list[Any]) -> None:
        numbers = {row[0] for row in rows if row[5]}
        try:
            self._outbox.send(caller, [batch.SUMMARY, rows, time.time()], numbers)
        except PayloadTooLargeError:
            reason = "the different answers are too many or too long to be counted"
            described = ["PayloadTooLargeError", reason, ""]
            refused = [[row[0], described] for row in rows]
            self._outbox.send(caller, [batch.REFUSED, refused], numbers)

    def _record(
        self,
        group: Group,
        positions: list[int],
        values: list[Any],
        errors: list[Any],
        row: list[Any] | None,
    ) -> None:
        """Store records; ``row``, the answers to be sent, is sent once they are stored."""
        assert group.record is not None
        offset, indexes = group.shard.offset, group.indexes
        costs, group.costs = group.costs, []
        paid = any(costs)
        seconds, group.seconds = group.seconds, []
        group.storing += 1
        columns = batch_of(
            round_number=group.round,
            population=group.shard.population,
            method=group.method,
            call=group.record["call"],
            # By the first of its agents: how many are done may be the same for several.
            batch=f"{self.life}/{group.shard.id}/{group.number}/{positions[0]}",
            life=self.life,
            agents=[offset + indexes[p] for p in positions],
            values=values,
            errors=[[place, error[0], error[1]] for place, error in errors],
            tokens=[c.tokens if c else 0 for c in costs] if paid else None,
            tokens_out=[c.tokens_out if c else 0 for c in costs] if paid else None,
            models=[c.model if c else None for c in costs] if paid else None,
            seconds=[round(s, 4) for s in seconds] if any(seconds) else None,
            field=group.record.get("field"),
            backends=sorted(group.backends),
            backend_of=[c.backend or None if c else None for c in costs]
            if len(group.backends) > 1
            else None,
            personas=group.shard.persona_columns([indexes[p] for p in positions]),
        )
        task = asyncio.ensure_future(self._store(group, columns, row))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    def _record_messages(
        self, group: Group, positions: list[int], values: list[Any], errors: list[Any]
    ) -> None:
        """Have what agents said to one another stored, beside the answers themselves."""
        failed = {place: str(error[0]) for place, error in errors}
        arguments = [group.arguments(position) for position in positions]
        columns = {
            "run": self.run,
            "round": group.round,
            "life": self.life,
            "batch": f"{self.life}/{group.shard.id}/{group.caller}/{group.number}/{positions[0]}",
            "method": group.method,
            "senders": [_sender(group, position) for position in positions],
            "receivers": [group.shard.agent_name(group.indexes[p]) for p in positions],
            "arguments": [[_shown(a) for a in args] + [_shown(k)] for args, k in arguments],
            "values": [_shown(value) for value in values],
            "errors": [failed.get(place) for place in range(len(positions))],
        }
        task = asyncio.ensure_future(self._recorder.store_messages(columns))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _store(self, group: Group, columns: dict[str, Any], row: list[Any] | None) -> None:
        began = time.monotonic()
        try:
            await self._recorder.store(columns)
            if self.profile is not None:
                self.profile.stored += (time.monotonic() - began) * len(columns["agents"])
            if row is not None:
                self._outbox.answer(group, row)
        except Exception as error:
            _log.error("records are lost", batch=columns["batch"], error=str(error))
            described = [type(error).__name__, str(error), ""]
            self._outbox.send(group.caller, [batch.REFUSED, [[group.number, described]]])
        finally:
            group.storing -= 1
            if group.left <= 0 and not group.storing:
                self.dirty(group)

    # Answers for others
    def forget(self, group: Group, position: int) -> None:
        """A call was cancelled: whoever waits for its answer learns that there is none."""
        for inbox, number in (group.waiters or {}).pop(position, ()):
            described = ["cancelled", "the call was cancelled", ""]
            self._outbox.fetched(inbox, number, batch.FAILED, described)

    def _wait(self, group: Group, position: int, asker: tuple[str, int]) -> None:
        if group.waiters is None:
            group.waiters = {}
        waiters = group.waiters.setdefault(position, [])
        if asker not in waiters:
            waiters.append(asker)

    def _serve_waiters(
        self, group: Group, positions: list[int], values: list[Any], errors: list[Any]
    ) -> None:
        assert group.waiters is not None
        failed: dict[int, Any] = dict(errors)
        for place, position in enumerate(positions):
            for inbox, number in group.waiters.pop(position, ()):
                if place in failed:
                    self._outbox.fetched(inbox, number, batch.FAILED, failed[place])
                else:
                    self._outbox.fetched(inbox, number, batch.OK, values[place])

    def _fetch(self, inbox: str, number: int, key: tuple[Any, ...], *, expected: bool) -> None:
        """Someone asks for an answer that was made, or is being made, here."""
        caller, call, position = key
        held = self._kept.get((caller, call, position))
        if held is not None:
            self._outbox.fetched_packed(inbox, number, *held)
            return
        group = self._open.get((caller, call))
        pending = group is not None and (
            position >= group.cursor
            or position in group.positions  # answered, and not sent yet
            or group.shard.task_of(group, position) is not None
            or group.shard.is_queued(group, position)
            or (group.unwritten is not None and position in group.unwritten)
        )
        if group is not None and pending:
            self._wait(group, position, (inbox, number))
            return
        gone = self._kept.why_gone((caller, call, position))
        if gone is not None:
            self._outbox.fetched(inbox, number, batch.GONE, gone)
        elif expected and (caller, call) not in self._finished:
            # The call itself is still on its way here, by another road.
            early = (caller, call, position)
            if (inbox, number) in self._early.setdefault(early, []):
                return
            self._early[early].append((inbox, number))
            asyncio.get_running_loop().call_later(_EARLY_FOR, self._too_early, early)
        else:
            self._outbox.fetched(inbox, number, batch.ASK_CALLER, None)

    def _too_early(self, key: Key) -> None:
        for inbox, number in self._early.pop(key, ()):
            self._outbox.fetched(inbox, number, batch.ASK_CALLER, None)

    def _recap(self, shard: Shard, inbox: str, rows: list[list[int]]) -> None:
        """A caller asks after calls: repeat what it may have missed."""
        account = shard.account(inbox)
        self.give_credit(shard, account)
        account.answered.taken = account.answered.sent  # what came is taken, the rest is lost
        self._outbox.release(account.answered)
        unknown: list[int] = []
        missing: set[int] = set()
        repeat: set[int] = set()
        for number, seen, taken in rows:
            key = (inbox, number)
            group = self._open.get(key)
            if key in self._finished:
                missing.add(number)
                repeat.add(number)
            elif group is None:
                unknown.append(number)
            elif group.sequence > seen:
                repeat.add(number)
            if group is not None and group.streams:
                self._taken(shard, inbox, [[number, taken]])
        missing -= self._outbox.repeat(inbox, repeat)
        if unknown:
            self._outbox.send(inbox, [batch.UNKNOWN, unknown])
        if missing:
            described = [
                "placeholder_lost",
                "the answer was sent while the connection was down, and is kept no more",
                "",
            ]
            self._outbox.send(inbox, [batch.REFUSED, [[n, described] for n in missing]])


def _sender(group: Group, position: int) -> str | None:
    """Whose call it is, as far as that is known: who does not wait for an answer is no link."""
    chain = group.chain(position)
    if chain:
        return str(chain[-1][2]).rpartition(".")[0] or str(chain[-1][2])
    return None if group.keys is None else str(group.keys[position][0])


def _shown(value: Any) -> Any:
    """A value as others can read it; what has no plain form is named by its type."""
    try:
        return plain(value)
    except CodecError:
        return f"<{type(value).__name__}>"


def _sort_out_unusable(group: Group, values: list[Any], errors: list[Any]) -> None:
    """Turn answers that can't be recorded or summarised into failures, each by itself."""
    failed = {place for place, _ in errors}
    part = group.partial.field if group.partial is not None else None
    problems: dict[int, list[str]] = {}
    forms = list(values)
    for place, value in enumerate(values):
        if place in failed or (part is None and type(value) in _PLAIN):
            continue
        try:
            forms[place] = plain(value)
        except CodecError as error:
            problems[place] = ["CodecError", f"the answer: {error}", ""]
            forms[place] = None
            continue
        if part is not None and not has_part(value, part):
            problems[place] = ["LookupError", f"the answer has no part named {part!r}", ""]
    for place, reason in _unwritable(forms).items():
        problems.setdefault(place, ["CodecError", f"the answer: {reason}", ""])
    for place in sorted(problems):
        values[place] = None
        errors.append([place, problems[place]])
        group.failed += 1
    if _unwritable(errors):  # what a failure says may quote half a character
        errors[:] = writable(errors)


def _unwritable(forms: list[Any]) -> dict[int, str]:
    """Which plain values can't be written after all (half a character, say), and why."""
    with contextlib.suppress(CodecError):  # all at once: it is as good as never one of them
        pack_plain(forms)
        return {}
    found = {}
    for place, form in enumerate(forms):
        try:
            pack_plain(form)
        except CodecError as error:
            found[place] = str(error)
    return found
