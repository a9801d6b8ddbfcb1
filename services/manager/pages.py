"""The pages: rendered here, kept up to date by a small script that fetches them anew."""

from __future__ import annotations

import asyncio
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml
from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError

from services.manager import api
from services.manager.auth import COOKIE, who
from shared.errors import InvalidInputError, PopulaceError
from shared.messages.scenario import PlannedEvent, ScenarioSpec
from shared.service import first_problem

if TYPE_CHECKING:
    from services.manager.manager import Manager

_TYPES = {".css": "text/css", ".js": "text/javascript"}
_BEAT = 5.0
"""Seconds after which something is sent to those who listen, so that a lost one is noticed."""
_MOST_LISTENERS = 200


def routes(manager: Manager) -> list[web.RouteDef]:
    """All pages."""
    return Pages(manager).routes()


class Pages:
    """Renders pages.

    Args:
        manager: what they show.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._templates = Environment(
            loader=PackageLoader("services.manager"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        self._templates.filters["count"] = lambda n: "-" if n is None else f"{n:,}"
        self._templates.filters["figure"] = _figure
        self._static = {
            file.name: file.read_bytes()
            for file in resources.files("services.manager").joinpath("static").iterdir()
            if file.is_file()
        }
        self._listeners = 0

    def routes(self) -> list[web.RouteDef]:
        """Paths and what answers them."""
        return [
            web.get("/", self.overview),
            web.get("/login", self.login),
            web.post("/login", self.log_in),
            web.post("/logout", self.log_out),
            web.get("/hosts", self.hosts),
            web.get("/runs", self.runs),
            web.post("/runs", self.start),
            web.get("/runs/{run}", self.run),
            web.post("/runs/{run}/inject", self.inject),
            web.post("/runs/{run}/{action:cancel|pause|resume}", self.act),
            web.get("/models", self.models),
            web.get("/events", self.events),
            web.get("/healthz", self.healthz),
            web.get("/static/{name}", self.static),
        ]

    def _page(self, request: web.Request, name: str, **shown: Any) -> web.Response:
        session = who()
        text = self._templates.get_template(f"{name}.html").render(
            page=name,
            role=None if session is None else session.role,
            csrf="" if session is None else session.csrf,
            version=self._manager.watcher.version,
            broker=self._manager.watcher.broker,
            said=request.query.get("said", ""),
            **shown,
        )
        return web.Response(text=text, content_type="text/html")

    # Looking
    async def overview(self, request: web.Request) -> web.Response:
        """At a glance."""
        manager = self._manager
        latest = api.runs(manager)[:8]
        return self._page(request, "overview", it=api.overview(manager), runs=latest)

    async def hosts(self, request: web.Request) -> web.Response:
        """All machines."""
        url = self._manager.settings.nats_url or "nats://127.0.0.1:4222"
        return self._page(request, "hosts", hosts=api.hosts(self._manager), url=_no_secret(url))

    async def runs(self, request: web.Request) -> web.Response:
        """All runs, those that match a search."""
        search = request.query.get("search", "")
        found = api.runs(self._manager, search)[:500]
        return self._page(request, "runs", runs=found, search=search, text="", problem="")

    async def run(self, request: web.Request) -> web.Response:
        """One run."""
        return await self._run_page(request, "")

    async def _run_page(self, request: web.Request, problem: str) -> web.Response:
        name = request.match_info["run"]
        try:
            it = await api.run(self._manager, name)
        except InvalidInputError as error:
            raise web.HTTPNotFound(text=f"{error}\n") from None
        names = list(dict.fromkeys(n for row in it["rounds"] for n in row["values"]))
        plain = [n for n in names if not _is_nested(it["rounds"], n)]
        chart = _chart(it["rounds"], plain)
        return self._page(request, "run", it=it, names=plain, chart=chart, problem=problem)

    async def models(self, request: web.Request) -> web.Response:
        """All model pools."""
        return self._page(request, "models", pools=api.pools(self._manager))

    # Doing
    async def start(self, request: web.Request) -> web.Response:
        """Start a run from a scenario's text."""
        text = str((await request.post()).get("scenario", ""))
        try:
            fields = yaml.safe_load(text)
            if not isinstance(fields, dict):
                raise InvalidInputError("a scenario is a mapping of keys, as in a scenario file")
            told = await api.submit(self._manager, ScenarioSpec.model_validate(fields))
        except yaml.YAMLError as error:
            return self._wrong(request, text, f"this is no YAML: {' '.join(str(error).split())}")
        except ValidationError as error:
            return self._wrong(request, text, first_problem(error))
        except PopulaceError as error:
            return self._wrong(request, text, str(error))
        self._manager.audit(request, "submit", told.run)
        raise web.HTTPSeeOther(f"/runs/{told.run}")

    def _wrong(self, request: web.Request, text: str, problem: str) -> web.Response:
        found = api.runs(self._manager)[:500]
        page = self._page(request, "runs", runs=found, search="", text=text, problem=problem)
        page.set_status(422)
        return page

    async def act(self, request: web.Request) -> web.Response:
        """Cancel, pause or resume a run."""
        name, action = request.match_info["run"], request.match_info["action"]
        given = await request.post()
        fields = {"rounds": int(str(given["rounds"]))} if given.get("rounds") else {}
        try:
            await api.act(self._manager, name, action, fields)
        except PopulaceError as error:
            page = await self._run_page(request, str(error))
            page.set_status(422)
            return page
        self._manager.audit(request, action, name)
        raise web.HTTPSeeOther(f"/runs/{name}?said={action}")

    async def inject(self, request: web.Request) -> web.Response:
        """Bring an event into a run."""
        name = request.match_info["run"]
        given = await request.post()
        try:
            data = yaml.safe_load(str(given.get("data", ""))) or {}
            event = PlannedEvent(name=str(given.get("name", "")), data=data)
            await api.inject(self._manager, name, event)
        except (yaml.YAMLError, ValidationError, PopulaceError) as error:
            why = first_problem(error) if isinstance(error, ValidationError) else str(error)
            page = await self._run_page(request, why)
            page.set_status(422)
            return page
        self._manager.audit(request, f"inject {event.name}", name)
        raise web.HTTPSeeOther(f"/runs/{name}?said=inject")

    # Coming and going
    async def login(self, request: web.Request) -> web.Response:
        """Ask for the token."""
        return self._page(request, "login", problem="")

    async def log_in(self, request: web.Request) -> web.Response:
        """Take the token."""
        doors = self._manager.doors
        token = str((await request.post()).get("token", "")).strip()
        role = None if doors.shut else doors.role_of(token)
        if role is None:
            why = "Too many wrong tokens; wait a minute." if doors.shut else "This token is wrong."
            page = self._page(request, "login", problem=why)
            page.set_status(401)
            return page
        response = web.HTTPSeeOther("/")
        response.set_cookie(
            COOKIE,
            doors.open_session(role),
            httponly=True,
            samesite="Strict",
            secure=request.secure,
            path="/",
        )
        raise response

    async def log_out(self, request: web.Request) -> web.Response:
        """End the session."""
        self._manager.doors.close_session(request.cookies.get(COOKIE, ""))
        response = web.HTTPSeeOther("/login")
        response.del_cookie(COOKIE, path="/")
        raise response

    # What keeps pages up to date
    async def events(self, request: web.Request) -> web.StreamResponse:
        """Tell a page that something has changed, for as long as it is open."""
        if self._listeners >= _MOST_LISTENERS:
            raise web.HTTPServiceUnavailable(text="too many pages are open\n")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        self._listeners += 1
        known = int(request.query.get("since") or 0)
        watcher = self._manager.watcher
        try:
            while not self._manager.context.stopping.is_set():
                version = await watcher.changed(known, _BEAT)
                if request.transport is None or request.transport.is_closing():
                    break
                known = version
                told = {"version": version, "broker": watcher.broker}
                await response.write(f"data: {json.dumps(told)}\n\n".encode())
                await asyncio.sleep(1.0)  # what changes more often is seen a second later
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._listeners -= 1
        return response

    async def healthz(self, _: web.Request) -> web.Response:
        """Whether the manager lives: nothing else is told without a token."""
        return web.Response(text="ok\n")

    async def static(self, request: web.Request) -> web.Response:
        """A script or a style sheet."""
        name = request.match_info["name"]
        held = self._static.get(name)
        if held is None:
            raise web.HTTPNotFound(text="there is no such file\n")
        kind = next((k for ending, k in _TYPES.items() if name.endswith(ending)), "text/plain")
        headers = {"Cache-Control": "max-age=3600"}
        return web.Response(body=held, content_type=kind, charset="utf-8", headers=headers)


def _figure(value: Any) -> str:
    """A recorded value, short."""
    if isinstance(value, bool) or value is None:
        return "-" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _is_nested(rows: list[dict[str, Any]], name: str) -> bool:
    return any(isinstance(row["values"].get(name), (dict, list)) for row in rows)


def _chart(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Points of the recorded numbers over the rounds, for the script that draws them."""
    numbers = [row["round"] for row in rows]
    lines = {
        name: [row["values"].get(name) for row in rows]
        for name in names
        if any(_is_number(row["values"].get(name)) for row in rows)
    }
    return {"rounds": numbers, "lines": lines}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _no_secret(url: str) -> str:
    """An address without what may stand before an @ in it."""
    return ",".join(
        f"{scheme}{found}{rest.rpartition('@')[2]}"
        for scheme, found, rest in (one.partition("://") for one in url.split(","))
    )
