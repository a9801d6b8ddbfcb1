"""The process that plays one run: its director's nursery forks it.

The director's words are "cancel", "pause", or "stop" when the director itself stops. When the
lifeline closes, the director is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel

from populace.commits import Commit, Commits, last_commit
from populace.errors import (
    BudgetSpentError,
    PlacementError,
    PopulaceError,
    RunBrokenError,
    ScenarioError,
)
from populace.injections import Injections
from populace.inspection import Inspections
from populace.interviews import Interviews
from populace.models.accounts import KEPT_FOR, Accounts, PriceTable
from populace.personas.people import find_people
from populace.play import FINISH, Player
from populace.scenario import Scenario
from populace.scenario_file import load_class
from populace.world import World, open_world
from services.director.announce import (
    SupersededError,
    check_player,
    publish_status,
    read_events,
    save_event,
    save_info,
)
from shared import __version__
from shared.bus import Message, NatsBus
from shared.code import CodeLoader
from shared.codec import writable
from shared.collector import settle_collector
from shared.errors import BusError, RemoteError
from shared.ids import new_id
from shared.logs import get_logger
from shared.messages.control import CheckModel, ModelChecked
from shared.messages.model import Terms
from shared.messages.scenario import PlannedEvent, RoundRow, RunInfo, RunState, ScenarioSpec, Status
from shared.service import DEFAULT_URL, ask, run_loop
from shared.settings import Settings, load_settings
from shared.streams import patiently

_log = get_logger(__name__)

SERVICE = "run"

_CHECK_WITHIN = 90.0
_MODEL_SERVICE_WITHIN = 15.0


_PACKAGES = ("nats-py", "msgpack", "pydantic", "aiohttp", "pyarrow")
_MOST_LIVES = 5
"""Times that a run is taken up again from the same round, until it is paused."""
_LONGEST_PAUSE = 10.0
_LAST_WITHIN, _HEARD_WITHIN, _ANY_WITHIN = 7.0, 0.2, 2.0
"""Seconds that requests under way get when a run ends early; and all services to speak up."""
_ENDS: dict[str, tuple[RunState, str]] = {
    "cancel": ("cancelled", ""),
    "pause": ("paused", "it was told to"),
    "stop": ("paused", "its director was stopped"),
    "": ("cancelled", "the director is gone"),
}
"""What a director's word makes of a run."""


class PausedError(PopulaceError):
    """A run can't go on for now; it can be resumed."""


class RunOrder(BaseModel):
    """What a director tells the process that plays a run."""

    spec: ScenarioSpec
    info: RunInfo
    fresh: bool = False
    """Whether nothing was ever played of it, as far as is known: its models must be there, then."""


