"""What there is in an installation, in plain values, and what can be done to runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from populace.models.accounts import Accounts, Usage
from populace.runs import control, manage
from populace.runs import submit as submit_run
from shared.errors import BusError, InvalidInputError
from shared.ids import check_token
from shared.messages.control import HostInfo
from shared.messages.scenario import ManageRequest, PlannedEvent, ScenarioSpec

if TYPE_CHECKING:
    from services.manager.manager import Manager
    from services.manager.watcher import Progress

ACTIONS = ("cancel", "pause", "resume", "spread")
_LOOKS, _LOOK_EVERY = 30, 0.1


class Told(BaseModel):
    """What came of an action."""

    run: str
    state: str | None = None


# What there is
def overview(manager: Manager) -> dict[str, Any]:
    """At a glance."""
    watcher = manager.watcher
    hosts = [seen for seen in watcher.hosts.values() if seen.here]
    running = [info for info in watcher.runs.values() if info.state == "running"]
    return {
        "broker": watcher.broker,
        "looked_at": watcher.looked_at,
        "hosts": len(hosts),
        "hosts_gone": sum(not seen.here for seen in watcher.hosts.values()),
        "hosts_draining": sum(seen.info.draining for seen in hosts),
        "cores": sum(seen.info.cores for seen in hosts),
        "workers": sum(seen.info.workers for seen in hosts),
        "agents": sum(info.agents for info in running),
        "runs": len(watcher.runs),
        "running": len(running),
        "looks_failed": watcher.problem,
        "services": {name: len(held) for name, held in watcher.services.items()},
        "queued": sum(pool["queued"] for pool in pools(manager)),
    }


def hosts(manager: Manager) -> list[dict[str, Any]]:
    """Machines that run agents or environments."""

    def row(info: HostInfo, kind: str, here: bool, heard: float) -> dict[str, Any]:
        return {**info.model_dump(mode="json"), "kind": kind, "here": here, "heard": heard}

    watcher = manager.watcher
    found = [row(s.info, "agents", s.here, s.heard) for s in watcher.hosts.values()]
    found += [row(s.info, "environments", s.here, s.heard) for s in watcher.keepers.values()]
    return sorted(found, key=lambda r: (not r["here"], r["host"], r["kind"]))


def runs(manager: Manager, search: str = "") -> list[dict[str, Any]]:
    """Runs, latest first; those whose name holds a text."""
    wanted = search.lower()
    found = [
        info.model_dump(mode="json")
        for info in manager.watcher.runs.values()
        if wanted in info.run.lower() or wanted in info.name.lower() or wanted == info.state
    ]
    return sorted(found, key=lambda r: -r["created"])


async def run(manager: Manager, name: str) -> dict[str, Any]:
    """One run: its state, its rounds, the round under way.

    Raises:
        InvalidInputError: there is none of that name.
    """
    info = manager.watcher.runs.get(name)
    recorded = await manager.recorded(check_token(name, "the run's name"))
    if info is None and recorded is None:
        raise InvalidInputError(f"there is no run named {name!r}")
    try:
        progress = await manager.watcher.catch_up(name)
    except BusError:  # what is known so far is shown
        progress = manager.watcher.progress.get(name)
    rows = list(progress.rows.values()) if progress is not None else []
    if recorded is not None and len(recorded["rounds"]) > len(rows):
        rows = recorded["rounds"]
    told = info.model_dump(mode="json") if info is not None else None
    if told is not None and rows and manager.is_live(name):  # rounds are heard of before it is
        told["rounds_done"] = max(told["rounds_done"], rows[-1]["round"])
        told["state"] = "running"
    return {
        "run": name,
        "info": told,
        "rounds": rows,
        "now": progress.now if progress is not None else {},
        "manifest": recorded["manifest"] if recorded is not None else None,
        "lines": _lines(progress, recorded),
    }


async def events(manager: Manager, name: str) -> list[dict[str, Any]]:
    """What was brought into a run, or will be, in order.

    Raises:
        BusError: the broker does not answer.
    """
    bucket = await manager.bus.bucket(manager.settings.subjects.bucket_specs)
    found: list[PlannedEvent] = []
    for entry in await bucket.entries(f"{name}.>"):
        with contextlib.suppress(ValueError):  # of another version, say
            found.append(PlannedEvent.model_validate_json(entry.value))
    spec = await manager.spec(name)
    told = {(event.name, repr(event.data)) for event in found}
    # Those of the scenario's file are kept there too, once their rounds are known.
    found += [e for e in (spec.events if spec else ()) if (e.name, repr(e.data)) not in told]
    return [event.model_dump(mode="json") for event in sorted(found, key=lambda e: e.time)]


def _lines(progress: Progress | None, recorded: dict[str, Any] | None) -> list[str]:
    """Which of the recorded numbers a chart shows at first: those of the scenario's report."""
    if progress is not None and progress.lines:
        return progress.lines
    report = (recorded or {}).get("manifest", {}).get("report") or {}
    return [str(name) for name in report.get("lines", ())]


