"""Scenario files that runs can be started from: found, described, estimated.

A scenario's code is never imported here: what needs it is asked of a process of its own.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shared.errors import InvalidInputError, PopulaceError

if TYPE_CHECKING:
    from services.manager.manager import Manager

_DEEPEST = 6
_MOST_FILES = 500
_LARGEST = 256 << 10
_FOUND_FOR = 10.0
_WITHIN = 60.0
_AT_ONCE = 2
_SKIPPED = frozenset({"node_modules", "site-packages", "runs", "__pycache__", "build", "dist"})


class ScenarioBook:
    """Finds scenario files below the folders from which code may come.

    Args:
        manager: whose.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._found: list[dict[str, Any]] = []
        self._looked = 0.0
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._described: dict[Path, tuple[Any, dict[str, Any]]] = {}
        """What files said, while they and the code beside them stay as they are."""

    async def all(self) -> list[dict[str, Any]]:
        """All scenario files, by name: file (below its root), name, what it says of itself."""
        if not self._found or time.monotonic() - self._looked > _FOUND_FOR:
            self._found = await asyncio.to_thread(find_scenarios, self._manager.settings.roots)
            self._looked = time.monotonic()
        return self._found

    async def path(self, file: str) -> Path:
        """A scenario file that was found.

        Raises:
            InvalidInputError: it is none of those.
        """
        for one in await self.all():
            if one["file"] == file:
                return Path(one["path"])
        raise InvalidInputError(f"there is no scenario file {file!r} below the code's folders")

    async def describe(self, file: str, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a scenario says, and a schema of its parameters.

        Raises:
            InvalidInputError: there is no such file, or it can't be used (with these overrides);
                the text says why.
        """
        path = await self.path(file)
        if overrides:
            return await self._ask("describe", path, *_set(overrides))
        state = await asyncio.to_thread(_state_of, path)
        held = self._described.get(path)
        if held is None or held[0] != state:
            held = self._described[path] = (state, await self._ask("describe", path))
        return copy.deepcopy(held[1])

    async def estimate(self, file: str, overrides: dict[str, Any]) -> dict[str, Any]:
        """What a run would ask of its models.

        Raises:
            InvalidInputError: it can't be told; the text says why.
        """
        return await self._ask("estimate", await self.path(file), *_set(overrides))

    async def report(self, run: str, out: Path) -> None:
        """Write the page on a recorded run.

        Raises:
            InvalidInputError: it can't be made; the text says why.
        """
        await self._run("report", run, "--out", str(out), "--json", within=5 * _WITHIN)

    async def _ask(self, verb: str, path: Path, *more: str) -> dict[str, Any]:
        said = await self._run(verb, str(path), "--json", *more, within=_WITHIN)
        try:
            found: dict[str, Any] = json.loads(said)
        except ValueError:
            raise PopulaceError(f"'populace {verb}' said something else: {said[:200]}") from None
        return found

    async def _run(self, *words: str, within: float) -> str:
        """Run a command of ``populace``; returns what it printed."""
        settings = self._manager.settings
        environment = {
            **os.environ,
            "POPULACE_HOME": str(settings.home.resolve()),
            "POPULACE_RUNS_DIR": str(settings.runs_dir.resolve()),
            "POPULACE_PERSONAS_DIR": str(settings.personas_dir.resolve()),
            "POPULACE_CODE_ROOTS": os.pathsep.join(map(str, settings.roots)),
            "COLUMNS": "200",
        }
        async with self._slots:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "populace",
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
            )
            try:
                out, complaint = await asyncio.wait_for(process.communicate(), within)
            except TimeoutError:
                raise InvalidInputError(
                    f"'populace {words[0]}' took more than {within:g} s"
                ) from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode:
            said = [line for line in complaint.decode("utf-8", "replace").splitlines() if line]
            why = said[-1] if said else f"it ended with code {process.returncode}"
            raise InvalidInputError(why.removeprefix("populace: ").removeprefix("error: "))
        return out.decode("utf-8", "replace")


def _state_of(path: Path) -> Any:
    """What changes when a scenario file, or code beside it, does."""
    files = [path, *sorted(path.parent.glob("*.py"))]
    return tuple((str(file), file.stat().st_mtime_ns) for file in files)


def _set(overrides: dict[str, Any]) -> list[str]:
    """Overrides as options of a command; JSON is YAML as well."""
    pairs = (f"{key}={json.dumps(value)}" for key, value in overrides.items())
    return [word for pair in pairs for word in ("--set", pair)]


def find_scenarios(roots: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Scenario files below some folders; hidden ones, and those deep down, are left out."""
    found: list[dict[str, Any]] = []
    for root in roots:
        for path in _yaml_files(root):
            try:
                if path.stat().st_size > _LARGEST:
                    continue
                text = path.read_text(encoding="utf-8")
                if "scenario:" not in text:
                    continue
                fields = yaml.safe_load(text)
            except (OSError, ValueError, yaml.YAMLError):
                continue
            if not isinstance(fields, dict) or not isinstance(fields.get("scenario"), str):
                continue
            if ":" not in fields["scenario"]:
                continue  # a sweep, say, names a scenario file
            about = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
            found.append(
                {
                    "file": str(path.relative_to(root)),
                    "path": str(path),
                    "name": str(fields.get("name", path.stem)),
                    "about": about[0] if about else "",
                }
            )
    return sorted(found, key=lambda one: one["file"])


def _yaml_files(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        folders[:] = (
            sorted(f for f in folders if not f.startswith(".") and f not in _SKIPPED)
            if depth < _DEEPEST
            else []
        )
        found += [Path(folder) / f for f in sorted(files) if f.endswith((".yaml", ".yml"))]
        if len(found) > _MOST_FILES:
            break
    return found[:_MOST_FILES]
