"""The streams of the installation, and their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.bus import Bus, StreamSpec
from shared.errors import BusError, RevisionConflictError
from shared.logs import get_logger
from shared.subjects import Subjects

_log = get_logger(__name__)

_ATTEMPTS = 8
_WAITS = (2.0, 4.0, 8.0)

T = TypeVar("T")


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
        (subjects.run_status(), subjects.run_results("*"), subjects.run_messages("*")),
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


def kept_stream(subjects: Subjects) -> StreamSpec:
    """Keeps models' answers; the oldest go first beyond 4 GB or 30 days."""
    return StreamSpec(
        subjects.stream_kept,
        (subjects.model_kept(),),
        max_bytes=4 << 30,
        max_age=30 * 86400.0,
        compressed=True,
        description="Models' answers, by run",
    )


def cache_stream(subjects: Subjects) -> StreamSpec:
    """Keeps models' answers for other runs; the oldest go first beyond 2 GB or 90 days."""
    return StreamSpec(
        subjects.stream_cache,
        (subjects.model_cache(),),
        max_bytes=2 << 30,
        max_age=90 * 86400.0,
        compressed=True,
        description="Models' answers, by what was asked",
    )


def events_stream(subjects: Subjects) -> StreamSpec:
    """Keeps environments' events; the oldest go first beyond 1 GB or a day."""
    return StreamSpec(
        subjects.stream_events,
        (subjects.env_event("*", "*", ">"),),
        max_bytes=1 << 30,
        max_age=86400.0,
        description="Events of environments",
    )


def journal_stream(subjects: Subjects) -> StreamSpec:
    """Keeps what was done to environments; owners remove it when their run is over."""
    return StreamSpec(
        subjects.stream_journal,
        (subjects.env_journal("*", ">"),),
        max_bytes=2 << 30,
        max_age=7 * 86400.0,
        description="Journals of environments",
    )


def states_stream(subjects: Subjects) -> StreamSpec:
    """Keeps runs' states; full, it refuses more, and runs pause."""
    return StreamSpec(
        subjects.stream_states,
        (subjects.run_state(),),
        keep=True,
        max_bytes=4 << 30,
        max_age=30 * 86400.0,
        compressed=True,
        description="What runs held at the end of a round",
    )


def persona_work_stream(subjects: Subjects) -> StreamSpec:
    """Holds what persona services have to do; full, it refuses more, and they wait."""
    return StreamSpec(
        subjects.stream_persona_work,
        (subjects.persona_job(), subjects.persona_part()),
        work_queue=True,
        max_bytes=512 << 20,
        max_age=30 * 86400.0,
        description="People that wait to be written",
    )


def persona_written_stream(subjects: Subjects) -> StreamSpec:
    """Keeps people that were written until their population is stored."""
    return StreamSpec(
        subjects.stream_persona_written,
        (subjects.persona_written(),),
        keep=True,
        max_bytes=2 << 30,
        max_age=30 * 86400.0,
        description="People that were written",
    )


async def ensure_streams(bus: Bus, subjects: Subjects) -> None:
    """Make all streams that aren't there; any process may be the first to come.

    Raises:
        BusError: the broker has no JetStream, or refuses, though it was tried for a while.
    """
    for make in (
        scenarios_stream,
        runs_stream,
        models_stream,
        events_stream,
        journal_stream,
        states_stream,
        kept_stream,
    ):
        await ensure_stream(bus, make(subjects))


async def ensure_stream(bus: Bus, spec: StreamSpec) -> None:
    """Make a stream, trying for a while: a cluster that has lost a node needs some seconds.

    Raises:
        BusError: it can't be made.
    """
    await patiently(lambda: bus.ensure_stream(spec), f"the stream {spec.name}")


async def append_patiently(
    bus: Bus, subject: str, data: bytes, *, headers: dict[str, str], message_id: str
) -> int:
    """Store a message in its stream, trying again for about half a minute.

    Returns:
        Its sequence number in the stream.

    Raises:
        BusError: the stream would not take it; the last attempt's reason.
    """
    # What was on its way when a cluster's node died is never answered; named, a message is stored
    # once however often it is sent.
    waits = iter(_WAITS) if message_id else iter(())
    return await patiently(
        lambda: bus.append(
            subject, data, headers=headers, message_id=message_id, timeout=next(waits, 10.0)
        ),
        f"storing a message on {subject}",
    )


async def patiently(work: Callable[[], Awaitable[T]], what: str) -> T:
    """Do something with the broker, trying again for about half a minute.

    A broker that starts again, or a cluster that has lost one of its nodes, answers nothing for a
    few seconds.

    Args:
        work: what is done; it must do no harm if it is done twice.
        what: in words, for the log.

    Raises:
        BusError: the last attempt's.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return await work()
        except RevisionConflictError:
            raise
        except BusError as error:
            if attempt == _ATTEMPTS:
                raise
            _log.warning("trying again", what=what, error=str(error))
            await asyncio.sleep(min(10.0, 0.1 * 2 ** (attempt - 1)))
    raise AssertionError("the loop above ends by itself")
