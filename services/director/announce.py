"""What is told of a run: status events, and its latest state in the bucket of runs."""

from __future__ import annotations

import time

from shared.bus import Bus
from shared.codec import CONTENT_TYPE, JSON_TYPE
from shared.messages.scenario import RunInfo, Status
from shared.streams import append_patiently
from shared.subjects import Subjects


async def publish_status(bus: Bus, subjects: Subjects, status: Status) -> None:
    """Store a status event in the runs' stream; subscribers see it too.

    Raises:
        BusError: the stream would not take it, though it was tried for half a minute.
    """
    data = status.model_dump_json(exclude_none=True).encode()
    name = f"{status.run}/{status.kind}/{status.time}"
    await append_patiently(
        bus,
        subjects.run_status(status.run),
        data,
        headers={CONTENT_TYPE: JSON_TYPE},
        message_id=name,
    )


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
