"""The recorder's files: each answer once, whatever happens in between."""

from __future__ import annotations

import asyncio
import csv
import datetime as dt
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from populace._runtime.records import batch_of
from populace.cli.app import _write_csv
from populace.recorded import RecordedRun, compare
from services.recorder.events import EventTable
from services.recorder.seat import writing
from services.recorder.tables import SCHEMA, FolderChangedError, RunFolder, reopen
from shared.errors import CodecError
from shared.messages.scenario import RoundRow, Status


def record(agents: list[int], values: list[Any], **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "round_number": 1,
        "population": "p",
        "method": "m",
        "call": 1,
        "batch": f"b{agents}",
        "life": 1,
        "errors": [],
    }
    extra = {"fill": True} if more.pop("fill", False) else {}
    return {**batch_of(agents=agents, values=values, **{**fields, **more}), "run": "r", **extra}


def statuses(records: int) -> list[Status]:
    return [
        Status(kind="accepted", run="r", name="game", scenario={"seed": 1}),
        Status(kind="started", run="r", manifest={"seed": 1}),
        Status(
            kind="round_finished",
            run="r",
            round=1,
            row=RoundRow(round=1, answers=records, failed=0, values={"mean": 2.0}),
        ),
        Status(kind="ended", run="r", name="game", state="finished", records=records),
    ]


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / "answers.parquet").to_pylist()
    return found


def test_values_answers_and_errors(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([2, 0, 1], [1.5, "text", True], tokens=[1, 2, 3], seconds=[0.5, 0.25, 0]))
    folder.add(record([3, 4], [{"n": 7, "t": "x"}, None], field="n", backends=["embedded"]))
    folder.add(record([5], [None], errors=[[0, "unlucky", "why"]]))
    for status in statuses(6):
        folder.add_status(status)
    manifest = folder.finish()
    found = rows(tmp_path / "r")
    assert [r["agent"] for r in found] == [0, 1, 2, 3, 4, 5]
    assert [r["value"] for r in found] == [None, 1.0, 1.5, 7.0, None, None]
    assert [r["answer"] for r in found][:4] == ["text", None, None, '{"n": 7, "t": "x"}']
    assert (found[5]["error"], found[5]["message"]) == ("unlucky", "why")
    assert found[3]["backend"] == "embedded"
    assert found[2]["tokens"] == 1
    assert (manifest["answers"], manifest["failed"], manifest["missing"]) == (5, 1, 0)
    assert manifest["backends"] == ["embedded"]
    assert json.loads((tmp_path / "r" / "rounds.json").read_text())[0]["values"] == {"mean": 2.0}
    assert not (tmp_path / "r" / "answers.parts").exists()
    assert pq.read_schema(tmp_path / "r" / "answers.parquet").names == SCHEMA.names


def test_repeated_records_are_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0, 1], [1, 2]))
    folder.add(record([1, 2], [9, 3]))
    folder.add(
        record([0, 1, 2, 3], [None] * 4, errors=[[i, "lost", ""] for i in range(4)], fill=True)
    )
    folder.finish()
    found = rows(tmp_path / "r")
    assert [r["value"] for r in found] == [1, 2, 3, None]
    assert [r["error"] for r in found] == [None, None, None, "lost"]
    assert folder.repeated == 1


def test_a_recorder_that_died_is_taken_over(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "r", "r")
    first.add_status(statuses(4)[0])
    first.add(record([0, 1], [1, 2]))
    first.flush()
    first.add(record([2], [3]))  # never on disk, so never acknowledged: it comes again
    second = RunFolder(tmp_path / "r", "r")
    second.add(record([0, 1], [1, 2]))  # its acknowledgement was lost
    second.add(record([2], [3]))
    second.add(record([3], [4]))
    for status in statuses(4)[1:]:
        second.add_status(status)
    manifest = second.finish()
    assert [r["value"] for r in rows(tmp_path / "r")] == [1, 2, 3, 4]
    assert manifest["answers"] == 4
    assert manifest["scenario"] == {"seed": 1}


