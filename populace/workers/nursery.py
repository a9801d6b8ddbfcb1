"""The nursery: a process that has imported everything, and forks a worker per request.

Populations whose agents each get a process of their own need many workers. A fresh Python takes
half a second of CPU and some 50 MB for its imports; a fork takes milliseconds, and shares what
was imported. The nursery is single-threaded and runs no event loop, so forking it is safe.

The host sends a line of JSON per worker. The nursery answers ``{"started", "pid"}`` and
``{"ended", "code"}``, and each worker adds its own ``{"ready", "error"}``, through one pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import select
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from populace.workers.lifeline import die_with_parent
from shared.errors import PopulaceError
from shared.logs import configure_logs, get_logger
from shared.messages.control import Assignment
from shared.settings import load_settings

_log = get_logger(__name__)


# The host's side
@dataclass(eq=False)
class Forked:
    """A forked worker, with what the host needs of asyncio's own ``Process``."""

    pid: int = 0
    returncode: int | None = None
    ready: asyncio.Future[str] = field(default_factory=asyncio.Future)
    """An error's text, or nothing, once the worker listens."""
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> int:
        """Wait until it ends; returns its exit code, or less the signal's number."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Make it end."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.returncode is None and self.pid:
            os.kill(self.pid, number)

    def end(self, code: int) -> None:
        """Note that it has ended."""
        if self.returncode is None:
            self.returncode = code
            self._ended.set()
            if not self.ready.done():
                self.ready.set_result(f"it ended with code {code}")


class Nursery:
    """Starts the nursery when it is first needed, and follows what it says."""

    def __init__(self, environment: dict[str, str] | None) -> None:
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._children: dict[str, Forked] = {}
        self._reader: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def fork(self, assignment: Assignment) -> Forked:
        """Have a worker made; it is still starting when this returns.

        Raises:
            PopulaceError: the nursery can't be reached.
        """
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                await self._start()
        assert self._process is not None
        stdin = self._process.stdin
        assert stdin is not None
        child = self._children[assignment.worker] = Forked()
        try:
            stdin.write(assignment.model_dump_json().encode() + b"\n")
            await stdin.drain()
        except OSError as error:
            self._children.pop(assignment.worker, None)
            raise PopulaceError(f"a worker could not be forked: {error}") from None
        return child

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "populace.workers.nursery",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
        )
        self._reader = asyncio.ensure_future(self._follow(self._process))

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said: dict[str, Any] = json.loads(line)
            child = self._children.get(said["worker"])
            if child is None:
                continue
            if "pid" in said:
                child.pid = said["pid"]
            elif "code" in said:
                del self._children[said["worker"]]
                child.end(said["code"])
            elif not child.ready.done():
                child.ready.set_result(said["error"])
        await process.wait()
        left, self._children = self._children, {}
        for child in left.values():  # the kernel ends them with their parent
            child.end(-signal.SIGKILL)

    async def stop(self) -> None:
        """End it; its children end with it."""
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
def _say(out: int, worker: str, **said: Any) -> None:
    # Short lines are written as one, so that those of many processes don't mix.
    line = json.dumps({"worker": worker, **said})
    if len(line) > 2000:
        line = json.dumps({"worker": worker, "error": str(said.get("error"))[:1000]})
    os.write(out, line.encode() + b"\n")


def _reap(out: int, children: dict[int, str]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _say(out, children.pop(pid), code=os.waitstatus_to_exitcode(status))


def _fork(
    line: bytes, out: int, children: dict[int, str], lifeline: int, own: tuple[int, ...]
) -> None:
    assignment = Assignment.model_validate_json(line)
    pid = os.fork()
    if pid:
        children[pid] = assignment.worker
        _say(out, assignment.worker, pid=pid)
        return
    code = 1
    try:
        for held in own:
            os.close(held)
        code = _live(assignment, out, lifeline)
    except BaseException as error:
        with contextlib.suppress(OSError):
            _say(out, assignment.worker, error=f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _live(assignment: Assignment, out: int, lifeline: int) -> int:
    """A forked worker's life."""
    from populace.workers.process import serve_assignment

    die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return serve_assignment(
        load_settings(),
        assignment,
        lifeline,
        lambda error: _say(out, assignment.worker, error=error),
    )


def main() -> int:
    """Fork a worker per line on standard input, until it closes."""
    import populace.workers.process  # noqa: F401 - what the children would import

    die_with_parent()
    out = os.dup(1)
    os.dup2(2, 1)
    configure_logs(load_settings(), service="worker")
    children: dict[int, str] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # The children wait for the end of a pipe whose other end only this process holds.
    lifeline, held = os.pipe()
    gc.collect()
    gc.freeze()
    pending = b""
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _reap(out, children)
        if 0 in readable:
            data = os.read(0, 1 << 16)
            if not data:
                return 0
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                _fork(line, out, children, lifeline, (held, woken, wake))


if __name__ == "__main__":
    sys.exit(main())
