"""The recorder itself: what it does when its broker, its disk or another recorder is in its way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.recorder import recorder as recording
from services.recorder.recorder import RunRecorder
from shared.bus import Bus, MemoryBroker
from shared.errors import BusError, PopulaceError
from shared.service import ServiceContext
from shared.settings import Settings
from shared.streams import ensure_streams
from tests.conftest import wait_until


class Context(ServiceContext):
    """A service's, on a bus of any kind."""

    def __init__(self, bus: Bus, runs: Path) -> None:
        super().__init__("recorder", Settings(runs_dir=runs), bus)  # type: ignore[arg-type]

    async def announce(self, *_: Any, **__: Any) -> None:
        """Nobody looks."""


@pytest.fixture
async def bus() -> Bus:
    made = MemoryBroker().connect()
    await ensure_streams(made, Settings().subjects)
    return made


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_AGAIN_AFTER", "_ANEW_AFTER", "_FLUSH_EVERY", "_TAKEN_WITHIN"):
        monkeypatch.setattr(recording, name, 0.01)


async def test_a_broker_that_takes_no_word_ends_no_recording(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, and the run can't be told: it is tried again all the same."""
    recorder = RunRecorder(Context(bus, tmp_path))
    recorder._trying = "r"
    tries = []

    async def consumer(*_: Any, **__: Any) -> Any:
        tries.append(1)
        raise OSError(28, "No space left on device")

    async def tell(*_: Any, **__: Any) -> None:
        raise BusError("the stream does not answer")

    monkeypatch.setattr(bus, "consumer", consumer)
    monkeypatch.setattr(recorder, "_tell", tell)
    running = asyncio.ensure_future(recorder.run())
    await wait_until(lambda: len(tries) > 2)
    assert not running.done()
    recorder._context.stopping.set()
    await running


async def test_a_recording_that_ends_by_itself_ends_the_service(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = RunRecorder(Context(bus, tmp_path))

    async def follow() -> None:
        raise RuntimeError("nobody thought of that")

    monkeypatch.setattr(recorder, "_follow", follow)
    with pytest.raises(PopulaceError, match="nobody thought of that"):
        await recorder.run()
