"""The recorder itself: what it does when its broker, its disk or another recorder is in its way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from populace._runtime.records import batch_of
from populace.recorded import RecordedRun
from services.recorder import recorder as recording
from services.recorder.recorder import RunRecorder
from shared.bus import Bus, Delivery, MemoryBroker, NatsBus
from shared.codec import pack_plain
from shared.errors import BusError, PopulaceError
from shared.ids import is_token
from shared.messages.scenario import RoundRow, Status
from shared.service import ServiceContext
from shared.settings import Settings
from shared.streams import ensure_streams
from tests.conftest import Broker, wait_until


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


SUBJECTS = Settings().subjects


async def tell(bus: Bus, kind: Any, run: str = "r", **more: Any) -> None:
    status = Status(kind=kind, run=run, **more)
    await bus.append(SUBJECTS.run_status(run), status.model_dump_json(exclude_none=True).encode())


async def answer(bus: Bus, values: list[float], round_number: int = 1, run: str = "r") -> None:
    columns = batch_of(
        round_number=round_number,
        population="p",
        method="m",
        call=round_number,
        batch=f"{round_number}/{values}",
        life=1,
        agents=list(range(len(values))),
        values=values,
        errors=[],
    )
    await bus.append(SUBJECTS.run_results(run, round_number), pack_plain({**columns, "run": run}))


async def play(bus: Bus, values: list[float], run: str = "r", **more: Any) -> None:
    """What is told of a run of one round, from beginning to end."""
    await tell(bus, "accepted", run, name="game", **more)
    await tell(bus, "started", run, manifest={"seed": 1})
    await answer(bus, values, run=run)
    row = RoundRow(round=1, answers=len(values), failed=0, values={})
    await tell(bus, "round_finished", run, row=row)
    await tell(bus, "ended", run, state="finished", records=len(values))


async def heard(bus: Bus, kind: str, run: str = "r") -> list[Status]:
    """What was told of a run so far, of a kind."""
    read = bus.read(SUBJECTS.stream_runs, (SUBJECTS.run_status(run),))
    statuses = [Status.model_validate_json(m.data) async for m in read]
    return [status for status in statuses if status.kind == kind]


async def until_recorded(bus: Bus, run: str = "r", times: int = 1) -> list[Status]:
    """Wait until it was told so many times that a run is recorded."""
    async with asyncio.timeout(20):
        while len(told := await heard(bus, "recorded", run)) < times:
            await asyncio.sleep(0.01)
    return told


@contextlib.asynccontextmanager
async def recording_of(bus: Bus, runs: Path) -> AsyncIterator[RunRecorder]:
    recorder = RunRecorder(Context(bus, runs))
    running = asyncio.ensure_future(recorder.run())
    yield recorder
    recorder._context.stopping.set()
    await running


def values_of(folder: Path) -> list[float | None]:
    return RecordedRun(folder).to_arrow()["value"].to_pylist()


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


async def test_a_run_with_the_name_of_one_whose_files_are_there(bus: Bus, tmp_path: Path) -> None:
    """The broker's data was wiped, say, and the files stayed."""
    run = "r" * 60
    async with recording_of(bus, tmp_path):
        await play(bus, [1.0, 2.0], run)
        await until_recorded(bus, run)
        await bus.purge(SUBJECTS.stream_runs, SUBJECTS.run_status(run))
        await play(bus, [3.0], run)
        (told,) = await until_recorded(bus, run)
    assert told.records == 1
    assert values_of(tmp_path / run) == [3.0]
    (aside,) = [p for p in tmp_path.iterdir() if p.name != run]
    assert is_token(aside.name)
    assert "-before-" in aside.name
    assert values_of(aside) == [1.0, 2.0]


