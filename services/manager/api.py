"""The manager as JSON: what the pages show, and the same actions; described by OpenAPI."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from populace.interviews import InterviewRequest
from services.manager import installation
from services.manager.answers import Filter
from services.manager.auth import operators_only
from services.manager.metrics import metrics
from services.manager.openapi import openapi
from shared.codec import to_json
from shared.errors import InvalidInputError
from shared.messages.control import HostChange
from shared.messages.persona import EnrichRequest, SampleRequest
from shared.messages.scenario import PlannedEvent, ScenarioSpec

if TYPE_CHECKING:
    from services.manager.manager import Manager

Handler = Callable[[web.Request], Awaitable[web.Response]]
KINDS = ("agents", "environments")


def routes(manager: Manager) -> list[web.RouteDef]:
    """The JSON interface."""
    return [*_looking(manager), *_doing(manager)]


def _answer(found: Any, status: int = 200) -> web.Response:
    if hasattr(found, "model_dump"):
        found = found.model_dump(mode="json")
    return web.json_response(found, status=status, dumps=dumps)


def dumps(value: Any) -> str:
    """JSON; numbers that it lacks become null."""
    return to_json(value).decode()


def filters_of(query: Any) -> list[Filter]:
    """Conditions as an address holds them: ``column``, ``op`` and ``value``, each repeated."""
    rows = zip(
        query.getall("column", []), query.getall("op", []), query.getall("value", []), strict=False
    )
    return [Filter(column, op, value) for column, op, value in rows if column and value != ""]


def number_of(query: Any, name: str, default: int = 0) -> int:
    """A whole number of an address.

    Raises:
        InvalidInputError: it is none, or below 0.
    """
    text = query.get(name, "") or str(default)
    if not text.isdecimal() or len(text) > 12:
        raise InvalidInputError(f"{name} must be a whole number, not {text!r}")
    return int(text)


def _looking(manager: Manager) -> list[web.RouteDef]:
    async def overview(_: web.Request) -> web.Response:
        return _answer(installation.overview(manager))

    async def hosts(_: web.Request) -> web.Response:
        return _answer(installation.hosts(manager))

    async def host(request: web.Request) -> web.Response:
        lines = min(1000, number_of(request.query, "lines", 100))
        name, kind = request.match_info["host"], request.match_info["kind"]
        return _answer(await manager.hosting.detail(name, kind, lines))

    async def runs(request: web.Request) -> web.Response:
        return _answer(installation.runs(manager, request.query.get("search", "")))

    async def run(request: web.Request) -> web.Response:
        return _answer(await installation.run(manager, request.match_info["run"]))

    async def usage(request: web.Request) -> web.Response:
        run = manager.known(request.match_info["run"])
        return _answer(await installation.usage(manager, [run]))

    async def agents(request: web.Request) -> web.Response:
        query = request.query
        found = await manager.agents.page(
            request.match_info["run"],
            query.get("population", ""),
            filters_of(query),
            query.get("sort", ""),
            number_of(query, "start"),
        )
        return _answer(found)

    async def agent(request: web.Request) -> web.Response:
        return _answer(await manager.agents.one(request.match_info["run"], _agent(request)))

    async def exchanges(request: web.Request) -> web.Response:
        run = manager.known(request.match_info["run"])
        return _answer(await manager.agents.exchanges(run, _agent(request)))

    async def environments(request: web.Request) -> web.Response:
        run = manager.known(request.match_info["run"])
        return _answer(await manager.environments.tree(run))

    async def environment(request: web.Request) -> web.Response:
        match = request.match_info
        return _answer(await manager.environments.one(match["run"], match["path"]))

    async def files(request: web.Request) -> web.Response:
        return _answer(manager.records.files(manager.known(request.match_info["run"])))

    async def file(request: web.Request) -> web.StreamResponse:
        return await manager.records.download(request.match_info["run"], request.match_info["name"])

    async def compare(request: web.Request) -> web.Response:
        match = request.match_info
        return _answer(await manager.records.compare(match["run"], match["other"]))

    async def pools(_: web.Request) -> web.Response:
        return _answer(installation.pools(manager))

    async def people(_: web.Request) -> web.Response:
        return _answer(await manager.people.all())

    async def some_people(request: web.Request) -> web.Response:
        seed = number_of(request.query, "seed")
        return _answer(await manager.people.one(request.match_info["name"], seed))

    async def scenarios(_: web.Request) -> web.Response:
        return _answer(await manager.scenarios.all())

    async def scenario(request: web.Request) -> web.Response:
        operators_only()
        return _answer(await manager.scenarios.describe(request.match_info["file"]))

    async def described(_: web.Request) -> web.Response:
        return web.json_response(openapi())

    async def metrics_(_: web.Request) -> web.Response:
        return web.Response(text=metrics(manager), content_type="text/plain")

    return [
        web.get("/api/overview", overview),
        web.get("/api/hosts", hosts),
        web.get(f"/api/hosts/{{host}}/{{kind:{'|'.join(KINDS)}}}", host),
        web.get("/api/runs", runs),
        web.get("/api/runs/{run}", run),
        web.get("/api/runs/{run}/usage", usage),
        web.get("/api/runs/{run}/agents", agents),
        web.get("/api/runs/{run}/agents/{population}/{number}", agent),
        web.get("/api/runs/{run}/agents/{population}/{number}/exchanges", exchanges),
        web.get("/api/runs/{run}/environments", environments),
        web.get("/api/runs/{run}/environments/{path}", environment),
        web.get("/api/runs/{run}/files", files),
        web.get("/api/runs/{run}/files/{name}", file),
        web.get("/api/runs/{run}/compare/{other}", compare),
        web.get("/api/pools", pools),
        web.get("/api/people", people),
        web.get("/api/people/{name}", some_people),
        web.get("/api/scenarios", scenarios),
        web.get("/api/scenarios/{file:.+}", scenario),
        web.get("/api/openapi.json", described),
        web.get("/metrics", metrics_),
    ]


def _agent(request: web.Request) -> str:
    return f"{request.match_info['population']}/{request.match_info['number']}"


def _doing(manager: Manager) -> list[web.RouteDef]:
    async def act(request: web.Request) -> web.Response:
        name, action = request.match_info["run"], request.match_info["action"]
        told = await installation.act(manager, name, action, await _fields(request))
        manager.audit(request, action, name)
        return _answer(told)

    async def inject(request: web.Request) -> web.Response:
        name = request.match_info["run"]
        event = PlannedEvent.model_validate(await _fields(request))
        told = await installation.inject(manager, name, event)
        manager.audit(request, f"inject {event.name}", name)
        return _answer(told)

    async def interview(request: web.Request) -> web.Response:
        name = request.match_info["run"]
        asked = InterviewRequest.model_validate(await _fields(request))
        told = await manager.interviews.ask(name, asked)
        manager.audit(request, f"interview {', '.join(asked.agents[:5])}", name)
        return _answer(told)

    async def submit(request: web.Request) -> web.Response:
        spec = ScenarioSpec.model_validate(await _fields(request))
        told = await installation.submit(manager, spec)
        manager.audit(request, "submit", told.run)
        return _answer(told, 201)

    async def clean_up(request: web.Request) -> web.Response:
        name = request.match_info["run"]
        host = (await _fields(request)).get("host")
        told = await manager.hosting.clean_up(name, None if host is None else str(host))
        manager.audit(request, "clean up", name)
        return _answer(told)

    async def delete(request: web.Request) -> web.Response:
        name = request.match_info["run"]
        await manager.records.delete(name)
        manager.audit(request, "delete", name)
        return _answer({"run": name})

    async def change(request: web.Request) -> web.Response:
        host, kind = request.match_info["host"], request.match_info["kind"]
        change = HostChange.model_validate(await _fields(request))
        fields = change.model_dump(exclude_none=True)
        if not fields:
            raise InvalidInputError("say what is to change: draining, or per_run")
        told = await manager.hosting.change(host, kind, change.draining, change.per_run)
        manager.audit(request, f"change {json.dumps(fields)}", host)
        return _answer(told)

    async def stop(request: web.Request) -> web.Response:
        host, kind = request.match_info["host"], request.match_info["kind"]
        worker = str((await _fields(request)).get("worker", ""))
        told = await manager.hosting.stop_worker(host, kind, worker)
        manager.audit(request, f"stop {worker}", host)
        return _answer(told)

    async def write(request: web.Request) -> web.Response:
        asked = EnrichRequest.model_validate(await _fields(request))
        told = await manager.people.write(asked)
        manager.audit(request, "write people", asked.name)
        return _answer(told, 202)

    async def draw(request: web.Request) -> web.Response:
        asked = SampleRequest.model_validate(await _fields(request))
        told = await manager.people.draw(asked, replace="replace" in request.query)
        manager.audit(request, "draw people", str(asked.store))
        return _answer(told, 201)

    async def cancel_writing(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        told = await manager.people.cancel(name)
        manager.audit(request, "stop writing people", name)
        return _answer(told)

    host = f"/api/hosts/{{host}}/{{kind:{'|'.join(KINDS)}}}"
    return [
        web.post("/api/runs", submit),
        web.post(f"/api/runs/{{run}}/{{action:{'|'.join(installation.ACTIONS)}}}", act),
        web.post("/api/runs/{run}/events", inject),
        web.post("/api/runs/{run}/interview", interview),
        web.post("/api/runs/{run}/clean-up", clean_up),
        web.delete("/api/runs/{run}", delete),
        web.post(f"{host}/change", change),
        web.post(f"{host}/stop", stop),
        web.post("/api/people/write", write),
        web.post("/api/people/draw", draw),
        web.post("/api/people/{name}/cancel", cancel_writing),
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
