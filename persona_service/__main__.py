"""``python -m persona_service``: serve populations until SIGTERM."""

from __future__ import annotations

import sys

from persona_service.service import main
from shared.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("persona_service", main))
