"""Agents: pages of them, and each from all sides."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from pydantic import ValidationError

from populace.interviews import InterviewRequest
from services.manager.agents import split_name
from services.manager.answers import OPERATORS, PAGE
from services.manager.api import filters_of, number_of
from services.manager.pages.rendering import Rendering
from shared.errors import InvalidInputError, PopulaceError
from shared.ids import check_token
from shared.problems import first_problem

_HIDDEN = ("population", "agent", "method", "answer", "error")
_MOST_COLUMNS = 20


def routes(rendering: Rendering) -> list[web.RouteDef]:
    """Paths and what answers them."""
    manager = rendering.manager

    async def agents(request: web.Request) -> web.Response:
        run = check_token(request.match_info["run"], "the run's name")
        query = request.query
        filters = filters_of(query)
        population, sort = query.get("population", ""), query.get("sort", "")
        start = number_of(query, "start")
        problem = ""
        try:
            found = await manager.agents.page(run, population, filters, sort, start)
        except InvalidInputError as error:
            if not (filters or sort):
                raise
            problem = str(error)
            found = await manager.agents.page(run, "", [], "", 0)
        kept = [("population", population)] if population else []
        for one in filters:
            kept += [("column", one.column), ("op", one.operator), ("value", one.value)]

        def address(**changed: Any) -> str:
            pairs = [*kept, *((("sort", sort),) if sort and "sort" not in changed else ())]
            return f"/runs/{run}/agents?{urlencode([*pairs, *changed.items()])}"

        shown = [c for c in found["columns"] if c not in _HIDDEN][:_MOST_COLUMNS]
        return rendering.page(
            request,
            "agents",
            422 if problem else 200,
            problem=problem,
            tab="runs",
            part="agents",
            run=run,
            it=found,
            shown=shown,
            population=population,
            filters=filters,
            operators=OPERATORS,
            sort=sort,
            address=address,
            page_size=PAGE,
            first=f"{population or next(iter(found['populations']), 'agents')}",
            info=manager.watcher.runs.get(run),
        )

    async def go(request: web.Request) -> web.Response:
        run = check_token(request.match_info["run"], "the run's name")
        population, number = split_name(request.query.get("name", "").strip())
        raise web.HTTPSeeOther(f"/runs/{run}/agents/{population}/{number}")

    async def agent(request: web.Request) -> web.Response:
        return await show(request)

    async def show(request: web.Request, problem: str = "", question: str = "") -> web.Response:
        run, name = check_token(request.match_info["run"], "the run's name"), _name(request)
        it = await manager.agents.one(run, name)
        return rendering.page(
            request,
            "agent",
            422 if problem else 200,
            tab="runs",
            part="agents",
            run=run,
            it=it,
            asked=manager.interviews.of(run, name),
            question=question,
            problem=problem,
            live=manager.is_live(run),
            at=f"/runs/{run}/agents/{name}",
        )

    async def ask(request: web.Request) -> web.Response:
        run, name = request.match_info["run"], _name(request)
        given = await request.post()
        question = str(given.get("question", "")).strip()
        try:
            asked = InterviewRequest(
                agents=[name], question=question, remember=bool(given.get("remember"))
            )
            await manager.interviews.ask(run, asked)
        except ValidationError as error:
            return await show(request, first_problem(error), question)
        except PopulaceError as error:
            return await show(request, str(error), question)
        manager.audit(request, f"interview {name}", run)
        raise web.HTTPSeeOther(f"/runs/{run}/agents/{name}#interview")

    async def exchanges(request: web.Request) -> web.Response:
        run, name = check_token(request.match_info["run"], "the run's name"), _name(request)
        it = await manager.agents.exchanges(run, name)
        return rendering.page(request, "exchanges", tab="runs", it=it)

    one = "/runs/{run}/agents/{population}/{number}"
    return [
        web.get("/runs/{run}/agents", agents),
        web.get("/runs/{run}/agents/find", go),
        web.get(one, agent),
        web.post(f"{one}/ask", ask),
        web.get(f"{one}/exchanges", exchanges),
    ]


def _name(request: web.Request) -> str:
    population = check_token(request.match_info["population"], "the population's name")
    return f"{population}/{request.match_info['number']}"
