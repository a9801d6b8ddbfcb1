"""What a director does about runs that others play, without any process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.director.announce import SupersededError, check_player, save_info, save_spec
from services.director.director import Director
from shared.bus import MemoryBroker
from shared.messages.scenario import RunInfo, ScenarioSpec
from shared.settings import Settings
from shared.streams import ensure_streams


@pytest.fixture
async def director() -> Director:
    bus, settings = MemoryBroker().connect(), Settings()
    await ensure_streams(bus, settings.subjects)
    context: Any = SimpleNamespace(bus=bus, settings=settings, stopping=asyncio.Event())
    return Director(context)


async def played(director: Director, run: str, durability: Any = "none") -> RunInfo:
    """A run that somebody else plays."""
    spec = ScenarioSpec(name="x", scenario="games:Bell", run=run, durability=durability)
    await save_spec(director._bus, director._subjects, spec)
    info = RunInfo(run=run, name="x", state="running", player="theirs", director="another")
    await save_info(director._bus, director._subjects, info)
    return info


async def test_a_run_that_is_given_up_is_not_played_on(director: Director) -> None:
    """Its director merely hung, and the process that plays it is there: it learns of it."""
    theirs = await played(director, "r")
    await check_player(director._bus, director._subjects, theirs)
    await director._adopt(theirs)
    with pytest.raises(SupersededError):
        await check_player(director._bus, director._subjects, theirs)
    with pytest.raises(SupersededError):
        await save_info(director._bus, director._subjects, theirs)
