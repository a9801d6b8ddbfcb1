"""Takes scenarios, starts a process for each run, and answers for it.

Scenarios come by request (answered with the run's name once the scenario is stored) or as an
event. Both end in the same stream, from which the directors of an installation take them in
turn; so a scenario that was accepted is never lost. A run's process holds the user's code, so
that no run can break another or the director.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from populace.commits import last_commit
from populace.workers.forking import Forked, Nursery
from services.director import player
from services.director.announce import (
    SupersededError,
    publish_status,
    read_info,
    read_spec,
    save_event,
    save_info,
    save_spec,
    take_over,
)
from services.director.player import RunOrder
from shared.bus import Consumer, Delivery, Message, Subscription, keep_alive
from shared.codec import (
    CONTENT_TYPE,
    JSON_TYPE,
    MSGPACK_TYPE,
    from_public,
    is_json,
    pack_plain,
    to_json,
)
from shared.errors import (
    BusError,
    CodecError,
    InvalidInputError,
    PopulaceError,
    RevisionConflictError,
)
from shared.ids import is_token, new_id, new_run_id
from shared.logs import get_logger
from shared.messages.scenario import (
    ControlReply,
    ControlRequest,
    ManageRequest,
    PlannedEvent,
    RunInfo,
    ScenarioSpec,
    Status,
    Submitted,
)
from shared.problems import first_problem
from shared.service import ServiceContext, answer_request, serve
from shared.streams import append_patiently, ensure_streams, patiently

_log = get_logger(__name__)

_STOP_WITHIN = 15.0
_CANCEL_WITHIN = 15.0
_LOOPS_END_WITHIN = 5.0
_ACCEPTING = 6.0
"""Seconds after which another director takes an event that nobody is at work on."""
_ACCEPTED_WITHIN = 90.0
"""Seconds for which a run that was accepted, and is not played, waits for its event."""
_LOOK_EVERY, _LOOK_SHARE = 1.5, 10
_PROBES_AT_ONCE = 32
_MOST_TRIES = 3
_LONGEST_EVENT = 256 << 10
"""Bytes: it is kept beside the scenario."""


@dataclass(eq=False)
class _Run:
    info: RunInfo
    process: Forked
    watch: asyncio.Task[None] | None = None
    control: Subscription | None = None
    cancelled: bool = False
    """Whether it was told to end, or to pause."""
    paused: bool = False
    """Whether that was to pause."""
    killed: bool = False
    """Whether it did not heed that."""


class Director:
    """One of the installation's directors."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._bus = context.bus
        self._subjects = context.settings.subjects
        self._runs: dict[str, _Run] = {}
        self._tries: dict[str, tuple[int, int]] = {}
        """Of runs whose process died: in which round, and how often."""
        self.name = new_id("director")
        self._nursery = Nursery(player.__name__)

    # The two doors
    async def submit(self, message: Message) -> None:
        """Store a scenario and answer with the run's name, or with what is wrong."""
        kind = message.header(CONTENT_TYPE)
        as_json = is_json(message.data, kind)
        try:
            spec = _read(message.data, kind)
            spec.run = spec.run or new_run_id()
            spec.results_format = spec.results_format or ("json" if as_json else "msgpack")
            await self._store(spec, spec.run)
            reply = Submitted(run=spec.run)
        except PopulaceError as error:
            reply = Submitted(error=str(error))
        if message.reply:
            fields = reply.model_dump(exclude_none=True)
            self._bus.send(
                message.reply,
                to_json(fields) if as_json else pack_plain(fields),
                headers={CONTENT_TYPE: JSON_TYPE if as_json else MSGPACK_TYPE},
            )

    async def _store(self, spec: ScenarioSpec, run: str) -> None:
        """Have a scenario kept; a cluster that has just lost a node is waited for."""
        known = await patiently(
            lambda: read_info(self._bus, self._subjects, run), "whether there is such a run"
        )
        if known is not None:
            raise InvalidInputError(f"there is a run named {run!r} already")
        await append_patiently(
            self._bus,
            self._subjects.scenario_event,
            spec.model_dump_json(exclude_none=True).encode(),
            headers={CONTENT_TYPE: JSON_TYPE},
            message_id=f"scenario/{run}/{new_id('s')}",
        )

    async def _take_events(self) -> None:
        consumer: Consumer | None = None
        while True:
            try:
                if consumer is None:
                    consumer = await self._bus.consumer(
                        self._subjects.stream_scenarios, durable="directors", ack_wait=_ACCEPTING
                    )
                for delivery in await consumer.fetch(1, timeout=5.0):
                    alive = asyncio.ensure_future(keep_alive(delivery, _ACCEPTING / 3))
                    try:
                        await self._accept(delivery)
                    finally:
                        alive.cancel()
            except Exception as error:  # whatever it was, scenarios must go on being taken
                _log.warning("taking scenarios starts anew", error=str(error))
                consumer = None
                await asyncio.sleep(0.5)

    async def _accept(self, delivery: Delivery) -> None:
        """Begin the run of an event; the event is acknowledged once the run is on record."""
        kind = (delivery.headers or {}).get(CONTENT_TYPE)
        # A redelivered event must get the name that it got before.
        digest = hashlib.blake2b(
            delivery.data + str(delivery.sequence).encode(), digest_size=5
        ).hexdigest()
        run = f"run-{digest}"
        try:
            spec = _read(delivery.data, kind)
        except InvalidInputError as error:
            run = _named(delivery.data, kind) or run
            _log.error("a scenario was refused", run=run, error=str(error))
            info = RunInfo(run=run, name="", state="failed", reason=str(error))
            await self._refuse(info)
            await delivery.term()
            return
        spec.run = run = spec.run or run
        as_json = is_json(delivery.data, kind)
        spec.results_format = spec.results_format or ("json" if as_json else "msgpack")
        info = RunInfo(
            run=run,
            name=spec.name,
            state="accepted",
            rounds=spec.rounds,
            agents=spec.agents.count,
            director=self.name,
            event=digest,
            player=new_id("player"),
        )
        bucket = await self._bus.bucket(self._subjects.bucket_runs)
        try:
            await bucket.create(run, info.model_dump_json().encode())
        except RevisionConflictError:
            held = await read_info(self._bus, self._subjects, run)
            # The delivery does not say whether it is the first: a killed broker may have forgotten.
            if held is None or held.event != digest:
                _log.error("a scenario was refused: its run's name is taken", run=run)
                await delivery.term()
                return
            if held.state != "accepted" or await self._is_played(run):
                await delivery.ack()  # by us or another; the acknowledgement was lost
                return
            if not await take_over(self._bus, self._subjects, info, held):
                return  # another director takes it
        await patiently(
            lambda: save_spec(self._bus, self._subjects, spec), f"the scenario of {run}"
        )
        await publish_status(
            self._bus,
            self._subjects,
            Status(
                kind="accepted",
                run=info.run,
                name=info.name,
                rounds=info.rounds,
                agents=info.agents,
                scenario=spec.model_dump(mode="json", exclude_none=True),
            ),
        )
        await self._start(spec, info, fresh=True)
        await delivery.ack()

    async def _is_played(self, run: str) -> bool:
        """Whether some director answers for a run."""
        if run in self._runs:
            return True
        try:
            subject = self._subjects.run_control(run)
            await self._bus.request(subject, b'{"action":""}', timeout=2)
        except BusError:
            return False
        return True

    async def _refuse(self, info: RunInfo) -> None:
        if await read_info(self._bus, self._subjects, info.run) is None:
            await save_info(self._bus, self._subjects, info)
            await self._tell_end(info)

    async def _tell_end(self, info: RunInfo) -> None:
        await publish_status(
            self._bus,
            self._subjects,
            Status(
                kind="ended",
                run=info.run,
                life=info.life,
                name=info.name,
                state=info.state,
                reason=info.reason,
            ),
        )

    # Runs
    async def _start(self, spec: ScenarioSpec, info: RunInfo, *, fresh: bool) -> None:
        order = RunOrder(spec=spec, info=info, fresh=fresh)
        process = await self._nursery.fork(info.player, order.model_dump_json())
        run = self._runs[info.run] = _Run(info, process)
        run.watch = asyncio.ensure_future(self._watch(run))
        run.control = await serve(
            self._bus,
            self._subjects.run_control(info.run),
            ControlRequest,
            lambda request: self._control(run, request),
        )
        _log.info("run starts", run=info.run, name=info.name, agents=info.agents)

    async def _control(self, run: _Run, request: ControlRequest) -> ControlReply:
        info = await read_info(self._bus, self._subjects, run.info.run)
        if info is None or info.over:
            raise InvalidInputError(f"the run {run.info.run!r} is over")
        if request.event is not None:
            return await self._inject(run, info, request.event)
        if request.action in ("pause", "spread"):
            spec = await read_spec(self._bus, self._subjects, run.info.run)
            if spec is None or spec.durability == "none" or info.not_durable:
                what = "paused" if request.action == "pause" else "spread anew"
                raise InvalidInputError(
                    f"the run {run.info.run!r} can't be {what}, as nothing of it is kept; cancel it"
                )
        if request.action == "spread":
            run.process.tell("spread")
            return ControlReply(state=info.state)
        if not run.cancelled:
            run.cancelled, run.paused = True, request.action == "pause"
            run.process.tell(f"{request.action} {' '.join(request.reason.split())}".strip())
            asyncio.get_running_loop().call_later(_CANCEL_WITHIN, self._kill, run)
        elif request.action == "cancel":
            run.paused = False  # the last word counts: what pauses now is cancelled then
        return ControlReply(state=info.state)

    async def _inject(self, run: _Run, info: RunInfo, event: PlannedEvent) -> ControlReply:
        """Keep an event, then tell the process that plays the run."""
        following = info.rounds_done + 2
        if event.round is not None and event.round < following:
            raise InvalidInputError(
                f"round {event.round} of {info.run!r} has begun, or is about to; the next is "
                f"{following}"
            )
        if (event.round or following) > info.rounds:
            raise InvalidInputError(
                f"{info.run!r} has {info.rounds} rounds, and no other will begin in which the "
                "event could come"
            )
        if event.after is not None:
            raise InvalidInputError("an event that comes by hand names a round, or nothing")
        if len(event.model_dump_json().encode()) > _LONGEST_EVENT:
            raise InvalidInputError(
                f"an event holds at most {_LONGEST_EVENT:,} bytes; have it name a file"
            )
        event.time = time.time()
        name = new_id("event")
        await save_event(self._bus, self._subjects, info.run, name, event)
        run.process.tell(f"inject {name}")
        return ControlReply(state=info.state)

    @staticmethod
    def _kill(run: _Run) -> None:
        """End a run that was cancelled and does not heed it (its code blocks, say)."""
        if run.process.returncode is None:
            run.killed = True
            run.process.kill()

    async def _watch(self, run: _Run) -> None:
        """See to it that a run whose process dies is seen to end."""
        code = await run.process.wait()
        for pause in (0.5, 1.0, 2.0, 5.0, 10.0, None):
            try:
                await self._bury(run, code)
                break
            except SupersededError:
                break  # another has it
            except BusError as error:
                _log.warning("a run's end is told again", run=run.info.run, error=str(error))
                if pause is None:
                    break
                await asyncio.sleep(pause)
        if self._runs.get(run.info.run) is run:
            del self._runs[run.info.run]
            if run.control is not None:
                await run.control.unsubscribe()

    async def _bury(self, run: _Run, code: int) -> None:
        info = await read_info(self._bus, self._subjects, run.info.run)
        if info is None:
            return  # it was over, and was deleted: its entry was there before its process
        if info.over:
            _log.info("run ended", run=info.run, state=info.state, reason=info.reason)
            return
        cancel = run.cancelled and not run.paused and not run.info.over
        if info.state == "paused" and info.player == run.info.player and cancel:
            ended = info.model_copy(update={"state": "cancelled", "reason": ""})
            if await take_over(self._bus, self._subjects, ended, info):
                await self._tell_end(ended)
            return
        if info.state == "paused" or info.player != run.info.player:
            _log.info("run left", run=info.run, state=info.state, reason=info.reason)
            return
        if not run.cancelled and not self._context.stopping.is_set() and await self._again(info):
            return
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        info.state, info.reason = "failed", f"the process that played the run {how}"
        if run.paused:
            paused = info.model_copy(update={"state": "paused", "reason": "it was told to"})
            if await take_over(self._bus, self._subjects, paused, info):
                await self._tell_paused(paused)
            return
        if run.cancelled:
            info.state = "cancelled"
            if run.killed:
                info.reason = f"it did not stop within {_CANCEL_WITHIN:g} s and was killed"
            else:
                info.reason = f"the process that played it {how}"
        _log.error("run ended", run=info.run, state=info.state, reason=info.reason)
        await save_info(self._bus, self._subjects, info)
        await self._tell_end(info)

    # Taking runs up again
    async def _again(self, info: RunInfo) -> bool:
        """Take up a run whose process has died; False if that is not possible.

        A run whose process dies again and again without finishing a round is paused.
        """
        spec = await read_spec(self._bus, self._subjects, info.run)
        if spec is None or spec.durability == "none" or info.not_durable:
            return False
        tries = self._tries.get(info.run)
        count = tries[1] + 1 if tries is not None and tries[0] == info.rounds_done else 1
        self._tries[info.run] = (info.rounds_done, count)
        if count > _MOST_TRIES:
            paused = info.model_copy(
                update={
                    "state": "paused",
                    "reason": f"the process that plays it died {_MOST_TRIES} times in round "
                    f"{info.rounds_done + 1}",
                }
            )
            if await take_over(self._bus, self._subjects, paused, info):
                await self._tell_paused(paused)
            return True
        await self._take_up(spec, info)
        return True

    async def _take_up(self, spec: ScenarioSpec, info: RunInfo, *, fresh: bool = False) -> bool:
        """Play a run that nobody plays any more from its last committed round.

        Args:
            spec: the run's scenario.
            info: its state as it was read.
            fresh: whether it was never begun, so that it begins as new ones do.

        Returns:
            Whether no other director was quicker.
        """
        mine = info.model_copy(
            update={
                "life": info.life + 1,
                "player": new_id("player"),
                "director": self.name,
                "state": "running",
                "reason": "",
                "rounds": spec.rounds,
            }
        )
        if not await take_over(self._bus, self._subjects, mine, info):
            return False
        _log.warning("a run is taken up again", run=info.run, life=mine.life)
        before = self._runs.pop(info.run, None)
        if before is not None and before.control is not None:
            await before.control.unsubscribe()
        await self._start(spec, mine, fresh=fresh)
        return True

    async def _tell_paused(self, info: RunInfo) -> None:
        status = Status(
            kind="paused", run=info.run, name=info.name, state="paused", reason=info.reason
        )
        await publish_status(self._bus, self._subjects, status)

    async def _look_after_others(self) -> None:
        """Take up runs whose director is gone, and say so of those that can't be."""
        missed: dict[str, RunInfo] = {}
        bucket = None
        while True:
            began = time.monotonic()
            reading = 0.0
            try:
                bucket = bucket or await self._bus.bucket(self._subjects.bucket_runs)
                infos = [RunInfo.model_validate_json(e.value) for e in await bucket.entries()]
                reading = time.monotonic() - began
                alone = await self._alone(infos)
                for info in alone.values():
                    # Twice, since its director's connection may be down for a moment.
                    before = missed.get(info.run)
                    if before is not None and before.life == info.life:
                        await self._adopt(info)
                missed = alone
            except Exception as error:  # whatever it was, runs must not be left alone
                _log.warning("looking after runs starts anew", error=str(error))
                bucket = None
            # Where very many runs are on record, reading takes its time; it must not become all.
            # Waiting for directors that hang is no work, and makes no other run wait longer.
            await asyncio.sleep(max(_LOOK_EVERY, _LOOK_SHARE * reading))

    async def _alone(self, infos: list[RunInfo]) -> dict[str, RunInfo]:
        """Those of some runs for which no director answers, though they should be played."""
        slots = asyncio.Semaphore(_PROBES_AT_ONCE)

        async def is_played(run: str) -> bool:
            async with slots:
                return await self._is_played(run)

        open_ones = [info for info in infos if not info.over and info.state != "paused"]
        # All at once: each that hangs takes seconds to be known.
        played = await asyncio.gather(*(is_played(info.run) for info in open_ones))
        return {i.run: i for i, known in zip(open_ones, played, strict=True) if not known}

    async def _adopt(self, info: RunInfo) -> None:
        if info.state == "accepted" and time.time() - info.updated < _ACCEPTED_WITHIN:
            return  # nothing has begun: its event is not acknowledged, and comes again
        spec = await read_spec(self._bus, self._subjects, info.run)
        if spec is not None and spec.durability != "none" and not info.not_durable:
            await self._take_up(spec, info)
            return
        ended = info.model_copy(
            update={
                "state": "failed",
                "reason": "its director stopped while it was played",
                # If its director merely hangs, the run is still played: whoever does so must stop.
                "player": "",
            }
        )
        if await take_over(self._bus, self._subjects, ended, info):
            await self._tell_end(ended)

    async def manage(self, message: Message) -> None:
        """Resume a run, or end one that nobody plays."""
        await answer_request(self._bus, message, ManageRequest, self._manage)

    async def _manage(self, request: ManageRequest) -> ControlReply:
        info = await read_info(self._bus, self._subjects, request.run)
        if info is None:
            raise InvalidInputError(f"there is no run named {request.run!r}")
        if info.state in ("accepted", "running"):
            raise InvalidInputError(f"the run {request.run!r} is {info.state}")
        if request.action == "cancel":
            if info.over:
                raise InvalidInputError(f"the run {request.run!r} is over")
            ended = info.model_copy(update={"state": "cancelled", "reason": ""})
            if await take_over(self._bus, self._subjects, ended, info):
                await self._tell_end(ended)
            return ControlReply(state="cancelled")
        spec = await read_spec(self._bus, self._subjects, request.run)
        if spec is None:
            raise InvalidInputError(f"the scenario of the run {request.run!r} is not kept any more")
        if spec.durability == "none":
            raise InvalidInputError(
                f"nothing was kept of the run {request.run!r} to go on from (durability: none)"
            )
        if info.not_durable:
            raise InvalidInputError(
                f"nothing is kept of the run {request.run!r} to go on from: {info.not_durable}"
            )
        if request.rounds is not None:
            if request.rounds < info.rounds_done:
                raise InvalidInputError(
                    f"the run {request.run!r} has played {info.rounds_done} rounds already"
                )
            spec.rounds = request.rounds
        if info.state == "finished" and spec.rounds <= info.rounds_done:
            raise InvalidInputError(
                f"the run {request.run!r} has finished its {info.rounds_done} rounds; say how many "
                "it is to have (--rounds)"
            )
        fresh = await last_commit(self._bus, self._subjects, request.run) is None
        if fresh and info.rounds_done:  # else there is nothing to lose: it begins with its setup
            raise InvalidInputError(
                f"nothing is kept of the run {request.run!r} to go on from; run its scenario again"
            )
        if request.budget is not None:
            spec.budget = request.budget
        await save_spec(self._bus, self._subjects, spec)
        self._tries.pop(request.run, None)
        if not await self._take_up(spec, info, fresh=fresh):
            raise InvalidInputError(f"the run {request.run!r} was changed meanwhile; try again")
        return ControlReply(state="running")

    async def run(self) -> None:
        """Direct until told to stop."""
        await self._nursery.start()
        await ensure_streams(self._bus, self._subjects)
        await self._context.announce(
            "Takes scenarios and plays them",
            metadata={"director": self.name},
            stats=lambda: {"runs": sorted(self._runs)},
            endpoints={
                "submit": (self._subjects.scenario_submit, self.submit),
                "manage": (self._subjects.run_manage, self.manage),
            },
        )
        events = asyncio.ensure_future(self._take_events())
        others = asyncio.ensure_future(self._look_after_others())
        _log.info("director is up", director=self.name)
        try:
            await self._context.stopping.wait()
        finally:
            for task in (events, others):
                task.cancel()
            await asyncio.wait({events, others}, timeout=_LOOPS_END_WITHIN)
            await self._stop_runs()
            await self._nursery.stop()

    async def _stop_runs(self) -> None:
        runs = list(self._runs.values())
        for run in runs:
            run.process.tell("stop")
        watches = [run.watch for run in runs if run.watch is not None]
        if not watches:
            return
        _, late = await asyncio.wait(watches, timeout=_STOP_WITHIN)
        if late:
            for run in runs:
                run.process.kill()
            await asyncio.wait(late, timeout=5)


def _read(data: bytes, content_type: str | None) -> ScenarioSpec:
    """The scenario in a message.

    Raises:
        InvalidInputError: it holds none; one sentence names the key.
    """
    try:
        return ScenarioSpec.model_validate(from_public(data, content_type))
    except CodecError as error:
        raise InvalidInputError(f"the scenario can't be read: {error}") from None
    except ValidationError as error:
        why = first_problem(error, ScenarioSpec)
        raise InvalidInputError(f"the scenario can't be used: {why}") from None


def _named(data: bytes, content_type: str | None) -> str | None:
    """The run's name that an unusable scenario asked for, if it can be told."""
    try:
        fields: Any = from_public(data, content_type)
    except CodecError:
        return None
    name = fields.get("run") if isinstance(fields, dict) else None
    return name if isinstance(name, str) and is_token(name) else None


async def main(context: ServiceContext) -> None:
    """The director service."""
    await Director(context).run()
