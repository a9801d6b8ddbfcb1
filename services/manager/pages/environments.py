"""Environments of a run: the tree, each node's state and view, events live."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from services.manager.environments import check_path
from services.manager.pages.entrance import event_stream, may_stay
from services.manager.pages.rendering import Rendering
from shared.errors import BusError
from shared.ids import check_token

_MOST_LISTENERS = 50


def routes(rendering: Rendering) -> list[web.RouteDef]:
    """Paths and what answers them."""
    manager = rendering.manager
    listeners = 0

    async def tree(request: web.Request) -> web.Response:
        run = manager.known(request.match_info["run"])
        it = await manager.environments.tree(run)
        return rendering.page(
            request,
            "environments",
            tab="runs",
            part="environments",
            run=run,
            it=it,
            starting=manager.is_live(run),
        )

    async def one(request: web.Request) -> web.Response:
        run = check_token(request.match_info["run"], "the run's name")
        path = request.match_info["path"]
        it = await manager.environments.one(run, path)
        whole = await manager.environments.tree(run)
        listens = [
            row
            for row in whole["listens"]
            if row["path"] in ("", path) or (row["below"] and path.startswith(f"{row['path']}."))
        ]
        return rendering.page(
            request,
            "environment",
            tab="runs",
            part="environments",
            run=run,
            it=it,
            listens=listens,
            children=[
                e["path"] for e in whole["environments"] if e["path"].rpartition(".")[0] == path
            ],
        )

    async def events(request: web.Request) -> web.StreamResponse:
        nonlocal listeners
        run = check_token(request.match_info["run"], "the run's name")
        if listeners >= _MOST_LISTENERS:
            raise web.HTTPServiceUnavailable(text="too many pages are open\n")
        path = check_path(request.match_info["path"])
        stream = manager.environments.events(run, path)
        response = await event_stream(request)
        listeners += 1
        try:
            async for told in stream:
                if manager.context.stopping.is_set() or not may_stay(manager, request):
                    break
                text = ": still here" if told is None else f"data: {json.dumps(told)}"
                await response.write(f"{text}\n\n".encode())
        except (ConnectionError, BusError, asyncio.CancelledError):
            pass
        finally:
            listeners -= 1
            await stream.aclose()
        return response

    return [
        web.get("/runs/{run}/environments", tree),
        web.get("/runs/{run}/environments/{path}", one),
        web.get("/runs/{run}/environments/{path}/events", events),
    ]
