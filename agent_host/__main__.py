"""``python -m agent_host``: run this machine's host until SIGTERM."""

from __future__ import annotations

import sys

from agent_host.host import main
from shared.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("agent_host", main))
