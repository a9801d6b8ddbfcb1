"""The overview, and the models' page."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from services.manager import installation
from services.manager.pages.rendering import Rendering

_LATEST = 8
_COSTS_OF = 20
_COSTS_FOR = 3.0


def routes(rendering: Rendering) -> list[web.RouteDef]:
    """Paths and what answers them."""
    manager = rendering.manager
    costs: tuple[float, list[dict[str, Any]]] = (0.0, [])

    async def overview(request: web.Request) -> web.Response:
        latest = installation.runs(manager)[:_LATEST]
        gone = [h for h in installation.hosts(manager) if not h["here"]]
        told = installation.overview(manager)
        return rendering.page(request, "overview", it=told, runs=latest, gone=gone)

    async def models(request: web.Request) -> web.Response:
        nonlocal costs
        if time.monotonic() - costs[0] > _COSTS_FOR and manager.watcher.broker == "up":
            latest = [one["run"] for one in installation.runs(manager)[:_COSTS_OF]]
            costs = (time.monotonic(), await installation.usage(manager, latest))
        pools = installation.pools(manager)
        return rendering.page(request, "models", pools=pools, costs=costs[1])

    return [web.get("/", overview), web.get("/models", models)]
