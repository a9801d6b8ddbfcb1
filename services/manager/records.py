"""Recorded runs: their files, the page on them, comparisons, and their end."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from populace.recorded import Comparison, RecordedRun, compare, deleted_folder, put_away, results
from populace.runs import forget_run
from shared.errors import InvalidInputError
from shared.ids import check_token

if TYPE_CHECKING:
    from services.manager.manager import Manager

FILES = {
    "answers.parquet": "application/vnd.apache.parquet",
    "messages.parquet": "application/vnd.apache.parquet",
    "events.parquet": "application/vnd.apache.parquet",
    "rounds.json": "application/json",
    "manifest.json": "application/json",
    "answers.csv": "text/csv",
}
"""What can be had of a run. ``answers.csv`` is made of ``answers.parquet``."""
_REPORT = "report.html"
_COMPARED_HELD = 20
R = TypeVar("R")


class RecordBook:
    """Looks after what is recorded.

    Args:
        manager: whose.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._making: dict[str, asyncio.Task[Any]] = {}
        self._compared: OrderedDict[tuple[Any, ...], Comparison] = OrderedDict()

    def folder(self, run: str) -> Path:
        """Where a run's files are."""
        return self._manager.settings.runs_dir / check_token(run, "the run's name")

    def files(self, run: str) -> list[dict[str, Any]]:
        """Which files there are of a run, with their sizes in bytes."""
        folder = self.folder(run)
        found = [
            {"name": name, "bytes": (folder / name).stat().st_size}
            for name in FILES
            if (folder / name).is_file()
        ]
        if any(one["name"] == "answers.parquet" for one in found):
            found.append({"name": "answers.csv", "bytes": None})
        return found

    async def file(self, run: str, name: str) -> Path:
        """A file of a run.

        Raises:
            InvalidInputError: there is no such file.
        """
        if name not in FILES:
            raise InvalidInputError(f"there is no file {name!r} (there are: {', '.join(FILES)})")
        folder = self.folder(run)
        if name == "answers.csv":
            return await self._once(f"{run}/csv", lambda: asyncio.to_thread(_as_csv, folder))
        if not (folder / name).is_file():
            raise InvalidInputError(f"the run {run!r} has no {name} (yet)")
        return folder / name

    async def download(self, run: str, name: str) -> web.FileResponse:
        """A file of a run, as it is sent.

        Raises:
            InvalidInputError: there is no such file.
        """
        path = await self.file(run, name)
        headers = {
            "Content-Type": FILES[name],
            "Content-Disposition": f'attachment; filename="{run}-{name}"',
        }
        return web.FileResponse(path, headers=headers)

    async def report(self, run: str) -> Path:
        """The page on a recorded run, made if there is none that is as new as the run's files.

        Raises:
            InvalidInputError: it can't be made; the text says why.
        """
        folder = self.folder(run)
        manifest, page = folder / "manifest.json", folder / _REPORT
        if not manifest.is_file():
            raise InvalidInputError(f"the run {run!r} is not over, so there is no report on it")
        if page.is_file() and page.stat().st_mtime >= manifest.stat().st_mtime:
            return page
        await self._once(run, lambda: self._manager.scenarios.report(run, page))
        return page

    async def _once(self, key: str, make: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Make something for all who want it at the same time."""
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.ensure_future(make())
            task.add_done_callback(lambda _: self._making.pop(key, None))
        found: R = await asyncio.shield(task)
        return found

    async def compare(self, first: str, second: str) -> dict[str, Any]:
        """How the answers of two runs differ.

        Raises:
            InvalidInputError: one is not recorded.
        """
        if first == second:
            raise InvalidInputError(f"choose two different runs: {first!r} is both")
        settings = self._manager.settings

        def work() -> Comparison:
            runs = [results(run, settings) for run in (first, second)]
            stamps = [(r.folder / "manifest.json").stat().st_mtime_ns for r in runs if r.complete]
            key = (first, second, *stamps)
            held = self._compared.get(key) if len(stamps) == 2 else None
            if held is None:
                held = compare(runs[0], runs[1], show=20)
                if len(stamps) == 2:
                    self._compared[key] = held
                while len(self._compared) > _COMPARED_HELD:
                    self._compared.popitem(last=False)
            return held

        found = await self._once(f"{first}/{second}", lambda: asyncio.to_thread(work))
        rounds = {}
        for run in (first, second):
            recorded = await self._manager.recorded(run)
            rounds[run] = [] if recorded is None else recorded["rounds"]
        return {
            "first": first,
            "second": second,
            "identical": found.identical,
            **dataclasses.asdict(found),
            "rounds": rounds,
        }

    async def delete(self, run: str) -> None:
        """Delete a run: its files, and all that the broker keeps of it.

        Raises:
            InvalidInputError: there is no such run, or it is under way.
            BusError: the broker does not answer.
        """
        folder = self.folder(run)
        info = self._manager.watcher.runs.get(run)
        if info is None and not folder.exists() and not deleted_folder(folder).exists():
            raise InvalidInputError(f"there is no run named {run!r}")
        if info is not None and info.state in ("accepted", "running"):
            raise InvalidInputError(f"the run {run!r} is {info.state}; cancel it first")
        away = await asyncio.to_thread(put_away, folder)
        await forget_run(self._manager.bus, self._manager.settings, run)
        if away.exists():
            await asyncio.to_thread(shutil.rmtree, away)
        self._manager.forget(run)
        await self._manager.watcher.refresh()


def _as_csv(folder: Path) -> Path:
    """The answers as CSV, made once for each state of the run's files."""
    source, target = folder / "answers.parquet", folder / "answers.csv"
    if not source.is_file():
        raise InvalidInputError(f"the run {folder.name!r} has no answers.parquet (yet)")
    if target.is_file() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    draft = folder / f"answers.csv.{time.monotonic_ns()}.tmp"
    try:
        RecordedRun(folder).write_csv(draft)
        draft.rename(target)
    except OSError as error:
        raise InvalidInputError(f"the answers can't be written as CSV: {error}") from None
    finally:
        draft.unlink(missing_ok=True)
    return target
