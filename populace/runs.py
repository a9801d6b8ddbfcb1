"""Handing scenarios in, following runs, asking their directors: for whoever has a connection."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from populace.errors import ScenarioError
from shared.bus import Bus, Entry, NatsBus
from shared.codec import CONTENT_TYPE, MSGPACK_TYPE, from_public, pack_plain
from shared.errors import (
    BusUnavailableError,
    InvalidInputError,
    NoRespondersError,
    PopulaceError,
    RemoteError,
)
from shared.messages.scenario import (
    ControlReply,
    ControlRequest,
    ManageRequest,
    PlannedEvent,
    RoundRow,
    RunInfo,
    RunState,
    ScenarioSpec,
    Status,
    Submitted,
)
from shared.service import ask
from shared.settings import Settings

_SUBMIT_WITHIN = 15.0
_STORED_WITHIN = 90.0
"""Seconds for a director to have a scenario kept: a cluster without a leader takes its time."""
_RECORDED_WITHIN = 60.0
_UNKNOWN_AFTER = 3.0
_TAKEN_WITHIN = 60.0
_BROKER_AWAY = 15.0


@dataclass
class Outcome:
    """What became of a run, as far as it was followed."""

    run: str
    name: str = ""
    state: RunState | None = None
    reason: str = ""
    rows: list[RoundRow] = field(default_factory=list)
    records: int | None = None
    folder: str | None = None
    agents: int = 0
    rounds: int = 0
    missing: int = 0
    """Answers that were gone from the stream before they could be written."""
    events_missing: int = 0
    """The same of environments' events, where they are recorded."""
    unrecorded: str = ""
    """Why its files could not be written, if they could not."""
    scripted: list[str] = field(default_factory=list)
    """Names of the models that are scripts."""
    profile: dict[str, Any] | None = None
    """Where the time went, if that was measured."""

    def take(self, status: Status) -> None:
        """Note what a status event says."""
        self.name = status.name or self.name
        self.rounds = status.rounds or self.rounds
        if status.kind in ("accepted", "started"):
            self.agents = status.agents or self.agents
        if status.manifest:
            self.scripted = status.manifest.get("scripted", self.scripted)
            self.profile = status.manifest.get("profile", self.profile)
        if status.row is not None:  # a round that was played again is told again
            self.rows = [row for row in self.rows if row.round != status.row.round]
            self.rows.append(status.row)
        if status.kind == "restored":
            self.state, self.reason = None, ""
            self.rows = [row for row in self.rows if row.round <= (status.round or 0)]
        elif status.kind in ("ended", "paused"):
            self.state, self.reason = status.state, status.reason or ""
        elif status.kind == "recorded":
            self.records, self.folder = status.records, status.folder
            self.unrecorded = status.reason or ""
            self.missing, self.events_missing = status.missing or 0, status.events_missing or 0


async def submit(bus: NatsBus, settings: Settings, spec: ScenarioSpec) -> str:
    """Hand a scenario to a director; returns the run's name.

    Raises:
        ScenarioError: the director refused it.
        PopulaceError: no director answers.
    """
    data = pack_plain(spec.model_dump(mode="json", exclude_none=True))
    deadline = time.monotonic() + _SUBMIT_WITHIN
    while True:
        try:
            answer = await bus.request(
                settings.subjects.scenario_submit,
                data,
                timeout=_STORED_WITHIN,
                headers={CONTENT_TYPE: MSGPACK_TYPE},
            )
            break
        except NoRespondersError:
            if time.monotonic() > deadline:
                raise NoRespondersError(
                    "no director answers; see 'populace status', and start the services with "
                    "'populace up' (after 'populace down', if some of them have ended)"
                ) from None
            await asyncio.sleep(0.2)
    reply = Submitted.model_validate(from_public(answer.data, answer.header(CONTENT_TYPE)))
    if reply.run is None:
        raise ScenarioError(reply.error or "the director refused the scenario")
    return reply.run


