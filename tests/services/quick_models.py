"""The model service with a short time to acknowledge, so that a test need not wait a minute."""

from __future__ import annotations

import sys

from services.models import pool, server
from shared.service import run_service

if __name__ == "__main__":
    pool.ACK_WAIT = 3.0
    pool.STILL_AT_WORK = 1.0
    server._TURN = 1.5
    sys.exit(run_service("models", server.main))
