"""``python -m services.manager``: the manager, until SIGTERM."""

from __future__ import annotations

import sys

from services.manager.manager import main
from shared.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("manager", main))