async def test_a_beginning_that_comes_again_is_no_other_run(bus: Bus, tmp_path: Path) -> None:
    """The acknowledgement of what was told first was lost, of one of two directors."""
    folder = tmp_path / "r"
    async with recording_of(bus, tmp_path):
        await tell(bus, "accepted", time=1.0)
        await play(bus, [1.0], time=2.0)
        await until_recorded(bus)
        for time in (1.0, 2.0):
            await tell(bus, "accepted", time=time)
        await play(bus, [2.0], "other")
        await until_recorded(bus, "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "r"]
    assert json.loads((folder / "manifest.json").read_text())["accepted"] == 2.0


async def event(bus: Bus, number: int, round_number: int, life: int = 1) -> None:
    told = {"path": "hall", "name": "bell", "by": "", "arguments": {}, "value": life}
    told |= {"number": number, "round": round_number, "life": life}
    await bus.append(SUBJECTS.env_event("r", "bell", "hall"), pack_plain(told))


async def test_events_that_the_stream_has_lost_stay_on_disk(bus: Bus, tmp_path: Path) -> None:
    """A run that is over is given more rounds when a day has gone, and its last one is played anew.

    It had gone on once already before that.
    """
    scenario = {"record_events": True}
    async with recording_of(bus, tmp_path):
        await event(bus, 1, 1)
        await event(bus, 2, 2)
        await tell(bus, "accepted", scenario=scenario)
        await tell(bus, "restored", round=1, life=2)
        await event(bus, 2, 2, life=2)
        await event(bus, 3, 3, life=2)
        await tell(bus, "ended", life=2, state="finished", manifest={"life": 2})
        await until_recorded(bus)
        await bus.purge(SUBJECTS.stream_events, SUBJECTS.env_event("r", "*", ">"))
        await tell(bus, "restored", round=2, life=3)
        await event(bus, 3, 3, life=3)
        await event(bus, 4, 4, life=3)
        await tell(bus, "ended", life=3, state="finished", manifest={"life": 3})
        await until_recorded(bus, times=2)
    rows = pq.read_table(tmp_path / "r" / "events.parquet").to_pylist()
    assert [(r["number"], r["round"], r["value"]) for r in rows] == [
        (1, 1, "1"),
        (2, 2, "2"),
        (3, 3, "3"),
        (4, 4, "3"),
    ]
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert (manifest["events"], manifest["events_missing"]) == (4, 0)


async def test_what_a_cut_off_round_recorded_is_looked_for(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was on its way to the recorder when the run was cancelled."""
    take = RunRecorder._take

    async def take_some(recorder: RunRecorder, delivery: Delivery) -> None:
        if delivery.subject != SUBJECTS.run_results("r", 2):
            await take(recorder, delivery)

    monkeypatch.setattr(RunRecorder, "_take", take_some)
    async with recording_of(bus, tmp_path):
        await tell(bus, "accepted")
        await answer(bus, [1.0])
        await tell(bus, "round_finished", row=RoundRow(round=1, answers=1, failed=0, values={}))
        await answer(bus, [2.0], 2)
        await tell(bus, "ended", state="cancelled", records=1)
        await until_recorded(bus)
    assert values_of(tmp_path / "r") == [1.0, 2.0]


async def test_a_run_with_a_bad_folder_holds_up_nobody(bus: Bus, tmp_path: Path) -> None:
    """It is tried again, in the order of what was told, and goes on when that is mended."""
    in_the_way = tmp_path / "bad"
    in_the_way.touch()
    async with recording_of(bus, tmp_path) as recorder:
        for number in (1, 2, 3):
            await answer(bus, [1.0, 2.0], number, run="bad")
        await play(bus, [1.0], "good")
        await until_recorded(bus, "good")
        (told,) = await until_recorded(bus, "bad")
        assert "its results can't be written" in (told.reason or "")
        assert str(in_the_way) in (told.reason or "")
        await tell(bus, "restored", "bad", round=2, life=2)
        await answer(bus, [4.0], 4, run="bad")
        in_the_way.unlink()
        await tell(bus, "ended", "bad", state="finished", records=5, life=2)
        told = (await until_recorded(bus, "bad", times=2))[-1]
        assert (told.reason, told.records) == (None, 4)
        assert not recorder._held
    # The fourth round's are of the first life: what was told in its order was taken in its order.
    assert values_of(in_the_way) == [1.0, 2.0, 1.0, 2.0]


async def test_a_folder_that_goes_bad_meanwhile(bus: Bus, tmp_path: Path) -> None:
    async with recording_of(bus, tmp_path) as recorder:
        await answer(bus, [1.0], 1, run="bad")
        await wait_until(lambda: bool(list(tmp_path.glob("bad/answers.parts/*.parquet"))))
        parts = tmp_path / "bad" / "answers.parts"
        parts.rename(tmp_path / "kept")
        parts.touch()
        await answer(bus, [2.0], 2, run="bad")
        await wait_until(lambda: "bad" in recorder._held)
        await play(bus, [1.0], "good")
        await until_recorded(bus, "good")
        parts.unlink()
        (tmp_path / "kept").rename(parts)
        await tell(bus, "ended", "bad", state="finished", records=2)
        async with asyncio.timeout(10):
            while (await until_recorded(bus, "bad"))[-1].reason is not None:
                await asyncio.sleep(0.01)
    assert values_of(tmp_path / "bad") == [1.0, 2.0]


class Instance:
    """A recorder on a connection of its own, which a test may kill."""

    def __init__(self, broker: Broker, runs: Path, bus: NatsBus) -> None:
        self.bus = bus
        self.context = ServiceContext("recorder", broker.settings(runs_dir=runs), bus)
        self.recorder = RunRecorder(self.context)
        self.running = asyncio.ensure_future(self.recorder.run())

    async def kill(self) -> None:
        await self.bus._client.close()
        self.recorder._forget()  # what it had in memory
        self.running.cancel()
        await asyncio.wait({self.running})

    async def stop(self) -> None:
        self.context.stopping.set()
        await self.running
        await self.bus.drain()


@contextlib.asynccontextmanager
async def two_recorders(broker: Broker, runs: Path) -> AsyncIterator[tuple[Bus, list[Instance]]]:
    """The second waits for the end of the first."""
    bus = await NatsBus.connect(broker.settings(), broker.url)
    made = []
    for _ in range(2):
        one = await NatsBus.connect(broker.settings(), broker.url)
        made.append(Instance(broker, runs, one))
        await until_held(bus, made[0])
    try:
        yield bus, made
    finally:
        for instance in made:
            if not instance.running.done():
                await instance.stop()
        await bus.drain()


async def until_held(bus: Bus, instance: Instance) -> None:
    """Wait until an instance is the one that records."""
    bucket = await bus.bucket(f"{SUBJECTS.prefix}-recorder")
    async with asyncio.timeout(10):
        while (entry := await bucket.get("recorder")) is None or (
            entry.value.decode() != instance.bus.process
        ):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_another_recorder_goes_on(
    own_broker: Callable[[], Broker], tmp_path: Path, end: str
) -> None:
    """Two of them double nothing, and lose nothing when the first one ends."""
    async with two_recorders(own_broker(), tmp_path / "runs") as (bus, (first, second)):
        await play(bus, [1.0, 2.0], "whole")
        await until_recorded(bus, "whole")
        await tell(bus, "accepted", name="game")
        for number in (1, 2):
            await answer(bus, [1.0, 2.0], number)
        await wait_until(lambda: "r" in first.recorder._folders)
        assert not second.recorder._folders
        await (first.stop() if end == "stop" else first.kill())
        await until_held(bus, second)
        for number in (3, 4):
            await answer(bus, [3.0, 4.0], number)
        await tell(bus, "ended", state="finished", records=8)
        (told,) = await until_recorded(bus)
        assert (told.records, told.missing) == (8, None)
    assert values_of(tmp_path / "runs" / "r") == [1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0]
    assert values_of(tmp_path / "runs" / "whole") == [1.0, 2.0]


async def test_a_recorder_that_was_replaced_writes_nothing(
    own_broker: Callable[[], Broker], tmp_path: Path
) -> None:
    """It stood still, say, and goes on when another has taken its place."""
    async with two_recorders(own_broker(), tmp_path / "runs") as (bus, (first, second)):
        await tell(bus, "accepted", name="game")
        await wait_until(lambda: "r" in first.recorder._folders)
        bucket = await bus.bucket(f"{SUBJECTS.prefix}-recorder")
        await bucket.put("recorder", second.bus.process.encode())
        await wait_until(lambda: not first.recorder._folders)
        await until_held(bus, second)
        await play(bus, [1.0, 2.0])
        await until_recorded(bus)
        assert not first.recorder._folders
    assert values_of(tmp_path / "runs" / "r") == [1.0, 2.0]