def test_failures_are_counted_across_recorders(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "r", "r")
    first.add(record([0], [None], errors=[[0, "unlucky", "why"]], backends=["embedded"]))
    first.flush()
    second = RunFolder(tmp_path / "r", "r")
    second.add(record([1], [10**400]))
    manifest = second.finish()
    assert (manifest["answers"], manifest["failed"]) == (1, 1)
    assert manifest["backends"] == ["embedded"]
    assert rows(tmp_path / "r")[1]["answer"] == str(10**400)


def test_calls_of_one_method_stand_apart(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0, 1], [1, 2], call=1))
    folder.add(record([0, 1], [3, 4], call=2))
    folder.finish()
    assert [r["value"] for r in rows(tmp_path / "r")] == [1, 2, 3, 4]


def test_parts_are_readable_meanwhile(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0, 1], [1, 2]))
    folder.flush()
    (part,) = (tmp_path / "r" / "answers.parts").glob("*.parquet")
    assert pq.read_table(part).num_rows == 2


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0], [1]))
    for status in statuses(5):
        folder.add_status(status)
    assert folder.finish()["missing"] == 4


@pytest.mark.parametrize(
    ("state", "records", "missing"),
    [("cancelled", 3, 1), ("finished", 3, 0), ("cancelled", 4, 0), ("cancelled", 5, 1)],
)
def test_a_round_that_was_cut_off_makes_up_for_none(
    tmp_path: Path, state: Any, records: int, missing: int
) -> None:
    """The end tells of whole rounds alone; of the last, a round's own word may be lacking."""
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0, 1], [1, 2]))
    folder.flush()
    folder.add(record([0, 1], [1, 2], round_number=2))
    told = statuses(3)
    for status in (*told[:3], told[3].model_copy(update={"state": state, "records": records})):
        folder.add_status(status)
    assert folder.missing == missing
    assert folder.finish()["missing"] == missing


def test_an_empty_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    folder.add_status(Status(kind="ended", run="r", state="failed", reason="because"))
    manifest = folder.finish()
    assert (manifest["state"], manifest["reason"], manifest["answers"]) == ("failed", "because", 0)
    assert rows(tmp_path / "r") == []


@pytest.mark.parametrize(
    "bad", [{}, {"round": 1}, record([0, 1], [1]), {**record([0], [1]), "agents": ["x"]}]
)
def test_batches_of_another_shape(tmp_path: Path, bad: dict[str, Any]) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    with pytest.raises(CodecError, match="wrong shape"):
        folder.add(bad)


def test_what_was_on_its_way_is_filled_in(tmp_path: Path) -> None:
    """A node died with some messages: they are read again when the run is over."""
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0], [1.0]))
    told = statuses(3)
    restored = Status(kind="restored", run="r", round=1, life=2)
    for status in (told[0], restored, told[3]):
        folder.add_status(status)
    assert folder.missing == 2
    folder.fill_statuses([*told[:3], restored, told[3]])
    folder.add(record([0], [1.0], fill=True))
    folder.add(record([1], [2.0], fill=True))  # of the life before, but of a round that counts
    folder.add(record([7], [9.0], round_number=2, fill=True))  # of one that was played again
    folder.add(record([1], [3.0], round_number=2, life=2, fill=True))
    manifest = folder.finish()
    assert manifest["missing"] == 0
    assert manifest["seed"] == 1
    assert [(r["round"], r["agent"], r["value"]) for r in rows(tmp_path / "r")] == [
        (1, 0, 1.0),
        (1, 1, 2.0),
        (2, 1, 3.0),
    ]
    assert json.loads((tmp_path / "r" / "rounds.json").read_text())[0]["answers"] == 3


