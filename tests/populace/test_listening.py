"""What durable listeners make of handlers that fail, and of events that can't be read."""

from __future__ import annotations

import asyncio
import time

from populace._runtime.listening import Listening
from populace.events import Event
from shared.bus import MemoryBroker
from shared.codec import pack_plain
from shared.settings import Settings
from shared.streams import ensure_streams


def told(number: int) -> bytes:
    fields = {"name": "say", "path": "room", "round": 1, "number": number, "by": ""}
    return pack_plain({**fields, "arguments": {}, "value": None})


async def test_a_durable_listener_goes_on_whatever_an_event_leads_to() -> None:
    """A handler whose call was cancelled has failed, as one that raised; nothing waits for it."""
    bus, subjects = MemoryBroker().connect(), Settings().subjects
    await ensure_streams(bus, subjects)
    listening = Listening(bus, subjects, "r", 1)
    heard: list[int] = []

    async def hear(event: Event) -> None:
        heard.append(event.number)
        if event.number == 1:
            call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            call.cancel()
            await call
        if event.number == 2:
            raise ValueError("no such luck")

    await listening.add("room", "say", hear, durable="diary", when="round < 2")
    subject = subjects.env_event("r", "say", "room")
    for data in (told(1), b"\xc1", pack_plain({"name": "say"}), told(2), told(3)):
        await bus.append(subject, data)
    assert await listening.caught_up(time.monotonic() + 20)
    assert heard == [1, 2, 3]
    assert len(listening._tasks) == 1
    await listening.close()
    assert not listening._tasks
