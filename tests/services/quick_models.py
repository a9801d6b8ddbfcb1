"""The model service with a short time to acknowledge, so that a test need not wait a minute."""

from __future__ import annotations

import sys

from services.models import server
from shared.service import run_service

if __name__ == "__main__":
    server._ACK_WAIT = 3.0
    server._STILL_AT_WORK = 1.0
    sys.exit(run_service("models", server.main))
