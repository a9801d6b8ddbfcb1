"""``python -m env_service``: hold environments until SIGTERM."""

from __future__ import annotations

import sys

from env_service.keeper import main
from shared.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("env_service", main))
