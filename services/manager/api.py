"""The manager as JSON: what the pages show, and the same actions; described by OpenAPI."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from populace.runs import control, manage
from populace.runs import submit as submit_run
from shared.errors import BusError, InvalidInputError, PopulaceError, RemoteError
from shared.ids import check_token
from shared.messages.control import HostInfo
from shared.messages.scenario import (
    ManageRequest,
    PlannedEvent,
    ScenarioSpec,
)
from shared.service import first_problem

if TYPE_CHECKING:
    from services.manager.manager import Manager

_ACTIONS = ("cancel", "pause", "resume")
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
        "cores": sum(seen.info.cores for seen in hosts),
        "workers": sum(seen.info.workers for seen in hosts),
        "agents": sum(info.agents for info in running),
        "runs": len(watcher.runs),
        "running": len(running),
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
    progress = manager.watcher.progress.get(name)
    rows = list(progress.rows.values()) if progress is not None else []
    if recorded is not None and len(recorded["rounds"]) > len(rows):
        rows = recorded["rounds"]
    return {
        "run": name,
        "info": info.model_dump(mode="json") if info is not None else None,
        "rounds": rows,
        "now": progress.now if progress is not None else {},
        "manifest": recorded["manifest"] if recorded is not None else None,
    }


def pools(manager: Manager) -> list[dict[str, Any]]:
    """Model pools, as all model services have them."""
    found = []
    for number, told in enumerate(manager.watcher.services.get("models", [])):
        for name, pool in sorted(told.items()):
            if isinstance(pool, dict) and "slots" in pool:
                found.append({"service": number + 1, "pool": name, **pool})
    return found


# What can be done
async def act(manager: Manager, name: str, action: str, fields: dict[str, Any]) -> Told:
    """Cancel, pause or resume a run.

    Raises:
        PopulaceError: that is not possible; the text says why.
    """
    bus, settings = manager.bus, manager.settings
    check_token(name, "the run's name")
    info = manager.watcher.runs.get(name)
    if info is None:
        raise InvalidInputError(f"there is no run named {name!r}")
    if action == "resume" or (action == "cancel" and info.state == "paused"):
        rounds = fields.get("rounds")
        request = ManageRequest.model_validate(
            {"run": name, "action": action, "rounds": rounds or None}
        )
        reply = await manage(bus, settings, request)
    else:
        reply = await control(bus, settings, name, "pause" if action == "pause" else "cancel")
    await manager.watcher.refresh()
    return Told(run=name, state=reply.state)


async def inject(manager: Manager, name: str, event: PlannedEvent) -> Told:
    """Bring an event into a run.

    Raises:
        PopulaceError: that is not possible; the text says why.
    """
    check_token(name, "the run's name")
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


def routes(manager: Manager) -> list[web.RouteDef]:
    """The JSON interface."""

    async def overview_(_: web.Request) -> web.Response:
        return web.json_response(overview(manager))

    async def hosts_(_: web.Request) -> web.Response:
        return web.json_response(hosts(manager))

    async def runs_(request: web.Request) -> web.Response:
        return web.json_response(runs(manager, request.query.get("search", "")))

    async def run_(request: web.Request) -> web.Response:
        return web.json_response(await run(manager, request.match_info["run"]))

    async def pools_(_: web.Request) -> web.Response:
        return web.json_response(pools(manager))

    async def act_(request: web.Request) -> web.Response:
        name, action = request.match_info["run"], request.match_info["action"]
        told = await act(manager, name, action, await _fields(request))
        manager.audit(request, action, name)
        return web.json_response(told.model_dump())

    async def inject_(request: web.Request) -> web.Response:
        name = request.match_info["run"]
        event = PlannedEvent.model_validate(await _fields(request))
        told = await inject(manager, name, event)
        manager.audit(request, f"inject {event.name}", name)
        return web.json_response(told.model_dump())

    async def submit_(request: web.Request) -> web.Response:
        told = await submit(manager, ScenarioSpec.model_validate(await _fields(request)))
        manager.audit(request, "submit", told.run)
        return web.json_response(told.model_dump(), status=201)

    async def openapi_(_: web.Request) -> web.Response:
        return web.json_response(openapi())

    async def metrics_(_: web.Request) -> web.Response:
        return web.Response(text=metrics(manager), content_type="text/plain")

    return [
        web.get("/api/overview", overview_),
        web.get("/api/hosts", hosts_),
        web.get("/api/runs", runs_),
        web.post("/api/runs", submit_),
        web.get("/api/runs/{run}", run_),
        web.post(f"/api/runs/{{run}}/{{action:{'|'.join(_ACTIONS)}}}", act_),
        web.post("/api/runs/{run}/events", inject_),
        web.get("/api/pools", pools_),
        web.get("/api/openapi.json", openapi_),
        web.get("/metrics", metrics_),
    ]


async def _fields(request: web.Request) -> dict[str, Any]:
    if not request.can_read_body:
        return {}
    try:
        found = json.loads(await request.text())
    except ValueError:
        raise InvalidInputError("the request's body is no JSON") from None
    if not isinstance(found, dict):
        raise InvalidInputError("the request's body must be a JSON object")
    return found


@web.middleware
async def errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn what is wrong with a request into an answer."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except ValidationError as error:
        status, why = 422, first_problem(error)
    except (InvalidInputError, RemoteError) as error:
        status, why = 422, str(error)
    except BusError as error:
        status, why = 503, f"the broker or a service does not answer: {error}"
    except PopulaceError as error:
        status, why = 500, str(error)
    if request.path.startswith("/api/"):
        return web.json_response({"error": why}, status=status)
    return web.Response(status=status, text=f"{why}\n")


def openapi() -> dict[str, Any]:
    """The description of the interface."""

    def got(what: str) -> dict[str, Any]:
        return {"get": {"summary": what, "responses": {"200": {"description": what}}}}

    def done(what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answers = {"200": {"description": what}, "422": {"description": "not possible; says why"}}
        found: dict[str, Any] = {"summary": what, "responses": answers}
        if body is not None:
            found["requestBody"] = {"content": {"application/json": {"schema": body}}}
        return {"post": found}

    scenario = ScenarioSpec.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = scenario.pop("$defs", {})
    rounds = {"type": "object", "properties": {"rounds": {"type": "integer"}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Populace manager", "version": "1"},
        "components": {
            "schemas": {**parts, "ScenarioSpec": scenario},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
        "paths": {
            "/api/overview": got("hosts, workers, agents, runs, queues, broker, at a glance"),
            "/api/hosts": got("machines that run agents or environments"),
            "/api/pools": got("model pools: slots, queue, latency, failures"),
            "/api/runs": {
                **got("runs, latest first; ?search= in names and states"),
                **done("start a run", {"$ref": "#/components/schemas/ScenarioSpec"}),
            },
            "/api/runs/{run}": got("a run's state, rounds, manifest"),
            "/api/runs/{run}/cancel": done("end a run"),
            "/api/runs/{run}/pause": done("stop a run where it is"),
            "/api/runs/{run}/resume": done("go on with a run", rounds),
            "/api/runs/{run}/events": done(
                "bring an event into a run", {"$ref": "#/components/schemas/PlannedEvent"}
            ),
            "/metrics": got("the same for Prometheus"),
        },
    }


def metrics(manager: Manager) -> str:
    """What Prometheus takes."""
    told = overview(manager)
    lines = []

    def gauge(name: str, about: str, values: dict[str, float]) -> None:
        lines.append(f"# HELP populace_{name} {about}")
        lines.append(f"# TYPE populace_{name} gauge")
        lines.extend(f"populace_{name}{labels} {value:g}" for labels, value in values.items())

    gauge("broker_up", "Whether the broker answers.", {"": float(told["broker"] == "up")})
    for name, about in (
        ("hosts", "Agent hosts that are there."),
        ("workers", "Worker processes that runs have."),
        ("agents", "Agents of runs under way."),
        ("queued", "Messages of prompts that wait or are under way."),
    ):
        gauge(name, about, {"": float(told[name])})
    states: dict[str, float] = {}
    for info in manager.watcher.runs.values():
        label = f'{{state="{info.state}"}}'
        states[label] = states.get(label, 0.0) + 1
    gauge("runs", "Runs on record, by state.", states)
    services = {f'{{service="{n}"}}': float(count) for n, count in told["services"].items()}
    gauge("services", "Instances that answer.", services)
    for part in ("slots", "under_way", "answered", "failed"):
        values = {
            f'{{pool="{p["pool"]}",service="{p["service"]}"}}': float(p.get(part) or 0)
            for p in pools(manager)
        }
        gauge(f"pool_{part}", f"Of a model pool: {part.replace('_', ' ')}.", values)
    lines.append(f"# generated at {time.time():.0f}")
    return "\n".join(lines) + "\n"
