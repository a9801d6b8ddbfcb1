"""What is told of a run: status events, and its latest state in the bucket of runs."""

from __future__ import annotations

import time

from shared.bus import Bus
from shared.codec import CONTENT_TYPE, JSON_TYPE
from shared.errors import PopulaceError, RevisionConflictError
from shared.messages.scenario import PlannedEvent, RunInfo, ScenarioSpec, Status
from shared.streams import append_patiently, patiently
from shared.subjects import Subjects

_ATTEMPTS = 50


class SupersededError(PopulaceError):
    """Another process plays the run by now."""


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
    """Write a run's latest state, as the process that plays it.

    Raises:
        SupersededError: another process plays it by now.
        BusError: the broker does not take it, though it was tried for half a minute.
    """
    await patiently(lambda: _save_info(bus, subjects, info), f"the state of {info.run}")


async def _save_info(bus: Bus, subjects: Subjects, info: RunInfo) -> None:
    bucket = await bus.bucket(subjects.bucket_runs)
    for _ in range(_ATTEMPTS):
        entry = await bucket.get(info.run)
        if entry is not None:
            held = RunInfo.model_validate_json(entry.value)
            same = held.life == info.life and held.player != info.player
            if held.life > info.life or same:
                raise SupersededError(f"another process plays the run {info.run!r} by now")
        info.updated = time.time()
        try:
            revision = 0 if entry is None else entry.revision
            await bucket.write(info.run, info.model_dump_json().encode(), revision)
        except RevisionConflictError:
            continue
        return
    raise SupersededError(f"the state of the run {info.run!r} is written by many at once")


async def check_player(bus: Bus, subjects: Subjects, info: RunInfo) -> None:
    """Make sure that a run is still played by the process that its state names.

    Raises:
        SupersededError: another process plays it by now.
        BusError: the state can't be read.
    """
    held = await read_info(bus, subjects, info.run)
    if held is not None and (held.life, held.player) != (info.life, info.player):
        raise SupersededError(f"another process plays the run {info.run!r} by now")


async def take_over(bus: Bus, subjects: Subjects, info: RunInfo, before: RunInfo) -> bool:
    """Become the one who plays a run, unless its state was changed since it was read.

    Args:
        bus: the connection.
        subjects: the installation's.
        info: the state to write.
        before: the state as it was read.

    Returns:
        Whether that was so.
    """
    bucket = await bus.bucket(subjects.bucket_runs)
    entry = await bucket.get(info.run)
    if entry is None or RunInfo.model_validate_json(entry.value) != before:
        return False
    info.updated = time.time()
    try:
        await bucket.update(info.run, info.model_dump_json().encode(), entry.revision)
    except RevisionConflictError:
        return False
    return True


async def read_info(bus: Bus, subjects: Subjects, run: str) -> RunInfo | None:
    """A run's latest state, or None if there is no such run."""
    bucket = await bus.bucket(subjects.bucket_runs)
    entry = await bucket.get(run)
    return None if entry is None else RunInfo.model_validate_json(entry.value)


async def save_spec(bus: Bus, subjects: Subjects, spec: ScenarioSpec) -> None:
    """Keep the scenario of a run, so that it can be taken up again."""
    assert spec.run is not None
    bucket = await bus.bucket(subjects.bucket_specs)
    await bucket.put(spec.run, spec.model_dump_json(exclude_none=True).encode())


async def save_event(
    bus: Bus, subjects: Subjects, run: str, name: str, event: PlannedEvent
) -> None:
    """Keep something that is injected into a run."""
    bucket = await bus.bucket(subjects.bucket_specs)
    await bucket.put(f"{run}.{name}", event.model_dump_json(exclude_none=True).encode())


async def read_events(bus: Bus, subjects: Subjects, run: str) -> dict[str, PlannedEvent]:
    """What is kept of what was injected, by name."""
    bucket = await bus.bucket(subjects.bucket_specs)
    return {
        entry.key.removeprefix(f"{run}."): PlannedEvent.model_validate_json(entry.value)
        for entry in await bucket.entries(f"{run}.>")
    }


async def read_spec(bus: Bus, subjects: Subjects, run: str) -> ScenarioSpec | None:
    """The scenario of a run, or None if it isn't kept."""
    bucket = await bus.bucket(subjects.bucket_specs)
    entry = await bucket.get(run)
    return None if entry is None else ScenarioSpec.model_validate_json(entry.value)
