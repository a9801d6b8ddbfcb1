"""Coming and going, and what keeps pages up to date."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from aiohttp import web

from services.manager.auth import COOKIE, TooManyError
from services.manager.pages.rendering import Rendering, StaticFiles

if TYPE_CHECKING:
    from services.manager.manager import Manager

_BEAT = 5.0
"""Seconds after which something is sent to those who listen, so that a lost one is noticed."""
_PAUSE = 1.0
"""Seconds between two words to one page: what changes more often is seen a little later."""
_MOST_LISTENERS = 200


def routes(rendering: Rendering) -> list[web.RouteDef]:
    """Paths and what answers them."""
    manager = rendering.manager
    files = StaticFiles()
    listeners = 0

    async def login(request: web.Request) -> web.Response:
        return rendering.page(request, "login", next=_inside(request.query.get("next", "/")))

    async def log_in(request: web.Request) -> web.Response:
        doors = manager.doors
        given = await request.post()
        token = str(given.get("token", "")).strip()
        back = _inside(str(given.get("next", "/")))
        try:
            role = doors.role_of(token, request.remote)
        except TooManyError:
            why = "Too many wrong tokens; wait a minute."
            return rendering.page(request, "login", 429, problem=why, next=back)
        if role is None:
            why = "This token is wrong."
            return rendering.page(request, "login", 401, problem=why, next=back)
        response = web.HTTPSeeOther(back)
        response.set_cookie(
            COOKIE,
            doors.open_session(role),
            httponly=True,
            samesite="Strict",
            secure=request.secure,
            path="/",
        )
        raise response

    async def log_out(request: web.Request) -> web.Response:
        manager.doors.close_session(request.cookies.get(COOKIE, ""))
        response = web.HTTPSeeOther("/login")
        response.del_cookie(COOKIE, path="/")
        raise response

    async def events(request: web.Request) -> web.StreamResponse:
        nonlocal listeners
        if listeners >= _MOST_LISTENERS:
            raise web.HTTPServiceUnavailable(text="too many pages are open\n")
        response = await event_stream(request)
        listeners += 1
        text = request.query.get("since", "")
        known = int(text) if text.isdecimal() else 0
        watcher = manager.watcher
        try:
            while not manager.context.stopping.is_set() and may_stay(manager, request):
                version = await watcher.changed(known, _BEAT)
                if request.transport is None or request.transport.is_closing():
                    break
                known = version
                told = {"version": version, "broker": watcher.broker}
                await response.write(f"data: {json.dumps(told)}\n\n".encode())
                await asyncio.sleep(_PAUSE)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            listeners -= 1
        return response

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def static(request: web.Request) -> web.Response:
        return await files.answer(request)

    return [
        web.get("/login", login),
        web.post("/login", log_in),
        web.post("/logout", log_out),
        web.get("/events", events),
        web.get("/healthz", healthz),
        web.get("/static/{name}", static),
    ]


def _inside(path: str) -> str:
    """Where somebody goes after logging in: to a page of ours, whatever the address says."""
    inside = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if inside else "/"


def may_stay(manager: Manager, request: web.Request) -> bool:
    """Whether whoever has a stream open is still logged in (programs send their token once)."""
    cookie = request.cookies.get(COOKIE)
    return cookie is None or manager.doors.is_open(cookie) or "Authorization" in request.headers


async def event_stream(request: web.Request) -> web.StreamResponse:
    """Begin to tell a page of events, for as long as it is open."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
    )
    await response.prepare(request)
    return response
