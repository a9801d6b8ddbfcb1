"""The index of a run's agents, against what the rows say one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from populace.recorded import concat_answers
from services.manager.answers import Filter, by_group, make_index, select
from services.recorder.tables import SCHEMA
from shared.errors import InvalidInputError

JOBS = ["baker", "clerk"]


def row(number: int, population: str, agent: int, **more: Any) -> dict[str, Any]:
    """An answer; the later, the higher its round."""
    told: dict[str, Any] = {
        "run": "r",
        "round": number,
        "population": population,
        "agent": agent,
        "method": "say",
        "call": 1,
        "value": None,
        "answer": None,
        "error": None,
        "message": None,
        "tokens": 0,
        "tokens_out": 0,
        "seconds": None,
        "model": None,
        "backend": None,
    }
    return {**told, **more}


def write(path: Path, rows: list[dict[str, Any]], *, group: int = 1000, jobs: bool = True) -> Path:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    if jobs:
        told = [JOBS[r["agent"] % 2] if r["population"] == "people" else None for r in rows]
        table = table.append_column("job", pa.array(told, pa.string()))
    pq.write_table(table, path, row_group_size=group)
    return path


answers = st.builds(
    dict,
    population=st.sampled_from(["people", "others"]),
    agent=st.integers(0, 6),
    tokens=st.integers(0, 5),
    value=st.none() | st.floats(-100, 100),
    error=st.sampled_from([None, None, "KeyError"]),
)


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.lists(answers, max_size=12), min_size=1, max_size=3), group=st.integers(1, 5)
)
def test_the_last_answer_of_each_and_sums(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[dict[str, Any]]], group: int
) -> None:
    folder = tmp_path_factory.mktemp("index")
    rows: list[dict[str, Any]] = []
    files = []
    for place, part in enumerate(parts):
        told = []
        for one in part:
            told.append(row(len(rows) + len(told) + 1, **one))
        rows += told
        files.append(write(folder / f"{place}.parquet", told, group=group, jobs=place != 1))
    index = make_index(files)
    last: dict[tuple[str, int], dict[str, Any]] = {}
    sums: dict[tuple[str, int], list[int]] = {}
    for one in rows:
        key = (one["population"], one["agent"])
        last[key] = one
        held = sums.setdefault(key, [0, 0, 0])
        held[0] += one["error"] is None
        held[1] += one["error"] is not None
        held[2] += one["tokens"]
    found = index.table.to_pylist()
    assert [(r["population"], r["agent"]) for r in found] == sorted(last)
    for one in found:
        key = (one["population"], one["agent"])
        assert one["round"] == last[key]["round"]
        assert one["value"] == last[key]["value"]
        assert [one["answers"], one["failed"], one["tokens"]] == sums[key]


@pytest.fixture
def index(tmp_path: Path) -> Any:
    rows = [row(n, "people", a, value=float(10 * a + n)) for n in (1, 2) for a in range(120)]
    rows += [row(1, "others", 0, answer='{"text": "Hello <b>"}'), row(2, "others", 1, error="Lost")]
    return make_index([write(tmp_path / "answers.parquet", rows)])


def names(found: dict[str, Any]) -> list[str]:
    return [f"{r['population']}/{r['agent']}" for r in found["rows"]]


def test_pages(index: Any) -> None:
    found = select(index, "", [], "", 0)
    assert (found["total"], found["matching"], len(found["rows"])) == (122, 122, 50)
    assert names(found)[:3] == ["others/0", "others/1", "people/0"]
    assert names(select(index, "", [], "", 100))[-1] == "people/119"
    assert names(select(index, "people", [], "-value", 0))[:2] == ["people/119", "people/118"]
    assert names(select(index, "people", [], "-value", 100))[-1] == "people/0"
    assert names(select(index, "people", [], "-job", 0))[0] == "people/1"  # clerks, in order
    assert select(index, "nobody", [], "value", 0)["rows"] == []
    assert select(index, "", [], "value", 500)["rows"] == []
    assert index.personas == ["job"]
    assert index.sizes == {"others": 2, "people": 120}


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([("value", "<", "13")], ["people/0", "people/1"]),
        ([("value", "≥", "1182"), ("job", "=", "clerk")], ["people/119"]),
        ([("answer", "contains", "hello <B>")], ["others/0"]),
        ([("error", "=", "Lost")], ["others/1"]),
        ([("failed", ">", "0")], ["others/1"]),
        ([("agent", "=", "7")], ["people/7"]),
        ([("job", "≠", "baker"), ("value", "≤", "12")], ["people/1"]),
    ],
)
def test_conditions(index: Any, conditions: list[Any], expected: list[str]) -> None:
    found = select(index, "", [Filter(*c) for c in conditions], "value", 0)
    assert names(found) == expected


@pytest.mark.parametrize(
    ("condition", "sort", "complaint"),
    [
        (("nothing", "=", "1"), "", "no column 'nothing'"),
        (("value", "=", "many"), "", "value holds numbers"),
        (("job", "<", "m"), "", "texts, which have no order"),
        (("job", "like", "m"), "", "conditions are one of"),
        (None, "nothing", "no column 'nothing'"),
    ],
)
def test_conditions_that_cannot_be_used(
    index: Any, condition: Any, sort: str, complaint: str
) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        select(index, "", [Filter(*condition)] if condition else [], sort, 0)


def test_means_by_group(tmp_path: Path) -> None:
    rows = [row(n, "people", a, value=float(a % 2 + n)) for n in (1, 2) for a in range(10)]
    file = write(tmp_path / "a.parquet", rows)
    found = by_group([file], "job")
    assert found == {"rounds": [1, 2], "lines": {"baker": [1.0, 2.0], "clerk": [2.0, 3.0]}}
    with pytest.raises(InvalidInputError, match="no answers have a column"):
        by_group([file], "nothing")


def test_no_file_at_all() -> None:
    index = make_index([])
    assert select(index, "", [], "", 0)["rows"] == []


def test_lists_and_names_of_ours_among_persona_columns(tmp_path: Path) -> None:
    """Lists are text, and an attribute that is called as a sum is, is called otherwise."""
    rows = [row(1, "people", a, value=float(a)) for a in range(4)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    table = table.append_column("hobbies", pa.array([["a"], ["b", "c"], None, []]))
    table = table.append_column("answers", pa.array(["w", "x", "y", "z"]))
    pq.write_table(table, tmp_path / "a.parquet")
    index = make_index([tmp_path / "a.parquet"])
    assert index.personas == ["hobbies", "persona_answers"]
    found = select(index, "", [Filter("hobbies", "contains", "b")], "hobbies", 0)
    assert [r["agent"] for r in found["rows"]] == [1]
    found = select(index, "", [Filter("persona_answers", "=", "y")], "-answers", 0)
    assert [r["agent"] for r in found["rows"]] == [2]
    assert by_group([tmp_path / "a.parquet"], "hobbies")["rounds"] == [1]


def test_an_attribute_of_two_types(tmp_path: Path) -> None:
    files = []
    for place, ages in enumerate((pa.array([30, 40]), pa.array(["old", "young"]))):
        rows = [row(place + 1, ("people", "others")[place], a) for a in range(2)]
        table = pa.Table.from_pylist(rows, schema=SCHEMA).append_column("age", ages)
        files.append(tmp_path / f"{place}.parquet")
        pq.write_table(table, files[-1])
    index = make_index(files)
    assert [r["age"] for r in index.table.to_pylist()] == ["old", "young", "30", "40"]
    assert concat_answers([pq.read_table(f) for f in files]).num_rows == 4


def test_large_whole_numbers(tmp_path: Path) -> None:
    big = (1 << 53) + 1
    rows = [row(1, "people", a) for a in range(2)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table.append_column("id", pa.array([big, 1])), tmp_path / "a.parquet")
    index = make_index([tmp_path / "a.parquet"])
    for condition, agents in (
        (("id", "=", str(big)), [0]),
        (("id", "<", "1.5"), [1]),
        (("id", ">", str(big - 1)), [0]),
    ):
        found = select(index, "", [Filter(*condition)], "", 0)
        assert [r["agent"] for r in found["rows"]] == agents


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_index([tmp_path / "gone.parquet"])
    (tmp_path / "bad.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidInputError, match="can't be read"):
        make_index([tmp_path / "bad.parquet"])
