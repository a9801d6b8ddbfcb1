"""Starting, finding and ending the processes of a stack.

Every process that is started, and every child of it, carries the mark of its stack in its
environment; so all can be found again, even if whoever started them was killed before it
could write anything down.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from populace.stack.state import ProcessRecord

MARK = "POPULACE_STACK"
"""The environment variable that names the stack's folder."""


def start(
    name: str, command: list[str], *, mark: str, log: Path, environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], ProcessRecord]:
    """Start a process of the stack in a session of its own, its output in a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment, MARK: mark},
        )
    return process, ProcessRecord(name, process.pid, psutil.Process(process.pid).create_time())


def is_alive(record: ProcessRecord) -> bool:
    """Whether this very process still runs."""
    return _find(record) is not None


def _find(record: ProcessRecord) -> psutil.Process | None:
    try:
        process = psutil.Process(record.pid)
        if abs(process.create_time() - record.created) > 1.0:
            return None  # the number was given to another
        return process if _runs(process) else None
    except psutil.Error:
        return None


def marked(mark: str) -> list[psutil.Process]:
    """All living processes of a stack, other than this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end(processes: Iterable[psutil.Process], within: float) -> int:
    """Ask processes to end, and kill those that don't in time; returns how many were killed."""
    held = list(processes)
    for process in held:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    late = _wait(held, within)
    for process in late:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _wait(late, 5.0)
    return len(late)


def _wait(held: list[psutil.Process], within: float) -> list[psutil.Process]:
    """Wait for processes to end; returns those that did not.

    A process that has ended but was not collected by its parent counts as ended: the parent
    may be an init that looks only now and then.
    """
    deadline = time.monotonic() + within
    while True:
        held = [p for p in held if _runs(p)]
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end_recorded(records: Iterable[ProcessRecord], within: float) -> int:
    """The same for recorded processes."""
    return end([p for p in map(_find, records) if p is not None], within)
