"""The manager's service: a web server beside a watcher of the broker."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from aiohttp import web

from populace.personas.people import find_people
from populace.recorded import results
from populace.runs import find_spec
from populace.stack.state import page_address, page_file, token_file
from services.manager import api, pages
from services.manager.agents import AgentBook
from services.manager.auth import Doorkeeper, who
from services.manager.environments import EnvironmentBook
from services.manager.hosting import Hosting
from services.manager.interviews import InterviewBook
from services.manager.people import PeopleBook
from services.manager.records import RecordBook
from services.manager.scenarios import ScenarioBook
from services.manager.watcher import Watcher
from shared.bus import NatsBus
from shared.errors import BusUnavailableError, InvalidInputError, PopulaceError
from shared.ids import check_token
from shared.logs import get_logger
from shared.messages.scenario import ScenarioSpec
from shared.service import ServiceContext
from shared.streams import ensure_streams

_log = get_logger(__name__)

_RECORDED_HELD = 50
_MOST_BODY = 4 << 20
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Manager:
    """What pages and JSON interface share."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self.settings = context.settings
        self.watcher = Watcher(context.bus, context.settings.subjects)
        self.agents = AgentBook(self)
        self.environments = EnvironmentBook(self)
        self.hosting = Hosting(self)
        self.interviews = InterviewBook(self)
        self.people = PeopleBook(self)
        self.records = RecordBook(self)
        self.scenarios = ScenarioBook(self)
        token = context.settings.manager_token
        self.made_token = None if token is not None else secrets.token_urlsafe(24)
        reader = context.settings.manager_reader_token
        self.doors = Doorkeeper(
            token.get_secret_value() if token is not None else str(self.made_token),
            reader.get_secret_value() if reader is not None else None,
        )
        self._recorded: OrderedDict[str, tuple[Any, dict[str, Any]]] = OrderedDict()
        self._specs: OrderedDict[tuple[str, int], ScenarioSpec] = OrderedDict()
        """By run and life: more rounds, or another budget, make another scenario of it."""
        self._audit = context.settings.home / "audit.jsonl"

    @property
    def bus(self) -> NatsBus:
        """The connection to the broker.

        Raises:
            BusUnavailableError: the broker is away: at once, so that no page waits for it.
        """
        if self.watcher.broker != "up":
            raise BusUnavailableError("the broker is away")
        return self.context.bus

    # Runs
    def is_live(self, run: str) -> bool:
        """Whether a run is under way."""
        info = self.watcher.runs.get(run)
        return info is not None and info.state in ("accepted", "running")

    def known(self, run: str) -> str:
        """A run's name, if there is such a run.

        Raises:
            InvalidInputError: there is none.
        """
        folder = self.settings.runs_dir / check_token(run, "the run's name")
        if run not in self.watcher.runs and not folder.is_dir():
            raise InvalidInputError(f"there is no run named {run!r}")
        return run

    async def recorded(self, run: str) -> dict[str, Any] | None:
        """Manifest and rounds of a run that is over and was recorded on this machine."""
        return await asyncio.to_thread(self._read, run)

    def _read(self, run: str) -> dict[str, Any] | None:
        """The same, in a thread: read once for each state of the files."""
        try:
            found = results(run, self.settings)
            status = (found.folder / "manifest.json").stat()
            stamp = (status.st_mtime_ns, status.st_size)
            held = self._recorded.get(run)
            if held is None or held[0] != stamp:
                held = (stamp, {"manifest": found.manifest, "rounds": found.rounds})
                self._recorded[run] = held
                while len(self._recorded) > _RECORDED_HELD:
                    self._recorded.popitem(last=False)
        except (InvalidInputError, OSError):
            return None
        return held[1]

    async def spec(self, run: str) -> ScenarioSpec | None:
        """A run's scenario, if the broker or the run's files still hold it.

        Raises:
            BusError: the broker does not answer.
        """
        info = self.watcher.runs.get(run)
        key = (run, info.life if info is not None else 0)
        held = self._specs.get(key)
        if held is None:
            try:
                held = await find_spec(self.bus, self.settings, check_token(run, "the run's name"))
            except InvalidInputError:
                recorded = await self.recorded(run)
                scenario = recorded and recorded["manifest"].get("scenario")
                if not scenario:
                    return None
                held = ScenarioSpec.model_validate(scenario)
            self._specs[key] = held
            while len(self._specs) > _RECORDED_HELD:
                self._specs.popitem(last=False)
        return held

    async def people_source(self, spec: ScenarioSpec) -> str:
        """Where the personas of a scenario's agents are.

        Raises:
            InvalidInputError: there are none of that name.
        """
        folder = Path(spec.folder) if spec.folder else None
        name = str(spec.agents.personas)
        return await asyncio.to_thread(find_people, name, folder, self.settings.personas_dir)

    def forget(self, run: str) -> None:
        """A run was deleted."""
        self._recorded.pop(run, None)
        for key in [key for key in self._specs if key[0] == run]:
            del self._specs[key]
        self.agents.forget(run)
        self.interviews.forget(run)
        self.watcher.forget(run)

    def audit(self, request: web.Request, action: str, what: str) -> None:
        """Note who did what, in ``audit.jsonl`` below POPULACE_HOME and in the log."""
        session = who()
        told = {
            "time": time.time(),
            "role": None if session is None else session.role,
            "from": request.remote,
            "action": action,
            "what": what,
        }
        _log.info("action", **{k: v for k, v in told.items() if k != "time"})
        try:
            self._audit.parent.mkdir(parents=True, exist_ok=True)
            with self._audit.open("a") as out:
                out.write(json.dumps(told) + "\n")
        except OSError as error:
            _log.error("the audit log can't be written", error=str(error))

    # The server
    def app(self) -> web.Application:
        """The web application."""

        @web.middleware
        async def headers(request: web.Request, handler: Any) -> web.StreamResponse:
            try:
                response: web.StreamResponse = await handler(request)
            except web.HTTPException as error:
                for name, value in _HEADERS.items():
                    error.headers.setdefault(name, value)
                raise
            if not response.prepared:
                for name, value in _HEADERS.items():
                    response.headers.setdefault(name, value)
            return response

        rendering = pages.Rendering(self)
        app = web.Application(
            client_max_size=_MOST_BODY,
            middlewares=[headers, pages.problems(rendering), self.doors.middleware()],
        )
        app.add_routes(api.routes(self))
        app.add_routes(pages.routes(rendering))
        return app

    def _tell_token(self, place: str, token: str) -> None:
        """Tell a token that was made: to a terminal, and in a file that only its owner reads."""
        path = token_file(self.settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(f"{token}\n")
        _log.info("a token was made", file=str(path))
        if sys.stdout.isatty():
            sys.stdout.write(f"{place}/login  token: {token}\n")
            sys.stdout.flush()

    async def run(self) -> None:
        """Serve until told to stop."""
        await ensure_streams(self.bus, self.settings.subjects)
        watching = asyncio.ensure_future(self.watcher.run())
        runner = web.AppRunner(self.app(), shutdown_timeout=2.0, access_log=None)
        await runner.setup()
        address, port = self.settings.manager_address, self.settings.manager_port
        try:
            await self._listen(runner, address, port)
        except PopulaceError:
            watching.cancel()
            raise
        place = f"http://{runner.addresses[0][0]}:{runner.addresses[0][1]}"
        where = page_file(self.settings)
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(f"{place}\n")
        await self.context.announce(
            "A web page over hosts, runs, agents and models",
            metadata={"address": place},
            stats=lambda: {"address": place, "runs": len(self.watcher.runs)},
        )
        _log.info("manager is up", address=place)
        if self.made_token is not None:
            self._tell_token(place, self.made_token)
        stopping = asyncio.ensure_future(self.context.stopping.wait())
        await asyncio.wait({stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and not watching.cancelled() and watching.exception() is not None:
            _log.error("the watcher ended", error=str(watching.exception()))
        self.watcher.stop()
        watching.cancel()
        stopping.cancel()
        if page_address(self.settings) == place:
            where.unlink(missing_ok=True)
        await runner.cleanup()
        await self.agents.close()

    async def _listen(self, runner: web.AppRunner, address: str, port: int) -> None:
        """Listen; at another port if the usual one is taken, and none was set.

        Raises:
            PopulaceError: the port can't be had.
        """
        usual = "manager_port" not in self.settings.model_fields_set
        for tried in (port, 0) if usual else (port,):
            try:
                await web.TCPSite(runner, address, tried).start()
                return
            except OSError as error:
                why = str(error)
                _log.warning("a port can't be had", address=address, port=tried, error=why)
        raise PopulaceError(
            f"the manager can't listen on {address}:{port} ({why}); set POPULACE_MANAGER_ADDRESS "
            "or POPULACE_MANAGER_PORT to another"
        )


async def main(context: ServiceContext) -> None:
    """The manager service."""
    await Manager(context).run()
