"""The streams of the installation, and their limits."""

from __future__ import annotations

from shared.bus import Bus, StreamSpec
from shared.subjects import Subjects


def scenarios_stream(subjects: Subjects) -> StreamSpec:
    """Keeps scenario events until a director has taken them."""
    return StreamSpec(
        subjects.stream_scenarios,
        (subjects.scenario_event,),
        work_queue=True,
        max_bytes=256 << 20,
        max_age=30 * 86400.0,
        description="Scenarios that wait for a director",
    )


def runs_stream(subjects: Subjects) -> StreamSpec:
    """Keeps status and results of runs; the oldest go first beyond 2 GB or a week."""
    return StreamSpec(
        subjects.stream_runs,
        (subjects.run_status(), subjects.run_results("*")),
        max_bytes=2 << 30,
        max_age=7 * 86400.0,
        description="Status and results of runs",
    )


def models_stream(subjects: Subjects) -> StreamSpec:
    """Holds prompts until they are answered; full, it refuses more, and askers wait."""
    return StreamSpec(
        subjects.stream_models,
        (subjects.model_queue(),),
        work_queue=True,
        max_bytes=1 << 30,
        max_age=86400.0,
        description="Prompts that wait for a model",
    )


async def ensure_streams(bus: Bus, subjects: Subjects) -> None:
    """Make all streams that aren't there; any process may be the first to come.

    Raises:
        BusError: the broker has no JetStream, or refuses.
    """
    for make in (scenarios_stream, runs_stream, models_stream):
        await bus.ensure_stream(make(subjects))
