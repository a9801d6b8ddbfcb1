"""Worker processes that can't outlive their host, whatever ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends; elsewhere the pipe has to do.

    The pipe on standard input closes too when the parent ends, but a worker whose agent
    computes without a pause would notice only afterwards.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
