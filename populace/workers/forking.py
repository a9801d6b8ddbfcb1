"""Having processes forked by a nursery (``nursery.py``), and following them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Forked:
    """A forked process, with what its owner needs of asyncio's own ``Process``."""

    name: str
    _write: Callable[[dict[str, str]], None]
    pid: int = 0
    returncode: int | None = None
    ready: asyncio.Future[str] = field(default_factory=asyncio.Future)
    """An error's text, or nothing, once it says that it is ready."""
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _doomed: int = 0

    async def wait(self) -> int:
        """Wait until it ends; returns its exit code, or less the signal's number."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def tell(self, word: str) -> None:
        """Say a word (one line) to it, if it still lives."""
        if self.returncode is None:
            self._write({"name": self.name, "word": word})

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Make it end."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.returncode is not None:
            return
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        else:  # it is about to be forked
            self._doomed = max(self._doomed, number, key=lambda n: n == signal.SIGKILL)

    def start(self, pid: int) -> None:
        """Note that it has started."""
        self.pid = pid
        if self._doomed:
            self._signal(self._doomed)

    def end(self, code: int, why: str = "") -> None:
        """Note that it has ended."""
        if self.returncode is None:
            self.returncode = code
            self._ended.set()
            if not self.ready.done():
                self.ready.set_result(why or f"it ended with code {code}")


HASH_SEED = "PYTHONHASHSEED"
"""The environment variable from which the order of sets of texts follows, and ``hash``."""


class Nursery:
    """Starts a nursery when it is first needed, and again if it dies, and follows what it says.

    Args:
        module: of the children, see ``Child``.
        environment: of the nursery and its children; this process's own if it is None.
    """

    def __init__(self, module: str, environment: dict[str, str] | None = None) -> None:
        self._module = module
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._children: dict[str, Forked] = {}
        """Those of the nursery that there is now."""
        self._reader: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Have a nursery, so that the first child need not wait for its imports.

        Raises:
            OSError: it can't be started.
        """
        async with self._lock:
            if self._process is not None and self._process.returncode is None:
                return
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "populace.workers.nursery",
                self._module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # A choice of the user's stands. Else what agents do must not follow from what is
                # chance, and another in each process.
                env={HASH_SEED: "0", **(self._environment or os.environ)},
            )
            self._children = {}
            follow = self._follow(self._process, self._children)
            self._reader = asyncio.ensure_future(follow)

    async def fork(self, name: str, order: str) -> Forked:
        """Have a process made; it is still starting when this returns.

        Raises:
            OSError: the nursery can't be started.
        """
        await self.start()
        child = self._children[name] = Forked(name, self._write)
        self._write({"name": name, "order": order})
        return child

    def _write(self, line: dict[str, str]) -> None:
        # What is written to a nursery that has just died is answered by ``_follow``.
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(line).encode() + b"\n")

    @staticmethod
    async def _follow(process: asyncio.subprocess.Process, children: dict[str, Forked]) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said: dict[str, Any] = json.loads(line)
            child = children.get(said["name"])
            if child is None:
                continue
            if "pid" in said:
                child.start(said["pid"])
            elif "code" in said:
                del children[said["name"]]
                child.end(said["code"])
            elif not child.ready.done():
                child.ready.set_result(said["ready"])
        await process.wait()
        for child in children.values():  # those that still live are told by their lifeline
            child.end(-signal.SIGKILL, "its nursery died")

    async def stop(self) -> None:
        """End it; its children's lifelines close with it."""
        if self._process is not None and self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), 5)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._reader is not None:
            await self._reader