async def control(
    bus: NatsBus,
    settings: Settings,
    run: str,
    action: Literal["cancel", "pause", "inject", "spread"],
    *,
    event: PlannedEvent | None = None,
) -> ControlReply:
    """Ask a run's director to end or pause it, to bring an event in, or to spread it anew.

    Raises:
        RemoteError: it is over.
        BusError: its director does not answer.
    """
    request = ControlRequest(action=action, event=event)
    subject = settings.subjects.run_control(run)
    return await ask(bus, subject, request, ControlReply, timeout=5, patience=5)


async def manage(bus: NatsBus, settings: Settings, request: ManageRequest) -> ControlReply:
    """Ask any director to resume a run, or to end one that nobody plays.

    Raises:
        InvalidInputError: that is not possible; the text says why.
        BusError: no director answers.
    """
    try:
        return await ask(
            bus, settings.subjects.run_manage, request, ControlReply, timeout=30, patience=10
        )
    except RemoteError as error:
        raise InvalidInputError(str(error)) from None


async def find_run(bus: NatsBus, settings: Settings, run: str) -> RunInfo | None:
    """A run's latest state, or None."""
    bucket = await bus.bucket(settings.subjects.bucket_runs)
    entry = await bucket.get(run)
    return None if entry is None else RunInfo.model_validate_json(entry.value)


async def find_spec(bus: NatsBus, settings: Settings, run: str) -> ScenarioSpec:
    """The scenario of a run.

    Raises:
        InvalidInputError: it isn't kept.
    """
    bucket = await bus.bucket(settings.subjects.bucket_specs)
    entry = await bucket.get(run)
    if entry is None:
        raise InvalidInputError(f"the broker keeps no scenario of a run {run!r}")
    spec = ScenarioSpec.model_validate_json(entry.value)
    # With what was injected, in the rounds that it was.
    planned = {f"planned-{i}": event for i, event in enumerate(spec.events)}
    for entry in await bucket.entries(f"{run}.>"):
        name = entry.key.removeprefix(f"{run}.")
        event = PlannedEvent.model_validate_json(entry.value)
        # What came by hand and was refused, or found no round any more, was not part of the run.
        if name in planned or (event.round is not None and not event.refused):
            planned[name] = event
    spec.events = sorted(planned.values(), key=lambda event: event.time)
    return spec


async def follow(
    bus: NatsBus,
    settings: Settings,
    run: str,
    *,
    submitted: bool = False,
    life: int | None = None,
) -> AsyncIterator[Status | None]:
    """The run's status events from its beginning; ends once it is recorded, or paused.

    With a ``life``, what happened before that one began is left out.

    Yields None about once a second while nothing happens. A run that was ``submitted`` just now
    is stored, and may wait for a director before anything is known of it.

    Raises:
        PopulaceError: there is no such run, or it ended and was never recorded.
    """
    began = time.monotonic()
    ended: float | None = None
    away: float | None = None
    seen = False
    still, last = False, 1
    subjects = settings.subjects
    async for message in bus.replay(subjects.stream_runs, (subjects.run_status(run),), idle=1.0):
        if message is None:
            if bus.connected:
                away = None
            else:
                away = away or time.monotonic()
                if time.monotonic() - away > _BROKER_AWAY:
                    raise BusUnavailableError(
                        f"the broker has been away for {_BROKER_AWAY:g} s; what the run {run!r} "
                        "had published is kept in its streams"
                    )
            patience = _TAKEN_WITHIN if submitted else _UNKNOWN_AFTER
            patient = seen or time.monotonic() - began < patience
            if not patient and submitted:
                raise NoRespondersError(
                    f"no director has taken the run {run!r} within {patience:g} s; it is stored, "
                    "and will be played once one does"
                )
            if not patient:
                info = await find_run(bus, settings, run)
                if info is None:
                    raise InvalidInputError(f"there is no run named {run!r}; see 'populace runs'")
                if not seen and info.over:  # what was told of it has left the stream by now
                    for status in _remembered(settings, info):
                        yield status
                    return
            if still:
                info = await find_run(bus, settings, run)
                if info is None or info.state not in ("accepted", "running"):
                    return
            if ended is not None and time.monotonic() - ended > _RECORDED_WITHIN:
                raise PopulaceError(
                    f"the run {run!r} is over, but no recorder wrote it within "
                    f"{_RECORDED_WITHIN:g} s; its records are kept in the stream"
                )
            yield None
            continue
        seen = True
        status = Status.model_validate_json(message.data)
        if life is not None:
            if status.kind != "restored" or (status.life or 1) < life:
                if status.kind == "accepted":
                    yield status
                continue
            life = None
        if status.kind == "ended":
            ended, last = time.monotonic(), status.life or 1
        if status.kind == "restored":
            ended = None
        # It may have been taken up again since: then there is more to come.
        still = status.kind in ("paused", "recorded")
        yield status
        if status.kind == "recorded":
            info = await find_run(bus, settings, run)
            if info is None or (info.over and last >= info.life):
                return


