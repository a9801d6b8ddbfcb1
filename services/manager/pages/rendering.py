"""What all pages share: templates, scripts and styles, and how problems are shown."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.typedefs import Middleware
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError

from services.manager.api import dumps
from services.manager.auth import wants_page, who
from shared.errors import BusError, InvalidInputError, PopulaceError, RemoteError
from shared.logs import get_logger
from shared.problems import first_problem

if TYPE_CHECKING:
    from services.manager.manager import Manager

_log = get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_KIB = 1024.0
_SMALL = 0.001
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Rendering:
    """Renders pages.

    Args:
        manager: what they show.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self._templates = Environment(
            loader=PackageLoader("services.manager"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        filters = self._templates.filters
        filters["count"] = lambda n: "-" if n is None else f"{n:,}"
        filters["figure"] = figure
        filters["bytes"] = _bytes
        filters["share"] = lambda n: "-" if n is None else f"{100 * n:.1f} %"
        filters["json"] = dumps
        filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)

    @staticmethod
    def done(path: str, said: str) -> web.HTTPSeeOther:
        """To a page that says what was done, to nobody but whoever did it."""
        session = who()
        word = "" if session is None else session.note_done(said)
        return web.HTTPSeeOther(f"{path}?done={word}")

    def page(
        self, request: web.Request, name: str, status: int = 200, **shown: Any
    ) -> web.Response:
        """A page.

        Args:
            request: which asks for it; ``?done=`` names what was done, see ``done``.
            name: of the template.
            status: HTTP's.
            shown: what the template needs; ``tab`` is where the page belongs, ``at`` where the
                same can be had again, for what is answered to a form.
        """
        session = who()
        shown.setdefault("at", request.path_qs if request.method == "GET" else "/")
        text = self._templates.get_template(f"{name}.html").render(
            **{"tab": name, "problem": "", **shown},
            role=None if session is None else session.role,
            csrf="" if session is None else session.csrf,
            version=self.manager.watcher.version,
            broker=self.manager.watcher.broker,
            said="" if session is None else session.done.get(request.query.get("done", ""), ""),
        )
        return web.Response(text=text, content_type="text/html", status=status)


def problems(rendering: Rendering) -> Middleware:
    """Turns what is wrong with a request into an answer: a page, or JSON for programs."""

    @web.middleware
    async def tell(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPClientError as error:
            status, why = error.status, error.text or ""
            if status == 404 and why == "404: Not Found":
                why = "there is no such page"
        except ValidationError as error:
            status, why = 422, first_problem(error)
        except (InvalidInputError, RemoteError) as error:
            status, why = 422, str(error)
        except BusError as error:
            status, why = 503, f"The broker or a service does not answer: {error}"
        except PopulaceError as error:
            status, why = 500, str(error)
        except (web.HTTPException, asyncio.CancelledError):
            raise
        except Exception as error:
            _log.exception("a request failed", path=request.path)
            status = 500
            why = f"something went wrong here ({type(error).__name__}); the manager's log says what"
        if not wants_page(request):
            return web.json_response({"error": why.strip()}, status=status)
        return rendering.page(request, "problem", status, tab="", problem=why.strip())

    return tell


def figure(value: Any) -> str:
    """A recorded value, short."""
    if isinstance(value, bool) or value is None:
        return "-" if value is None else str(value).lower()
    if isinstance(value, float):
        if value and abs(value) < _SMALL:
            return f"{value:.2g}"
        return f"{value:,.3f}".rstrip("0").rstrip(".").replace("-0", "0" if not value else "-0")
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if value < _KIB:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _KIB
    return f"{value:.1f} GiB"


class StaticFiles:
    """Scripts and styles, in memory, with the charts' library from its wheel."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[bytes, bytes | None, str]] = {}
        for file in resources.files("services.manager").joinpath("static").iterdir():
            if file.is_file():
                self._add(file.name, file.read_bytes())

    def _add(self, name: str, content: bytes) -> None:
        small = gzip.compress(content, 6) if len(content) > 1400 else None
        tag = f'"{hash(content) & 0xFFFFFFFFFFFF:x}"'
        self._held[name] = (content, small, tag)

    async def answer(self, request: web.Request) -> web.Response:
        """The file that a request asks for.

        Raises:
            HTTPNotFound: there is none.
        """
        name = request.match_info["name"]
        if name == "plotly.js" and name not in self._held:
            await asyncio.to_thread(lambda: self._add(name, _plotly()))
        held = self._held.get(name)
        if held is None:
            raise web.HTTPNotFound(text="there is no such file")
        content, small, tag = held
        headers = {"Cache-Control": "max-age=3600", "ETag": tag, "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        if small is not None and "gzip" in request.headers.get("Accept-Encoding", ""):
            content = small
            headers["Content-Encoding"] = "gzip"
        kind = next((k for ending, k in _TYPES.items() if name.endswith(ending)), "text/plain")
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)


def _plotly() -> bytes:
    try:
        file = resources.files("plotly").joinpath("package_data", "plotly.min.js")
        return file.read_bytes()
    except (ModuleNotFoundError, OSError):
        raise web.HTTPNotFound(text="charts need plotly: pip install 'populace[manager]'") from None