def test_parts_that_a_killed_recorder_left_are_not_counted_twice(tmp_path: Path) -> None:
    """Killed between the manifest and the end of the parts; then the run is given more rounds."""
    folder = RunFolder(tmp_path / "r", "r")
    for status in statuses(2):
        folder.add_status(status)
    folder.add(record([0, 1], [1, 2]))
    folder.flush()
    left = tmp_path / "left"
    shutil.copytree(tmp_path / "r" / "answers.parts", left)
    folder.finish()
    left.rename(tmp_path / "r" / "answers.parts")
    reopen(tmp_path / "r", "r")
    assert not (tmp_path / "r" / "manifest.json").exists()
    again = RunFolder(tmp_path / "r", "r")
    again.add(record([0, 1], [3, 4], round_number=2, call=2))
    again.finish()
    assert [r["value"] for r in rows(tmp_path / "r")] == [1, 2, 3, 4]


def test_attributes_of_two_types(tmp_path: Path) -> None:
    """Two populations, whose personas have a column of one name."""
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0], [1], personas={"code": [7]}))
    folder.add(record([0], [2], population="q", personas={"code": ["a"]}))
    folder.finish()
    assert [(r["value"], r["code"]) for r in rows(tmp_path / "r")] == [(1, "7"), (2, "a")]


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ([dt.date(2020, 1, 2), "x"], ['"2020-01-02"', "x"]),
        ([2**64 - 1, -1], [str(2**64 - 1), "-1"]),
        ([2**70, 1], [str(2**70), "1"]),
        ([{"on": dt.date(2020, 1, 2)}, [1]], ['{"on": "2020-01-02"}', "[1]"]),
    ],
)
def test_attributes_of_types_that_do_not_mix(
    tmp_path: Path, cells: list[Any], found: list[str]
) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0, 1], [1, 2], personas={"odd": cells}))
    folder.finish()
    assert [r["odd"] for r in rows(tmp_path / "r")] == found


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ([2**64 - 1, -1], [str(2**64 - 1), "-1"]),
        ([[dt.date(2020, 1, 2)], "x"], ['["2020-01-02"]', "x"]),
        ([2**64 - 1, None], [str(2**64 - 1), None]),
        ([1, 1.5], [1, 1.5]),
    ],
)
def test_attributes_of_types_that_do_not_mix_in_two_parts(
    tmp_path: Path, cells: list[Any], found: list[Any]
) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    for agent, cell in enumerate(cells):
        folder.add(record([agent], [1], personas={"odd": [cell]}))
        folder.flush()
    folder.finish()
    assert [r["odd"] for r in rows(tmp_path / "r")] == found


def test_a_damaged_part_is_read_from_the_stream_again(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "r", "r")
    first.add(record([0], [1.0]))
    first.flush()
    (part,) = (tmp_path / "r" / "answers.parts").glob("*.parquet")
    part.write_bytes(b"")
    second = RunFolder(tmp_path / "r", "r")
    second.add(record([1], [2.0]))
    for status in statuses(2):
        second.add_status(status)
    assert second.missing == 1
    second.add(record([0], [1.0], fill=True))
    assert second.finish()["missing"] == 0
    assert [r["value"] for r in rows(tmp_path / "r")] == [1.0, 2.0]


