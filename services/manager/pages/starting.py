"""Starting runs: from a scenario file by a form, or from a text."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from pydantic import ValidationError

from populace.scenario_file import read_scenario
from services.manager import installation
from services.manager.auth import operators_only
from services.manager.forms import Field, form_of, overrides_of, read_yaml
from services.manager.pages.rendering import Rendering
from shared.errors import InvalidInputError, PopulaceError
from shared.ids import check_token
from shared.messages.scenario import ScenarioSpec
from shared.problems import first_problem

_MOST_RUNS = 500
_CHANGED = "as the command line changes it: "
"""What stands before a complaint of what a form, and not the file, says."""


def routes(rendering: Rendering) -> list[web.RouteDef]:
    """Paths and what answers them."""
    manager = rendering.manager

    async def runs(request: web.Request) -> web.Response:
        return listing(request, request.query.get("search", ""))

    def listing(
        request: web.Request, search: str = "", text: str = "", problem: str = ""
    ) -> web.Response:
        found = installation.runs(manager, search)
        return rendering.page(
            request,
            "runs",
            422 if problem else 200,
            runs=found[:_MOST_RUNS],
            found=len(found),
            search=search,
            text=text,
            problem=problem,
        )

    async def from_text(request: web.Request) -> web.Response:
        text = str((await request.post()).get("scenario", ""))
        try:
            fields = await read_yaml(text, "this")
            if not isinstance(fields, dict):
                raise InvalidInputError("a scenario is a mapping of keys, as in a scenario file")
            told = await installation.submit(manager, ScenarioSpec.model_validate(fields))
        except ValidationError as error:
            return listing(request, text=text, problem=first_problem(error))
        except PopulaceError as error:
            return listing(request, text=text, problem=str(error))
        manager.audit(request, "submit", told.run)
        raise web.HTTPSeeOther(f"/runs/{told.run}")

    async def choose(request: web.Request) -> web.Response:
        operators_only()
        found = await manager.scenarios.all()
        roots = [str(root) for root in manager.settings.roots]
        return rendering.page(request, "start", tab="runs", scenarios=found, roots=roots)

    async def form(request: web.Request) -> web.Response:
        operators_only()
        file = request.match_info["file"]
        described = await manager.scenarios.describe(file)
        return shown(request, file, described, form_of(described))

    def shown(
        request: web.Request,
        file: str,
        described: dict[str, Any],
        fields: dict[str, list[Field]],
        *,
        run: str = "",
        estimate: dict[str, Any] | None = None,
        problem: str = "",
    ) -> web.Response:
        return rendering.page(
            request,
            "form",
            422 if problem else 200,
            tab="runs",
            file=file,
            about=described["about"],
            spec=described["spec"],
            form=fields,
            run=run,
            estimate=estimate,
            problem=problem,
        )

    async def from_form(request: web.Request) -> web.Response:
        file = request.match_info["file"]
        given = await request.post()
        described = await manager.scenarios.describe(file)
        fields = form_of(described)
        run = str(given.get("run", "")).strip()
        try:
            overrides = overrides_of(fields, given)
            if given.get("do") == "estimate":
                estimate = await manager.scenarios.estimate(file, overrides)
                return shown(request, file, described, fields, run=run, estimate=estimate)
            await manager.scenarios.describe(file, overrides)  # its code checks its parameters
            spec = read_scenario(await manager.scenarios.path(file), overrides).spec
            if spec.agents.personas is not None:
                await manager.people_source(spec)
            spec.run = check_token(run, "the run's name") if run else None
            told = await installation.submit(manager, spec)
        except ValidationError as error:
            why = first_problem(error)
            return shown(request, file, described, fields, run=run, problem=why)
        except PopulaceError as error:
            why = str(error).rpartition(_CHANGED)[2]
            return shown(request, file, described, fields, run=run, problem=why)
        manager.audit(request, "submit", told.run)
        raise web.HTTPSeeOther(f"/runs/{told.run}")

    return [
        web.get("/runs", runs),
        web.post("/runs", from_text),
        web.get("/start", choose),
        web.get("/start/{file:.+}", form),
        web.post("/start/{file:.+}", from_form),
    ]
