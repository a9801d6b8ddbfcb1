"""Environments of runs: which there are, what they hold, what happens in them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from populace.inspection import inspect, stored_environments
from shared.bus import Message
from shared.codec import from_public
from shared.errors import BusError, CodecError, InvalidInputError, RemoteError
from shared.ids import check_token

if TYPE_CHECKING:
    from services.manager.manager import Manager

MOST_EVENTS = 200
_WAITING = 500
"""Events that wait for a page that reads slowly; more are left out, with a word."""


def check_path(path: str) -> str:
    """The path, if it can be one.

    Raises:
        InvalidInputError: it can't.
    """
    for name in path.split("."):
        check_token(name, f"the environment's path {path[:100]!r}: every name in it")
    return path


class EnvironmentBook:
    """Looks environments up.

    Args:
        manager: whose.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def tree(self, run: str) -> dict[str, Any]:
        """All environments of a run, who listens, and which workers hold what.

        Raises:
            BusError: the broker does not answer.
        """
        check_token(run, "the run's name")
        manager = self._manager
        told: dict[str, Any] = {
            "run": run,
            "live": False,
            "environments": [],
            "populations": [],
            "workers": [],
            "listens": [],
            "listens_left_out": 0,
            "round": 0,
        }
        if manager.is_live(run):
            try:
                seen = await inspect(manager.bus, manager.settings.subjects, run)
                return {**told, "live": True, **seen.model_dump(mode="json")}
            except (BusError, RemoteError):
                pass  # it is between two lives: what was written down is shown
        try:
            stored = await stored_environments(manager.bus, manager.settings.subjects, run)
        except CodecError:
            stored = []
        told["environments"] = [
            {"path": one.name, "class_name": one.class_name, "worker": "", "moved": 0}
            for one in stored
        ]
        return told

    async def one(self, run: str, path: str) -> dict[str, Any]:
        """One environment.

        Raises:
            InvalidInputError: there is no such one.
            BusError: the broker does not answer.
        """
        check_path(path)
        check_token(run, "the run's name")
        manager = self._manager
        refused = f"nothing is known of an environment {path!r} of the run {run!r}"
        found: dict[str, Any] = {"run": run, "path": path, "live": False, "where": "", "one": None}
        if manager.is_live(run):
            try:
                told = await inspect(manager.bus, manager.settings.subjects, run, environment=path)
                found["one"] = told.one and told.one.model_dump(mode="json")
                found |= {"live": True, "where": told.where}
            except (BusError, RemoteError) as error:
                refused = str(error)
        if found["one"] is None:
            stored = await stored_environments(
                manager.bus, manager.settings.subjects, run, only=path
            )
            one = next(iter(stored), None)
            if one is None:
                raise InvalidInputError(refused)
            found["one"] = one.model_dump(mode="json")
        folder = manager.settings.runs_dir / run
        found["events"] = await asyncio.to_thread(recorded_events, folder, path)
        return found

    async def events(self, run: str, path: str) -> AsyncGenerator[dict[str, Any] | None, None]:
        """What happens in an environment from now on; None about once in five seconds.

        Raises:
            BusError: the broker can't be reached.
        """
        check_path(path)
        check_token(run, "the run's name")
        waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_WAITING)
        left_out = 0

        def take(message: Message) -> None:
            nonlocal left_out
            try:
                told = from_public(message.data)
                waiting.put_nowait(_shown(told))
            except CodecError:
                return
            except asyncio.QueueFull:
                left_out += 1

        bus, subjects = self._manager.bus, self._manager.settings.subjects
        subscription = await bus.subscribe(subjects.env_event(run, "*", path), take)
        try:
            while True:
                try:
                    told = await asyncio.wait_for(waiting.get(), 5.0)
                except TimeoutError:
                    yield None
                    continue
                if left_out:
                    told["left_out"], left_out = left_out, 0
                yield told
        finally:
            await subscription.unsubscribe()


def _shown(told: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(told.get("name")),
        "round": told.get("round"),
        "number": told.get("number"),
        "by": told.get("by") or "",
        "arguments": json.dumps(told.get("arguments"), ensure_ascii=False)[:1000],
    }


def recorded_events(folder: Path, path: str) -> list[dict[str, Any]]:
    """The last events of an environment that a run's files hold, latest first."""
    file = folder / "events.parquet"
    if not file.exists():
        return []
    try:
        table = pq.read_table(file, filters=[("path", "=", path)])
    except (OSError, pa.ArrowInvalid):
        return []
    rows = table.slice(max(0, table.num_rows - MOST_EVENTS)).to_pylist()
    return [
        {
            **{n: row[n] for n in ("name", "round", "number")},
            "by": row["by"] or "",
            "arguments": row["arguments"][:1000],
        }
        for row in reversed(rows)
    ]
