"""The nursery: a process that has imported everything, and forks a child per request.

A fresh Python takes a second of CPU and some 50 MB for its imports; a fork takes milliseconds, and
shares what was imported. The nursery is single-threaded and runs no event loop, so forking it is
safe. A host's nursery forks workers, a director's the processes that play runs.

Its owner sends lines of JSON: ``{"name", "order"}`` asks for a child, ``{"name", "word"}`` passes
a word on to one. The nursery answers ``{"name", "pid"}`` and ``{"name", "code"}``, and a child may
say ``{"name", "ready"}`` itself, through the same pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from populace.workers.lifeline import die_with_parent
from shared.logs import configure_logs
from shared.settings import load_settings


class Child(Protocol):
    """What a module offers whose processes a nursery forks."""

    SERVICE: str
    """What its logs are headed."""

    @staticmethod
    def live(order: str, lifeline: int, say: Callable[[str], None]) -> int:
        """Live a child's life; returns the exit code.

        Args:
            order: what it is to do.
            lifeline: a pipe that brings its owner's words, a line each, and closes when the owner
                or the nursery is gone.
            say: called once with an empty text when it is ready, or with why it can't be.
        """


# The owner's side
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
                env=self._environment,
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


# The nursery's own side
def _say(out: int, name: str, **said: Any) -> None:
    # Short lines are written as one, so that those of many processes don't mix.
    line = json.dumps({"name": name, **said})
    if len(line) > 2000:
        line = json.dumps({"name": name, "ready": str(said.get("ready"))[:1000]})
    os.write(out, line.encode() + b"\n")


class _Children:
    """The nursery's children, and what it holds for them."""

    def __init__(self, module: Child, out: int, held: tuple[int, ...]) -> None:
        self._module = module
        self._out = out
        self._held = held
        """What no child may hold: it would keep its siblings' lifelines open."""
        self._names: dict[int, str] = {}
        self._lifelines: dict[str, int] = {}

    def take(self, line: bytes) -> None:
        """Do what a line of the owner's says."""
        told = json.loads(line)
        if "order" in told:
            self._fork(told["name"], told["order"])
        elif (lifeline := self._lifelines.get(told["name"])) is not None:
            with contextlib.suppress(OSError):
                os.write(lifeline, told["word"].encode() + b"\n")

    def reap(self) -> None:
        """Tell of those that have ended."""
        while self._names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            name = self._names.pop(pid)
            os.close(self._lifelines.pop(name))
            _say(self._out, name, code=os.waitstatus_to_exitcode(status))

    def _fork(self, name: str, order: str) -> None:
        lifeline, ours = os.pipe()
        os.set_blocking(ours, False)
        pid = os.fork()
        if pid:
            os.close(lifeline)
            self._names[pid] = name
            self._lifelines[name] = ours
            _say(self._out, name, pid=pid)
            return
        code = 1
        try:
            for held in (*self._held, ours, *self._lifelines.values()):
                os.close(held)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            code = self._module.live(
                order, lifeline, lambda error: _say(self._out, name, ready=error)
            )
        except BaseException as error:
            with contextlib.suppress(OSError):
                _say(self._out, name, ready=f"{type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _allow_many_files() -> None:
    """A child's lifeline is an open file; thousands are more than most shells allow at first."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(module: str) -> int:
    """Fork a child of a module's per order on standard input, until it closes."""
    die_with_parent()
    child: Any = importlib.import_module(module)
    out = os.dup(1)
    os.dup2(2, 1)
    configure_logs(load_settings(), service=child.SERVICE)
    _allow_many_files()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    children = _Children(child, out, (woken, wake))
    gc.collect()
    gc.freeze()
    pending = b""
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            children.reap()
        if 0 in readable:
            data = os.read(0, 1 << 16)
            if not data:
                return 0
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                children.take(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
