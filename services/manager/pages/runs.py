"""A run: its rounds live, what can be done to it, its files, its comparison with others."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from aiohttp import web
from pydantic import ValidationError

from services.manager import installation
from services.manager.forms import read_yaml
from services.manager.pages.rendering import Rendering
from shared.errors import BusError, InvalidInputError, PopulaceError
from shared.messages.scenario import PlannedEvent
from shared.problems import first_problem

_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
"""Of the report: it holds its styles and figures itself, and runs nothing."""
_MOST_ROUNDS_SHOWN = 200
_MOST_POINTS = 1000


def routes(rendering: Rendering) -> list[web.RouteDef]:
    """Paths and what answers them."""
    manager = rendering.manager

    async def run(request: web.Request) -> web.Response:
        return await show(request)

    async def show(
        request: web.Request, problem: str = "", given: dict[str, str] | None = None
    ) -> web.Response:
        name = request.match_info["run"]
        try:
            it = await installation.run(manager, name)
        except InvalidInputError as error:
            raise web.HTTPNotFound(text=f"{error}") from None
        names = list(dict.fromkeys(n for row in it["rounds"] for n in row["values"]))
        plain = [n for n in names if not _is_nested(it["rounds"], n)]
        try:
            usage = await installation.usage(manager, [name])
            events = await installation.events(manager, name)
        except BusError:
            usage, events = [], []
        personas = await manager.agents.personas(name)
        by = request.query.get("by", "")
        return rendering.page(
            request,
            "run",
            422 if problem else 200,
            tab="runs",
            part="progress",
            it=it,
            names=plain,
            chart={**chart(it["rounds"], plain), "main": it["lines"]},
            groups=personas,
            by=by,
            group_chart=await grouped(name, by, personas) if by else None,
            rows=it["rounds"][-_MOST_ROUNDS_SHOWN:],
            left_out=max(0, len(it["rounds"]) - _MOST_ROUNDS_SHOWN),
            usage=usage[0] if usage else None,
            files=manager.records.files(name),
            events=events,
            given=given or {},
            at=f"/runs/{name}" + (f"?by={quote(by)}" if by else ""),
            problem=problem,
        )

    async def grouped(name: str, by: str, personas: list[str]) -> dict[str, Any]:
        found = await manager.agents.by_group(name, by) if by in personas else None
        return found or {"rounds": [], "lines": {}}

    async def act(request: web.Request) -> web.Response:
        name, action = request.match_info["run"], request.match_info["action"]
        rounds = str((await request.post()).get("rounds", ""))
        try:
            if rounds and not rounds.isdecimal():
                raise InvalidInputError(f"rounds must be a whole number, not {rounds!r}")
            fields = {"rounds": int(rounds)} if rounds else {}
            await installation.act(manager, name, action, fields)
        except ValidationError as error:
            return await show(request, first_problem(error))
        except PopulaceError as error:
            return await show(request, str(error))
        manager.audit(request, action, name)
        raise rendering.done(f"/runs/{name}", f"Asked for: {action}")

    async def inject(request: web.Request) -> web.Response:
        name = request.match_info["run"]
        given = {key: str(value) for key, value in (await request.post()).items()}
        try:
            data = await read_yaml(given.get("data", ""), "what belongs to it") or {}
            event = PlannedEvent(name=given.get("name", ""), data=data)
            await installation.inject(manager, name, event)
        except ValidationError as error:
            return await show(request, first_problem(error), given)
        except PopulaceError as error:
            return await show(request, str(error), given)
        manager.audit(request, f"inject {event.name}", name)
        raise rendering.done(f"/runs/{name}", f"Asked for: {event.name}, before the next round")

    async def clean(request: web.Request) -> web.Response:
        name = request.match_info["run"]
        told = await manager.hosting.clean_up(name)
        manager.audit(request, "clean up", name)
        raise rendering.done(f"/runs/{name}", f"Cleaned up: {told.workers} workers ended")

    async def delete(request: web.Request) -> web.Response:
        name = request.match_info["run"]
        if str((await request.post()).get("sure", "")) != name:
            return await show(request, f"to delete it for good, write its name: {name}")
        await manager.records.delete(name)
        manager.audit(request, "delete", name)
        raise rendering.done("/runs", f"Deleted {name}")

    async def file(request: web.Request) -> web.StreamResponse:
        return await manager.records.download(request.match_info["run"], request.match_info["name"])

    async def report(request: web.Request) -> web.StreamResponse:
        path = await manager.records.report(request.match_info["run"])
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": _REPORT_POLICY,
        }
        return web.FileResponse(path, headers=headers)

    async def compare(request: web.Request) -> web.Response:
        names = [one["run"] for one in installation.runs(manager)]
        first, second = (request.query.get(n, "") for n in ("first", "second"))
        found: dict[str, Any] | None = None
        problem, charts = "", {}
        if first and second:
            try:
                found = await manager.records.compare(first, second)
                charts = both(found["rounds"])
            except InvalidInputError as error:
                problem = str(error)
        return rendering.page(
            request,
            "compare",
            422 if problem else 200,
            tab="runs",
            names=names,
            first=first,
            second=second,
            it=found,
            charts=charts,
            problem=problem,
        )

    one = "/runs/{run}"
    return [
        web.get("/compare", compare),
        web.get(one, run),
        web.post(f"{one}/inject", inject),
        web.post(f"{one}/clean-up", clean),
        web.post(f"{one}/delete", delete),
        web.post(f"{one}/{{action:{'|'.join(installation.ACTIONS)}}}", act),
        web.get(f"{one}/files/{{name}}", file),
        web.get(f"{one}/report", report),
    ]


def both(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """For each recorded number that two runs have, a chart of both."""
    (first, rows), (second, others) = list(rounds.items())
    numbers = sorted({row["round"] for row in (*rows, *others)})
    found: dict[str, dict[str, Any]] = {}
    names = dict.fromkeys(n for row in (*rows, *others) for n in row["values"])
    for name in names:
        lines = {}
        for run, held in ((first, rows), (second, others)):
            at = {row["round"]: row["values"].get(name) for row in held}
            line = [at.get(n) for n in numbers]
            if any(_is_number(v) for v in line):
                lines[run] = [v if _is_number(v) else None for v in line]
        if len(lines) > 1:
            found[name] = {"rounds": numbers, "lines": lines}
    return found


def chart(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Points of the recorded numbers over the rounds, for the script that draws them."""
    if len(rows) > _MOST_POINTS:  # more than a screen has
        step = -(-len(rows) // _MOST_POINTS)
        rows = [*rows[::step], rows[-1]]
    numbers = [row["round"] for row in rows]
    lines = {
        name: [v if _is_number(v := row["values"].get(name)) else None for row in rows]
        for name in names
        if any(_is_number(row["values"].get(name)) for row in rows)
    }
    return {"rounds": numbers, "lines": lines}


def _is_nested(rows: list[dict[str, Any]], name: str) -> bool:
    return any(isinstance(row["values"].get(name), (dict, list)) for row in rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
