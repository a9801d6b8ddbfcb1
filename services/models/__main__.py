"""``python -m services.models``: a model worker, until SIGTERM."""

from __future__ import annotations

import sys

from services.models.server import main
from shared.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("models", main))