def pools(manager: Manager) -> list[dict[str, Any]]:
    """Model pools, as all model services have them."""
    found = []
    for number, told in enumerate(manager.watcher.services.get("models", [])):
        for name, pool in sorted(told.items()):
            if isinstance(pool, dict) and "slots" in pool:
                rate = manager.watcher.rates.get((number, name), 0.0)
                found.append({"service": number + 1, "pool": name, "rate": rate, **pool})
    return found


async def usage(manager: Manager, names: list[str]) -> list[dict[str, Any]]:
    """What runs asked of models and what it cost, by run.

    Raises:
        BusError: the broker does not answer.
    """
    bucket = await manager.bus.bucket(manager.settings.subjects.bucket_usage)
    found = []
    for name in names:
        check_token(name, "the run's name")
        accounts = Accounts()
        entries = await bucket.entries(f"{name}.>")
        for entry in entries:
            accounts.take_json(entry.value)
        if entries:
            nothing = dataclasses.asdict(Usage())
            models = {one: {**nothing, **sums} for one, sums in accounts.by_model().items()}
            found.append({"run": name, "models": models, **dataclasses.asdict(accounts.total())})
    return found


# What can be done
async def act(manager: Manager, name: str, action: str, fields: dict[str, Any]) -> Told:
    """Cancel, pause, resume a run, or spread it over the hosts anew.

    Raises:
        PopulaceError: that is not possible; the text says why.
    """
    bus, settings = manager.bus, manager.settings
    check_token(name, "the run's name")
    info = manager.watcher.runs.get(name)
    if info is None:
        raise InvalidInputError(f"there is no run named {name!r}")
    if action != "resume" and (info.over or (info.state == "paused" and action != "cancel")):
        raise InvalidInputError(f"the run {name!r} is {info.state}: {action} means nothing now")
    if action == "resume" or (action == "cancel" and info.state == "paused"):
        rounds = fields.get("rounds")
        request = ManageRequest.model_validate(
            {"run": name, "action": action, "rounds": rounds or None}
        )
        reply = await manage(bus, settings, request)
    else:
        asked: Literal["cancel", "pause", "spread"] = "cancel"
        if action in ("pause", "spread"):
            asked = "pause" if action == "pause" else "spread"
        reply = await control(bus, settings, name, asked)
    await manager.watcher.refresh()
    return Told(run=name, state=reply.state)


async def inject(manager: Manager, name: str, event: PlannedEvent) -> Told:
    """Bring an event into a run.

    Raises:
        PopulaceError: that is not possible; the text says why.
    """
    info = manager.watcher.runs.get(check_token(name, "the run's name"))
    if info is None or info.state not in ("accepted", "running"):
        raise InvalidInputError(f"the run {name!r} is not under way: nothing can be brought in")
    reply = await control(manager.bus, manager.settings, name, "inject", event=event)
    return Told(run=name, state=reply.state)


async def submit(manager: Manager, spec: ScenarioSpec) -> Told:
    """Hand a scenario to a director.

    Raises:
        PopulaceError: it was refused, or nobody answers.
    """
    name = await submit_run(manager.bus, manager.settings, spec)
    await _appear(manager, name)
    return Told(run=name, state="accepted")


async def _appear(manager: Manager, run: str) -> None:
    """Wait a moment until a director has taken a run that was just stored."""
    for _ in range(_LOOKS):
        await manager.watcher.refresh()
        if run in manager.watcher.runs:
            return
        await asyncio.sleep(_LOOK_EVERY)
