"""``python -m services.recorder``: the recorder, until SIGTERM."""

from __future__ import annotations

import sys

from services.recorder.recorder import main
from shared.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("recorder", main))
