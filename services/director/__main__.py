"""``python -m services.director``: a director, until SIGTERM."""

from __future__ import annotations

import sys

from services.director.director import main
from shared.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("director", main))