class Run:
    """Plays one run, and tells of it."""

    def __init__(self, settings: Settings, order: RunOrder, bus: NatsBus) -> None:
        self._settings = settings
        self._subjects = settings.subjects
        self._spec = order.spec
        self._info = order.info
        self._fresh = order.fresh
        self._bus = bus
        self._records: int | None = None
        self._manifest: dict[str, Any] = {}
        self._word = self._reason = ""
        self._uncommitted = ""
        self._progressed = False
        """Whether this life has finished a round."""
        self._lost: list[str] = []
        self._injections: Injections | None = None
        self._world: World | None = None
        """That of this life, once it is open."""
        self._refused_before = 0
        """Prompts that earlier lives were refused, for want of budget."""
        self._reported: dict[str, dict[str, Any]] = {}
        """What endpoints say of themselves, by model."""
        self._contexts: dict[str, int] = {}
        """What endpoints say that they can take, by model."""

    async def play(self) -> None:
        """Play to the end, whatever that is, and say so."""
        state: RunState
        try:
            await self._play()
            state, reason = "finished", ""
        except SupersededError as error:
            _log.warning("the run is left to another", run=self._info.run, reason=str(error))
            return
        except asyncio.CancelledError:
            if self._word == "" and self._may_go_on:
                return  # the director was killed: another takes the run up
            state, reason = _ENDS.get(self._word, _ENDS[""])
            reason = self._reason or reason
            if state == "paused" and not self._may_go_on:
                state = "cancelled"
        except PausedError as error:
            state, reason = "paused", str(error)
        except BudgetSpentError as error:
            state, reason = "cancelled", str(error)
        except PopulaceError as error:
            state, reason = "failed", str(error).partition("\n")[0]
            _log.error("the run failed", run=self._info.run, error=str(error))
        except Exception as error:
            state, reason = "failed", f"the scenario raised {_described(error)}"
            _log.error("the scenario raised", run=self._info.run, trace=traceback.format_exc())
        self._info.state, self._info.reason = state, reason
        if self._manifest and self._spec.models:
            try:
                if state != "finished" and self._spec.replay is None:
                    await self._last_answers()
                await self._accounts()  # of the round that was not finished, too
            except BusError as error:
                _log.warning("the run's accounts can't be read", error=str(error))
        try:
            await patiently(
                lambda: check_player(self._bus, self._subjects, self._info), "whose the run is"
            )
        except SupersededError as error:
            _log.warning("the run is left to another", run=self._info.run, reason=str(error))
            return
        # Told before it is noted: if this process dies between, the director tells it again.
        await self._tell(
            Status(
                kind="paused" if state == "paused" else "ended",
                run=self._info.run,
                life=self._info.life,
                name=self._info.name,
                state=state,
                reason=reason,
                records=self._records,
                manifest=self._manifest,
            )
        )
        if self._info.over:
            # Before it is noted: from then on somebody may give the run more rounds.
            journals = self._subjects.env_journal(self._info.run, ">")
            with contextlib.suppress(BusError):  # they go by themselves after a while
                await self._bus.purge(self._subjects.stream_journal, journals)
                await self._bus.drop_consumers(
                    self._subjects.stream_events, self._subjects.listener(self._info.run)
                )
        with contextlib.suppress(SupersededError):
            await save_info(self._bus, self._subjects, self._info)

    async def inject(self, name: str) -> None:
        """Something came by hand, and is kept under a name."""
        try:
            kept = await patiently(
                lambda: read_events(self._bus, self._subjects, self._info.run), "what was injected"
            )
        except BusError as error:
            _log.error("an event can't be read", run=self._info.run, error=str(error))
            return
        if self._injections is not None and name in kept:
            self._injections.take(name, kept[name])

    def spread(self) -> None:
        """Have the run begin another life, on the hosts that there are now."""
        if self._world is not None and self._may_go_on:
            self._world.leave("it is spread over the hosts anew")

    def heed(self, line: str) -> None:
        """Take a word of the director, and a reason; an empty line means that it is gone."""
        self._word, _, self._reason = line.partition(" ")

    @property
    def _may_go_on(self) -> bool:
        """Whether the run can be taken up again later."""
        return self._spec.durability != "none" and not self._uncommitted

    async def _tell(self, status: Status) -> None:
        spent = ""
        if status.row is not None:
            spent = await self._count(status.row)
        await publish_status(self._bus, self._subjects, status)
        if status.kind == "round_finished":
            self._progressed = True
            self._info.rounds_done = status.round or 0
            await save_info(self._bus, self._subjects, self._info)
        if spent:
            raise BudgetSpentError(spent)

    async def _count(self, row: RoundRow) -> str:
        """Add to a round what its models were asked; says so if the budget is spent."""
        accounts = await patiently(self._accounts, "the accounts of a round")
        row.usage = accounts.total(row.round).plain()
        total = accounts.total()
        if total.refused <= self._refused_before or self._spec.budget is None:
            return ""
        named = self._spec.budget.model_dump(exclude_none=True, exclude={"account"})
        budget = ", ".join(f"{value:,} {name}" for name, value in named.items())
        return (
            f"its budget ({budget}) is spent: {total.tokens_in + total.tokens_out:,} tokens, "
            f"{total.requests:,} requests, {total.money:.4g} of money; in round {row.round} "
            f"{row.answers:,} agents had answered"
        )

    async def _accounts(self) -> Accounts:
        """What the model services have counted of this run."""
        found = Accounts()
        bucket = await self._bus.bucket(self._subjects.bucket_usage, ttl=KEPT_FOR)
        for entry in await bucket.entries(f"{self._info.run}.>"):
            found.take_json(entry.value)
        self._manifest["usage"] = {
            "total": found.total().plain(),
            "models": found.by_model(),
        }
        return found

    async def _last_answers(self) -> None:
        """Ask nothing more, and let what is under way be answered: it is paid for, so it counts."""
        left: dict[str, int] = {}

        nobody = False

        def take(message: Message) -> None:
            nonlocal nobody
            nobody |= not message.data  # the broker's word that nobody listens
            if message.data:
                told = json.loads(message.data)
                left[told["service"]] = told["left"]

        inbox = self._subjects.inbox(self._bus.process, "last")
        subscription = await self._bus.subscribe(inbox, take)
        told = {"run": self._info.run, "life": self._info.life}
        self._bus.send(self._subjects.model_last, json.dumps(told).encode(), reply=inbox)
        await self._bus.flush()
        began = time.monotonic()
        heard: float | None = None
        while not nobody and (passed := time.monotonic() - began) < _LAST_WITHIN:
            if left and heard is None:
                heard = passed
            # Where one service answers, others do within a moment, too.
            waits = _ANY_WITHIN if heard is None else heard + _HEARD_WITHIN
            if passed > waits and not any(left.values()):
                break
            await asyncio.sleep(0.02)
        await subscription.unsubscribe()
        if under_way := sum(left.values()):
            self._manifest["under_way_at_end"] = under_way
            _log.warning("requests were under way at a run's end", count=under_way)

    async def _play(self) -> None:
        spec, settings = self._spec, self._settings
        loader = CodeLoader.from_settings(settings)
        cls, params = load_class(spec, loader)
        self._people()
        PriceTable(settings.prices).check_budget(spec)
        try:
            await self._check_models()
        except ScenarioError as error:
            if self._fresh:
                raise
            # It was there before, and may take its time to come back: prompts wait for it.
            _log.warning("a model is not there yet", run=self._info.run, error=str(error))
        self._info.state, self._info.reason = "running", ""
        await save_info(self._bus, self._subjects, self._info)
        lives = 0
        while True:
            commit = None
            if self._info.life > 1:
                commit = await patiently(
                    lambda: last_commit(self._bus, self._subjects, self._info.run),
                    "the last committed round",
                )
                await self._tell_restored(0 if commit is None else commit.round)
            try:
                await self._live(loader, cls, params, commit)
                return
            except (RunBrokenError, BusError, RemoteError) as error:
                if not self._may_go_on:
                    raise
                lives = 1 if self._progressed else lives + 1
                if lives > _MOST_LIVES:
                    raise PausedError(
                        f"it was taken up {_MOST_LIVES} times from the same round, and broke each "
                        f"time; the last time, {error}"
                    ) from None
                _log.warning("the run is taken up again", run=self._info.run, reason=str(error))
                if isinstance(error, BusError):  # a cluster may need a while for its leaders
                    await asyncio.sleep(min(_LONGEST_PAUSE, 2.0 ** (lives - 1)))
                self._info.life += 1
                await save_info(self._bus, self._subjects, self._info)
            except PlacementError as error:
                if self._info.life == 1 or not self._may_go_on:
                    raise
                raise PausedError(str(error)) from None

    async def _tell_restored(self, round_number: int) -> None:
        """Say that all that earlier lives recorded beyond a round does not count."""
        info = self._info
        info.rounds_done = round_number
        await publish_status(
            self._bus,
            self._subjects,
            Status(
                kind="restored", run=info.run, name=info.name, round=round_number, life=info.life
            ),
        )

    async def _live(
        self, loader: CodeLoader, cls: type[Scenario], params: BaseModel, commit: Commit | None
    ) -> None:
        """Play in one world, from the last commit to the end or until the world breaks."""
        spec, settings = self._spec, self._settings
        self._progressed = False
        accounts = await patiently(self._accounts, "the accounts of earlier lives")
        self._refused_before = accounts.total().refused
        first = 0 if commit is None else commit.round + 1
        life = self._info.life
        folders = [] if spec.folder is None or loader.is_installed(spec.scenario) else [spec.folder]
        async with open_world(
            settings,
            settings.nats_url or DEFAULT_URL,
            run=self._info.run,
            seed=spec.seed,
            workers=spec.agents.workers,
            at_most=spec.agents.count,
            models=spec.models,
            folders=folders,
            results_format=spec.results_format or "msgpack",
            call_timeout=spec.call_timeout,
            terms=Terms(
                cache=spec.cache,
                budget=spec.budget.model_dump(exclude_none=True) if spec.budget else None,
                prices=PriceTable(settings.prices).of_all(spec.models),
                contexts=self._contexts,
            ),
            profile=spec.profile,
            life=life,
            replay=spec.replay,
            by_call=spec.durability == "call",
            record_messages=spec.record_messages,
            durable=self._may_go_on,
            recall=[] if life == 1 else [*([0] if first == 0 else []), max(1, first), FINISH],
        ) as world:
            self._world = world
            self._manifest = {
                **self._manifest,
                **self._describe(world),
                "code": await asyncio.to_thread(_code_versions, cls),
            }
            settle_collector()
            scenario = cls(
                world,
                params=params,
                seed=spec.seed,
                rounds=spec.rounds,
                agents=spec.agents.count,
                isolated=spec.agents.isolated,
                groups=spec.agents.groups,
                personas=self._people(),
            )
            report = scenario.report()
            if report is not None:
                self._manifest["report"] = report.model_dump(mode="json", exclude_defaults=True)
            await self._tell(
                Status(
                    kind="started",
                    run=self._info.run,
                    name=self._info.name,
                    rounds=spec.rounds,
                    agents=spec.agents.count,
                    manifest=self._manifest,
                )
            )
            player = Player(
                world, scenario, self._tell, results_format=spec.results_format or "msgpack"
            )
            player.injections = self._injections = await self._events()
            # Of a life that goes on, once there is somebody to ask, and something to see.
            doors = Interviews(world), Inspections(world)

            async def open_doors() -> None:
                for door in doors:
                    await door.open()

            if commit is None:
                await open_doors()
            else:
                player.on_taken_up = open_doors
            player.strict = spec.replay is not None and spec.replay.strict
            player.on_uncommitted = self._not_durable
            player.must_commit = spec.durability in ("round", "call")
            commits = Commits(world, scenario, self._still_mine) if self._may_go_on else None
            try:
                await player.play(commits, commit)
            finally:
                self._records = player.records
                self._lost += world.lost
                self._manifest["workers_lost"] = self._lost
                if told := self._injections.told(player.number):
                    self._manifest["events"] = told
                if self._uncommitted:
                    self._manifest["not_durable"] = self._uncommitted
            if spec.profile:
                self._manifest["profile"] = await world.profile()

    async def _events(self) -> Injections:
        """What is injected, as far as it is known when a life begins."""
        run = self._info.run
        kept = await patiently(
            lambda: read_events(self._bus, self._subjects, run), "what was injected"
        )

        async def keep(name: str, event: PlannedEvent) -> None:
            await patiently(
                lambda: save_event(self._bus, self._subjects, run, name, event),
                "what is injected",
            )

        began = self._info.created
        return Injections(
            [event.model_copy() for event in self._spec.events],
            kept,
            keep,
            lambda: time.time() - began,
        )

    async def _still_mine(self) -> None:
        await check_player(self._bus, self._subjects, self._info)

    def _not_durable(self, why: str) -> None:
        self._uncommitted = self._info.not_durable = why

    def _people(self) -> str | None:
        """Where the agents' personas are.

        Raises:
            InvalidInputError: there are none of that name.
        """
        name = self._spec.agents.personas
        if name is None:
            return None
        folder = Path(self._spec.folder) if self._spec.folder else None
        return find_people(name, folder, self._settings.personas_dir)

    async def _check_models(self) -> None:
        """Reach every model before any agent is made.

        Raises:
            ScenarioError: one can't be reached.
            BusError: there is no model service.
        """
        for name, spec in self._spec.models.items():
            if spec.backend == "scripted" or spec.mixture is not None:
                continue
            if self._spec.replay is not None or self._spec.cache == "replay":
                continue  # nothing will be asked
            try:
                checked = await ask(
                    self._bus,
                    self._subjects.model_check,
                    CheckModel(spec=spec),
                    ModelChecked,
                    timeout=_CHECK_WITHIN,
                    patience=_MODEL_SERVICE_WITHIN,
                )
            except BusError as error:
                raise ScenarioError(f"models.{name}: no model service answers ({error})") from None
            if not checked.ok:
                raise ScenarioError(f"models.{name}: {checked.error}")
            self._reported[name] = checked.details
            context = checked.details.get("context")
            if spec.context is None and isinstance(context, int):
                # For the agents' side, which sums memories up; the pool's name must not change.
                self._contexts[name] = context

    def _describe(self, world: World) -> dict[str, Any]:
        """The parts of the manifest that are known when a run starts."""
        text = json.dumps(
            self._spec.model_dump(mode="json", exclude={"run", "folder", "results_format"}),
            sort_keys=True,
        )
        workers: dict[str, int] = {}
        for _, host in world._workers:
            workers[host] = workers.get(host, 0) + 1
        return {
            "scenario": self._spec.model_dump(mode="json", exclude_none=True),
            "scenario_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "seed": self._spec.seed,
            "life": self._info.life,
            **({} if self._spec.replay is None else {"replay": self._spec.replay.model_dump()}),
            "versions": {
                "populace": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in _PACKAGES},
            },
            "machine": {
                "name": self._settings.host,
                "system": platform.platform(),
                "cores": self._settings.cores,
                "memory": psutil.virtual_memory().total,
            },
            "models": {
                name: {
                    **spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
                    "reported": self._reported.get(name, {}),
                }
                for name, spec in self._spec.models.items()
            },
            "workers": workers,
            "scripted": sorted(
                name for name, m in self._spec.models.items() if m.backend == "scripted"
            ),
        }