def damage(part: Path, column: str) -> None:
    """Spoil the beginning of a column's first page."""
    names = pq.read_schema(part).names
    chunk = pq.read_metadata(part).row_group(0).column(names.index(column))
    content = bytearray(part.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content[start : start + 20] = b"\xff" * 20
    part.write_bytes(content)


@pytest.mark.parametrize("column", ["agent", "value"])
def test_a_damaged_page_is_put_aside(tmp_path: Path, column: str) -> None:
    """One that is read when the folder is opened, and one that is only read at the end."""
    first = RunFolder(tmp_path / "r", "r")
    first.add(record([0], [1.0]))
    first.flush()
    first.add(record([1], [2.0]))
    first.flush()
    part = tmp_path / "r" / "answers.parts" / "000001.parquet"
    damage(part, column)
    second = RunFolder(tmp_path / "r", "r")
    for status in statuses(2):
        second.add_status(status)
    if column == "value":
        with pytest.raises(OSError, match="is damaged"):
            second.finish()
        second = RunFolder(tmp_path / "r", "r")  # as it is tried again
    assert part.with_suffix(".damaged").exists()
    assert second.missing == 1
    second.add(record([0], [1.0], fill=True))
    assert second.finish()["missing"] == 0
    assert [r["value"] for r in rows(tmp_path / "r")] == [1.0, 2.0]


def test_damaged_messages_are_put_aside(tmp_path: Path) -> None:
    told = {"round": 1, "life": 1, "method": "say", "senders": ["a/0"], "receivers": ["a/1"]}
    told |= {"arguments": [[[], {}]], "values": ["yes"], "errors": [None], "batch": "b1"}
    first = RunFolder(tmp_path / "r", "r")
    first.add_messages(told)
    first.flush()
    part = tmp_path / "r" / "messages.parts" / "000001.parquet"
    damage(part, "batch")
    second = RunFolder(tmp_path / "r", "r")
    assert second.message_batches == 0
    second.add_messages(told)
    assert second.finish()["messages"] == 1


def test_half_a_character(tmp_path: Path) -> None:
    """A model's answer that was cut short, as JSON lets it through."""
    half = "cut \ud83d"
    folder = RunFolder(tmp_path / "r", "r")
    personas = {"motto": [half, "whole \U0001f600"], "tags": [[half], ["x"]]}
    folder.add(record([0, 1], [half, {half: [half]}], personas=personas))
    folder.add(record([2], [None], errors=[[0, "Odd", half]]))
    told = {"round": 1, "life": 1, "method": half, "senders": ["a/0"], "receivers": ["a/1"]}
    told |= {"arguments": [[[half], {}]], "values": [half], "errors": [None], "batch": "b1"}
    folder.add_messages(told)
    folder.finish()
    found = rows(tmp_path / "r")
    assert [r["answer"] for r in found] == ["cut \ufffd", '{"cut \ufffd": ["cut \ufffd"]}', None]
    assert found[2]["message"] == "cut \ufffd"
    assert [r["motto"] for r in found] == ["cut \ufffd", "whole \U0001f600", None]
    assert found[0]["tags"] == ["cut \ufffd"]
    (said,) = pq.read_table(tmp_path / "r" / "messages.parquet").to_pylist()
    assert said["answer"] == '"cut \ufffd"'


def test_whole_numbers_beyond_what_a_float_holds(tmp_path: Path) -> None:
    found = []
    for run, number in (("r", 2**53 + 1), ("s", 2**53)):
        folder = RunFolder(tmp_path / run, run)
        folder.add(record([0, 1, 2], [number, {"n": number}, 7], field="n"))
        folder.finish()
        found += rows(tmp_path / run)
    assert [r["value"] for r in found] == [2.0**53, 2.0**53, 7.0] * 2
    assert [r["answer"] for r in found] == [
        *(str(2**53 + 1), f'{{"n": {2**53 + 1}}}', None),
        *(None, f'{{"n": {2**53}}}', None),
    ]
    both = compare(RecordedRun(tmp_path / "r"), RecordedRun(tmp_path / "s"))
    assert (both.equal, both.differing) == (1, 2)


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    odd = {"x": float("nan"), "y": [float("inf"), 1.5], "z": "é"}
    folder.add(record([0, 1], [odd, float("inf")]))
    folder.finish()
    assert [r["answer"] for r in rows(tmp_path / "r")] == [
        '{"x": null, "y": [null, 1.5], "z": "é"}',
        None,
    ]


def test_a_run_that_ends_before_it_has_begun_again(tmp_path: Path) -> None:
    """What it told of itself before stays; what is counted is counted anew."""
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0], [1], backends=["one"]))
    told = {"seed": 7, "usage": {"total": 3}, "life": 1, "events": [{"name": "flood"}]}
    for status in statuses(1)[:3]:
        folder.add_status(status)
    ended = Status(kind="ended", run="r", state="cancelled", records=1, manifest=told)
    folder.add_status(ended)
    first = folder.finish()
    for life in (2, 3):
        reopen(tmp_path / "r", "r")
        again = RunFolder(tmp_path / "r", "r")
        again.add_status(Status(kind="restored", run="r", round=1, life=life))
        again.add(record([life], [1], backends=["other"]))
        again.add_status(Status(kind="ended", run="r", state="failed", reason="why", life=life))
        second = again.finish()
        assert (second["answers"], second["life"]) == (life, life)
        assert (second["state"], second["reason"]) == ("failed", "why")
        assert second["backends"] == ["one", "other"]
        for name in ("accepted", "started", "scenario", "rounds", "seed", "usage", "events"):
            assert second[name] == first[name]


