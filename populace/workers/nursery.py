"""The nursery: a process that has imported everything, and forks a child per request.

A fresh Python takes a second of CPU and some 50 MB for its imports; a fork takes milliseconds, and
shares what was imported. The nursery is single-threaded and runs no event loop, so forking it is
safe. A host's nursery forks workers, a director's the processes that play runs.

Its owner sends lines of JSON: ``{"name", "order"}`` asks for a child, ``{"name", "word"}`` passes
a word on to one. The nursery answers ``{"name", "pid"}`` and ``{"name", "code"}``, and a child may
say ``{"name", "ready"}`` itself, through the same pipe.
"""

from __future__ import annotations

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
        lifeline = ours = -1
        try:
            lifeline, ours = os.pipe()
            os.set_blocking(ours, False)
            pid = os.fork()
        except OSError as error:  # no more processes, files or memory: that child's trouble alone
            for end in (lifeline, ours):
                if end >= 0:
                    os.close(end)
            _say(self._out, name, ready=f"it could not be forked: {error}")
            _say(self._out, name, code=1)
            return
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
