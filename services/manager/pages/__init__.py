"""The pages: rendered here, kept up to date by small scripts that fetch them anew."""

from __future__ import annotations

from aiohttp import web

from services.manager.pages import (
    agents,
    entrance,
    environments,
    hosts,
    overview,
    people,
    runs,
    starting,
)
from services.manager.pages.rendering import Rendering, problems

__all__ = ["Rendering", "problems", "routes"]


def routes(rendering: Rendering) -> list[web.RouteDef]:
    """All pages."""
    rooms = (entrance, overview, hosts, starting, runs, agents, environments, people)
    return [route for room in rooms for route in room.routes(rendering)]
