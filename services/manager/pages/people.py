"""Personas: stored populations and templates, with margins and samples; having them written."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from pydantic import ValidationError

from services.manager.api import number_of
from services.manager.forms import read_yaml
from services.manager.pages.rendering import Rendering
from shared.errors import InvalidInputError, PopulaceError
from shared.messages.persona import EnrichRequest, SampleRequest
from shared.problems import first_problem


def routes(rendering: Rendering) -> list[web.RouteDef]:
    """Paths and what answers them."""
    manager = rendering.manager

    async def people(request: web.Request) -> web.Response:
        return await show(request)

    async def show(
        request: web.Request, problem: str = "", given: dict[str, str] | None = None
    ) -> web.Response:
        it = await manager.people.all()
        return rendering.page(
            request, "people", 422 if problem else 200, it=it, given=given or {}, problem=problem
        )

    async def population(request: web.Request) -> web.Response:
        seed = number_of(request.query, "seed")
        it = await manager.people.one(request.match_info["name"], seed)
        return rendering.page(request, "population", tab="people", it=it, seed=seed)

    async def begin(request: web.Request) -> web.Response:
        given = {k: str(v).strip() for k, v in (await request.post()).items()}
        name = given.get("name", "")
        try:
            fields: dict[str, Any] = {"people": given.get("people", "")}
            if given.get("size"):
                fields["size"] = _number(given["size"], "the size")
            if given.get("seed"):
                fields["seed"] = _number(given["seed"], "the seed")
            if given.get("do") == "draw":
                replace = bool(given.get("replace"))
                await manager.people.draw(SampleRequest(store=name, **fields), replace=replace)
            else:
                model = await read_yaml(given.get("model", ""), "the model") or {}
                if given.get("names"):
                    fields["names"] = given["names"]
                request_ = EnrichRequest.model_validate(
                    {**fields, "name": name, "model": model, "judge": bool(given.get("judge"))}
                )
                await manager.people.write(request_)
        except ValidationError as error:
            return await show(request, first_problem(error), given)
        except PopulaceError as error:
            return await show(request, str(error), given)
        manager.audit(request, f"{given.get('do', 'write')} people", name)
        raise web.HTTPSeeOther(f"/people/{name}" if given.get("do") == "draw" else "/people")

    async def cancel(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await manager.people.cancel(name)
        manager.audit(request, "stop writing people", name)
        raise rendering.done("/people", f"Stopped the writing of {name}")

    return [
        web.get("/people", people),
        web.post("/people", begin),
        web.get("/people/{name}", population),
        web.post("/people/{name}/cancel", cancel),
    ]


def _number(text: str, what: str) -> int:
    if not text.isdecimal():
        raise InvalidInputError(f"{what} must be a whole number, not {text!r}")
    return int(text)
