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


async def test_runs_whose_director_hangs_are_found_at_once(
    director: Director, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are: all are asked after together, and the wait delays no later look."""
    count, clock = 20, 0.0
    for number in range(count):
        await played(director, f"r{number}")
    together = asyncio.Barrier(count)

    async def silent(run: str) -> bool:
        nonlocal clock
        await together.wait()
        clock += 100.0
        return False

    adopted: list[str] = []
    all_adopted = asyncio.Event()

    async def adopt(info: RunInfo) -> None:
        adopted.append(info.run)
        if len(adopted) == count:
            all_adopted.set()

    monkeypatch.setattr(director, "_is_played", silent)
    monkeypatch.setattr(director, "_adopt", adopt)
    monkeypatch.setattr("services.director.director.time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr("services.director.director._LOOK_EVERY", 0.0)
    looking = asyncio.ensure_future(director._look_after_others())
    try:
        async with asyncio.timeout(20):
            await all_adopted.wait()
    finally:
        looking.cancel()
    assert sorted(adopted) == sorted(f"r{number}" for number in range(count))
