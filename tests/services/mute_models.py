"""The model service, which never says that it is still at work: the broker takes it for dead."""

from __future__ import annotations

import sys

from services.models import pool, server
from shared.service import run_service

if __name__ == "__main__":
    pool.ACK_WAIT = 1.0
    pool.STILL_AT_WORK = 1000.0
    sys.exit(run_service("models", server.main))
