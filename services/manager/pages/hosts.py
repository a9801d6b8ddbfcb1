"""Hosts: all, and each with its workers, its log, and what can be done to it."""

from __future__ import annotations

from aiohttp import web

from services.manager import installation
from services.manager.api import KINDS
from services.manager.pages.rendering import Rendering
from shared.bus.nats import without_secret
from shared.errors import InvalidInputError
from shared.service import DEFAULT_URL


def routes(rendering: Rendering) -> list[web.RouteDef]:
    """Paths and what answers them."""
    manager = rendering.manager
    one = f"/hosts/{{host}}/{{kind:{'|'.join(KINDS)}}}"

    def key(request: web.Request) -> tuple[str, str]:
        return request.match_info["host"], request.match_info["kind"]

    async def hosts(request: web.Request) -> web.Response:
        url = ",".join(map(without_secret, (manager.settings.nats_url or DEFAULT_URL).split(",")))
        return rendering.page(request, "hosts", hosts=installation.hosts(manager), url=url)

    async def host(request: web.Request) -> web.Response:
        name, kind = key(request)
        it = await manager.hosting.detail(name, kind)
        live = [run for run in it["info"]["runs"] if manager.is_live(run)]
        return rendering.page(request, "host", tab="hosts", host=name, it=it, live=live)

    async def drain(request: web.Request) -> web.Response:
        name, kind = key(request)
        draining = request.match_info["way"] == "drain"
        await manager.hosting.change(name, kind, draining=draining)
        manager.audit(request, request.match_info["way"], name)
        said = "Drained" if draining else "It takes on runs again"
        raise rendering.done(f"/hosts/{name}/{kind}", said)

    async def per_run(request: web.Request) -> web.Response:
        name, kind = key(request)
        text = str((await request.post()).get("per_run", ""))
        if not text.isdecimal():
            raise InvalidInputError(f"workers for each run must be a whole number, not {text!r}")
        await manager.hosting.change(name, kind, per_run=int(text))
        manager.audit(request, f"per run: {text}", name)
        raise rendering.done(f"/hosts/{name}/{kind}", f"Each run that begins gets {text}")

    async def stop(request: web.Request) -> web.Response:
        name, kind = key(request)
        worker = str((await request.post()).get("worker", ""))
        await manager.hosting.stop_worker(name, kind, worker)
        manager.audit(request, f"stop {worker}", name)
        raise rendering.done(f"/hosts/{name}/{kind}", f"Stopped {worker}")

    async def clean(request: web.Request) -> web.Response:
        name, kind = key(request)
        run = str((await request.post()).get("run", ""))
        told = await manager.hosting.clean_up(run, name)
        manager.audit(request, f"clean up on {name}", run)
        said = f"Cleaned up: {told.workers} workers of {run} ended"
        raise rendering.done(f"/hosts/{name}/{kind}", said)

    return [
        web.get("/hosts", hosts),
        web.get(one, host),
        web.post(f"{one}/{{way:drain|undrain}}", drain),
        web.post(f"{one}/per-run", per_run),
        web.post(f"{one}/stop", stop),
        web.post(f"{one}/clean-up", clean),
    ]