def test_events_that_were_counted_are_not_what_the_run_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    folder.add_status(Status(kind="ended", run="r", state="cancelled", manifest={"seed": 7}))
    assert folder.finish(EventTable("r"))["events"] == 0
    reopen(tmp_path / "r", "r")
    again = RunFolder(tmp_path / "r", "r")
    again.add_status(Status(kind="ended", run="r", state="cancelled"))
    manifest = again.finish()
    assert manifest["seed"] == 7
    assert "events" not in manifest


@pytest.mark.parametrize("whole", [True, False])
def test_lists_and_mappings_as_csv(tmp_path: Path, whole: bool) -> None:
    """Also while the run is under way, from its parts."""
    folder = RunFolder(tmp_path / "r", "r")
    personas = {"tags": [["a", "b"], None], "home": [{"town": "Ulm"}, {"town": None}]}
    folder.add(record([0, 1], ["=1+1", 2], personas=personas))
    folder.flush()
    folder.add(record([2], [3]))
    folder.flush()
    if whole:
        folder.finish()
    target = tmp_path / "all.csv"
    assert RecordedRun(tmp_path / "r").write_csv(target) == 3
    found = list(csv.DictReader(target.read_text().splitlines()))
    assert [r["answer"] for r in found] == ["=1+1", "", ""]
    assert [r["value"] for r in found] == ["", "2", "3"]
    assert [r["tags"] for r in found] == ['["a", "b"]', "", ""]
    assert json.loads(found[0]["home"]) == {"town": "Ulm"}


def test_csv_for_who_has_seen_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0], ["x" * 1_000_000], personas={"tags": [["a"]]}))
    folder.finish()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        _write_csv(RecordedRun(tmp_path / "r"), Path("-"))
        monkeypatch.undo()


def test_each_row_tells_what_answered_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r", "r")
    folder.add(record([0, 1, 2], [1, 2, 3], backends=["a", "b"], backend_of=["b", None, "a"]))
    folder.add(record([3], [4], backends=["a"]))
    for status in statuses(4):
        folder.add_status(status)
    assert folder.finish()["backends"] == ["a", "b"]
    assert [r["backend"] for r in rows(tmp_path / "r")] == ["b", None, "a", "a"]


def test_a_folder_that_another_process_writes_to_is_left_as_it_is(tmp_path: Path) -> None:
    """A recorder whose connection broke may still be at it when another has its place."""
    one, two = RunFolder(tmp_path / "r", "r"), RunFolder(tmp_path / "r", "r")
    for folder in (one, two):
        folder.add(record([0, 1], [1, 2]))
    for status in statuses(2):
        one.add_status(status)
    one.flush()
    with pytest.raises(FolderChangedError):
        two.flush()
    late = RunFolder(tmp_path / "r", "r")
    one.finish()
    with pytest.raises(OSError, match="answers"):
        late.finish()
    assert [r["value"] for r in rows(tmp_path / "r")] == [1.0, 2.0]


async def test_one_process_alone_writes(tmp_path: Path) -> None:
    begun, over = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert over.wait(10)
        return "slow"

    first = asyncio.ensure_future(asyncio.to_thread(writing, tmp_path / "runs", slow))
    assert await asyncio.to_thread(begun.wait, 10)
    second = asyncio.ensure_future(asyncio.to_thread(writing, tmp_path / "runs", over.is_set))
    done, _ = await asyncio.wait({second}, timeout=0.3)
    assert not done
    over.set()
    assert (await first, await second) == ("slow", True)
