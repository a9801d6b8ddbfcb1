"""What is told of a run: status events, and its latest state in the bucket of runs."""

from __future__ import annotations

import asyncio
import time

from shared.bus import Bus
from shared.codec import CONTENT_TYPE, JSON_TYPE
from shared.errors import BusError
from shared.logs import get_logger
from shared.messages.scenario import RunInfo, Status
from shared.subjects import Subjects

_log = get_logger(__name__)

_ATTEMPTS = 8


async def publish_status(bus: Bus, subjects: Subjects, status: Status) -> None:
    """Store a status event in the runs' stream; subscribers see it too.

    Raises:
        BusError: the stream would not take it, though it was tried for half a minute.
    """
    data = status.model_dump_json(exclude_none=True).encode()
    name = f"{status.run}/{status.kind}/{status.time}"
    for attempt in range(_ATTEMPTS):
        try:
            await bus.append(
                subjects.run_status(status.run),
                data,
                headers={CONTENT_TYPE: JSON_TYPE},
                message_id=name,
            )
            return
        except BusError as error:
            if attempt == _ATTEMPTS - 1:
                raise
            _log.warning("a status is told again", kind=status.kind, error=str(error))
            await asyncio.sleep(min(10.0, 0.1 * 2**attempt))


async def save_info(bus: Bus, subjects: Subjects, info: RunInfo) -> None:
    """Write a run's latest state."""
    info.updated = time.time()
    bucket = await bus.bucket(subjects.bucket_runs)
    await bucket.put(info.run, info.model_dump_json().encode())


async def read_info(bus: Bus, subjects: Subjects, run: str) -> RunInfo | None:
    """A run's latest state, or None if there is no such run."""
    bucket = await bus.bucket(subjects.bucket_runs)
    entry = await bucket.get(run)
    return None if entry is None else RunInfo.model_validate_json(entry.value)