def _code_versions(cls: type[Scenario]) -> dict[str, str]:
    """Which code is played: the hash of the scenario's module, and its Git commit, if any."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:
        return {}
    found = {"module_sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest()}
    commit = _git_commit(Path(file).resolve().parent)
    return {**found, "git_commit": commit} if commit else found


def _git_commit(folder: Path) -> str:
    """The commit that is checked out in a folder; empty if it isn't in a repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    asked = [git, "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True)
    except (subprocess.SubprocessError, OSError):
        return ""
    return told.stdout.strip()


def _described(error: Exception) -> str:
    """An exception as one sentence, with the place in the scenario's own code."""
    text = writable(" ".join(str(error).split()))
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).parts[-2:-1] not in (("populace",), ("director",)):
            where = f" ({Path(frame.filename).name}, line {frame.lineno})"
    return f"{type(error).__name__}: {text}{where}"


async def _main(settings: Settings, order: RunOrder, lifeline: int) -> int:
    bus = await NatsBus.connect(settings, settings.nats_url or DEFAULT_URL, process=new_id("run"))
    played = Run(settings, order, bus)
    run = asyncio.ensure_future(played.play())
    loop = asyncio.get_running_loop()
    heeded = False
    fetching: set[asyncio.Task[None]] = set()

    def heed(word: str) -> None:
        nonlocal heeded
        if word == "spread":
            played.spread()
            return
        if word.startswith("inject "):
            task = asyncio.ensure_future(played.inject(word.removeprefix("inject ")))
            fetching.add(task)
            task.add_done_callback(fetching.discard)
            return
        if not run.done() and not heeded:  # the first word counts; later ones find it leaving
            heeded = True
            played.heed(word)
            run.cancel()

    def listen() -> None:
        for line in os.fdopen(lifeline):
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(heed, line.strip())
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(heed, "")

    threading.Thread(target=listen, daemon=True).start()
    try:
        await run
    finally:
        await bus.drain()
    return 0


def live(order: str, lifeline: int, say: Callable[[str], None]) -> int:
    """Play a run, see ``nursery.Child``; the order is a ``RunOrder``."""
    say("")
    try:
        told = RunOrder.model_validate_json(order)
        return run_loop(_main(load_settings(), told, lifeline))
    except PopulaceError as error:
        _log.error(str(error))
        return 1
