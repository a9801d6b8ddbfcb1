"""Having a population written by the persona services, from any program with a bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from shared.bus import Bus
from shared.errors import BusError, BusTimeoutError
from shared.messages.persona import EnrichRequest, JobInfo, JobRequest
from shared.service import ask
from shared.settings import Settings

_BEGIN_WITHIN = 180.0
_LOOK_EVERY = 0.5
_ANSWER_WITHIN = 3.0
_AWAY = 60.0


async def write_people(
    bus: Bus, settings: Settings, request: EnrichRequest
) -> AsyncIterator[JobInfo]:
    """Begin (or go on) to have people written; tells how far it is until it is over.

    Raises:
        RemoteError: the services refused; the text is their own.
        BusError: no persona service answered for a minute.
    """
    subject = settings.subjects.persona("enrich")
    info = await ask(bus, subject, request, JobInfo, timeout=_BEGIN_WITHIN, patience=_AWAY / 4)
    yield info
    while not info.over:
        await asyncio.sleep(_LOOK_EVERY)
        info = await people_job(bus, settings, request.name)
        yield info


async def people_job(bus: Bus, settings: Settings, name: str, *, cancel: bool = False) -> JobInfo:
    """How far the writing of a population is; with ``cancel`` it is stopped.

    Raises:
        RemoteError: no such population was ever written.
        BusError: no persona service answered for a minute.
    """
    asked = JobRequest(name=name, action="cancel" if cancel else "status")
    deadline = asyncio.get_running_loop().time() + _AWAY
    while True:
        try:
            return await ask(
                bus,
                settings.subjects.persona("job"),
                asked,
                JobInfo,
                timeout=_ANSWER_WITHIN,
                patience=_AWAY,
            )
        except BusTimeoutError as error:
            # The broker gave the question to a service that has just died.
            if asyncio.get_running_loop().time() > deadline:
                raise BusError(f"no persona service answers: {error}") from error
