"""The persona service with a short time to acknowledge, so that a test need not wait."""

from __future__ import annotations

import sys

from persona_service import crew, service
from shared.service import run_service

if __name__ == "__main__":
    crew.ACK_WAIT = 2.0
    crew.STILL_AT_WORK = 0.5
    sys.exit(run_service("persona_service", service.main))
