"""Records of answers, as they leave a worker."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from populace._runtime import worker
from populace._runtime.records import Recorder, batch_of
from populace._runtime.worker import _sort_out_unusable
from shared.bus import MemoryBroker
from shared.codec import CONTENT_TYPE, from_public
from shared.settings import Settings
from shared.streams import ensure_streams

SUBJECTS = Settings().subjects
HALF = "cut \ud83d"


def sorted_out(values: list[Any], *failures: list[Any]) -> dict[int, str]:
    group, errors = SimpleNamespace(partial=None, failed=0), [*failures]
    _sort_out_unusable(group, values, errors)  # type: ignore[arg-type]
    assert group.failed == len(errors) - len(failures)
    assert all(values[place] is None for place, _ in errors)
    return {place: error[1] for place, error in errors}


def test_half_a_character_fails_its_own_answer() -> None:
    values = ["whole", HALF, 3, {"said": [HALF]}, {HALF: 1}, object(), {"said": "whole"}]
    problems = sorted_out(values)
    assert sorted(problems) == [1, 3, 4, 5]
    assert "surrogates not allowed" in problems[1]
    assert "has no plain form" in problems[5]
    assert sorted_out(["whole", None], [1, ["Odd", HALF, ""]]) == {1: "cut \ufffd"}
    assert [values[i] for i in (0, 2, 6)] == ["whole", 3, {"said": "whole"}]


def test_answers_that_can_be_written_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    monkeypatch.setattr(worker, "pack_plain", packed.append)
    assert sorted_out(["whole", 3, {"a": 1}] * 100) == {}
    assert len(packed) == 2  # the answers, and that there are no failures


async def stored(results_format: str, **more: Any) -> dict[str, Any]:
    """A batch as the stream has it."""
    bus = MemoryBroker().connect()
    await ensure_streams(bus, SUBJECTS)
    columns: dict[str, Any] = {
        "round_number": 1,
        "population": "p",
        "method": "m",
        "call": 1,
        "batch": "b",
        "life": 1,
        "agents": [0, 1],
        "values": [1.0, None],
        "errors": [],
    }
    await Recorder(bus, SUBJECTS, "r", results_format).store(batch_of(**{**columns, **more}))
    (message,) = [m async for m in bus.read(SUBJECTS.stream_runs, (SUBJECTS.run_results("r"),))]
    found: dict[str, Any] = from_public(message.data, (message.headers or {})[CONTENT_TYPE])
    return found


@pytest.mark.parametrize("results_format", ["json", "msgpack"])
async def test_half_a_character_in_a_failure(results_format: str) -> None:
    found = await stored(results_format, errors=[[1, "Odd", HALF]])
    assert found["values"] == [1.0, None]
    assert found["errors"][0][2].startswith("cut ")


@pytest.mark.parametrize("results_format", ["json", "msgpack"])
async def test_attributes_of_any_type(results_format: str) -> None:
    """Those of personas are what their Parquet file holds."""
    day = dt.date(1990, 5, 1)
    found = await stored(results_format, personas={"born": [day, None], "tags": [[day], []]})
    kept = str(day) if results_format == "json" else day
    assert found["personas"] == {"born": [kept, None], "tags": [[kept], []]}
    rare = [Decimal("1.50"), dt.time(7, 30)]
    found = await stored(results_format, personas={"rare": rare})
    assert found["personas"] == {"rare": ["1.50", "07:30:00"]}
    assert found["values"] == [1.0, None]
