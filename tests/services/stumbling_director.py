"""The director's service, which can't keep the first scenario for a moment, and dies of a second.

Both happen after the run is on record, and before it begins.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from services.director import director
from shared.errors import BusError
from shared.service import run_service

if __name__ == "__main__":
    original, stumbled = director.save_spec, False

    async def save_spec(bus: Any, subjects: Any, spec: Any) -> None:
        global stumbled
        if "killed" in spec.name and not os.path.exists(spec.name):
            open(spec.name, "w").close()
            await asyncio.sleep(0.2)  # whoever handed the scenario in gets an answer
            os._exit(9)
        if not stumbled:
            stumbled = True
            raise BusError("no leader")
        await original(bus, subjects, spec)

    director.save_spec = save_spec
    sys.exit(run_service("director", director.main))