def _remembered(settings: Settings, info: RunInfo) -> Iterator[Status]:
    """What is known of a run that is over from its entry, and from its files if they lie here."""
    folder = settings.runs_dir.resolve() / info.run
    try:
        rows = json.loads((folder / "rounds.json").read_text())
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        rows, manifest = [], None
    about: dict[str, Any] = {
        "run": info.run,
        "name": info.name,
        "rounds": info.rounds,
        "agents": info.agents,
    }
    yield Status(kind="accepted", time=info.created, **about)
    for row in rows:
        yield Status(kind="round_finished", row=RoundRow.model_validate(row), **about)
    yield Status(
        kind="ended",
        life=info.life,
        state=info.state,
        reason=info.reason,
        manifest=manifest,
        **about,
    )
    if manifest is None:
        why = f"it is not in {folder.parent}"
        yield Status(kind="recorded", folder=str(folder), reason=why, **about)
        return
    count = int(manifest.get("answers") or 0) + int(manifest.get("failed") or 0)
    missing = manifest.get("missing")
    yield Status(kind="recorded", folder=str(folder), records=count, missing=missing, **about)


async def list_runs(bus: NatsBus, settings: Settings) -> list[RunInfo]:
    """All runs that the installation knows, latest first."""
    bucket = await bus.bucket(settings.subjects.bucket_runs)
    found = [RunInfo.model_validate_json(e.value) for e in await bucket.entries()]
    return sorted(found, key=lambda info: -info.created)


async def forget_run(bus: Bus, settings: Settings, run: str) -> None:
    """Remove all that the broker keeps of a run.

    Raises:
        BusError: it can't be removed.
    """
    subjects = settings.subjects
    specs = await bus.bucket(subjects.bucket_specs)
    account = _account(await specs.get(run))
    for stream, subject in (
        (subjects.stream_states, subjects.run_state(run)),
        (subjects.stream_kept, subjects.model_kept(run)),
        (subjects.stream_journal, subjects.env_journal(run, ">")),
        (subjects.stream_events, subjects.env_event(run, "*", ">")),
        (subjects.stream_runs, subjects.run_results(run)),
        (subjects.stream_runs, subjects.run_messages(run)),
        (subjects.stream_models, subjects.model_queue("*", run)),
        (subjects.stream_runs, subjects.run_status(run)),
    ):
        await bus.purge(stream, subject)
    await bus.drop_consumers(subjects.stream_events, subjects.listener(run))
    for name, pattern in (
        (subjects.bucket_usage, f"{run}.>"),
        (subjects.bucket_placement, f"{run}.>"),
        (subjects.bucket_budgets, run),
        (subjects.bucket_specs, run),
        (subjects.bucket_specs, f"{run}.>"),
        (subjects.bucket_runs, run),
    ):
        bucket = await bus.bucket(name)
        for entry in await bucket.entries(pattern):
            await bucket.delete(entry.key)
    if account is None or account in map(_account, await specs.entries("*")):
        return
    await (await bus.bucket(subjects.bucket_budgets)).delete(account)  # nobody shares it any more


def _account(entry: Entry | None) -> str | None:
    """The account that a run's budget is shared under, as its scenario is kept."""
    if entry is None:
        return None
    try:
        budget = json.loads(entry.value).get("budget") or {}
    except ValueError:
        return None
    return budget.get("account")
