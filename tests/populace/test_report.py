"""Reports: statistics against known values, arithmetic found in texts, what the page escapes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from populace.recorded import RecordedRun
from populace.report import Level, Reference, ReportSpec, Share, Variable
from populace.report.arithmetic import all_slips, find_slips
from populace.report.data import load, model_name
from populace.report.page import Report
from populace.report.statistics import (
    classify,
    compare_groups,
    describe,
    hedges_g,
    holm,
    share_interval,
)
from services.recorder.tables import SCHEMA

RNG = np.random.default_rng(3)


# Statistics
def test_a_sample_described() -> None:
    found = describe(np.array([1.0, 2.0, 3.0, 4.0, 10.0]))
    assert found is not None
    assert (found.count, found.mean, found.median) == (5, 4.0, 3.0)
    assert found.sd == pytest.approx(math.sqrt(12.5))
    assert found.quartiles == (2.0, 4.0)
    assert describe(np.array([])) is None
    one = describe(np.array([7.0]))
    assert one is not None
    assert (one.sd, one.mean_interval) == (0.0, (7.0, 7.0))


@pytest.mark.parametrize("size", [400, 50_000])
def test_intervals_hold_what_they_promise(size: int) -> None:
    """Of many samples, some 95 % of the intervals hold the true mean and median."""
    held = np.zeros(2)
    for i in range(80):
        found = describe(np.random.default_rng(i).normal(5.0, 2.0, size), seed=i)
        assert found is not None
        held += [
            found.mean_interval[0] <= 5.0 <= found.mean_interval[1],
            found.median_interval[0] <= 5.0 <= found.median_interval[1],
        ]
    assert np.all(held >= 68)  # 76 expected; this few have a chance of less than one in a thousand


def test_the_bootstrap_is_the_same_each_time() -> None:
    values = RNG.normal(size=100)
    assert describe(values) == describe(values)


def test_shares() -> None:
    low, high = share_interval(10, 100)
    assert (low, high) == pytest.approx((0.0552, 0.1744), abs=1e-3)  # Wilson's interval
    assert share_interval(0, 0) == (0.0, 1.0)


def test_two_groups() -> None:
    found = compare_groups({"a": np.array([1.0, 2, 3, 4]), "b": np.array([5.0, 6, 7, 8])})
    assert found is not None
    assert found.name == "Mann-Whitney U"
    assert found.effect == -1.0
    assert found.p_value == pytest.approx(2 / 70)  # exactly: 2 of 70 orders are so extreme
    assert hedges_g(np.array([1.0, 2, 3, 4]), np.array([5.0, 6, 7, 8])) == pytest.approx(
        -4 / math.sqrt(5 / 3) * (1 - 3 / 23)
    )


def test_three_groups_and_groups_that_say_nothing() -> None:
    groups = {n: RNG.normal(m, 1.0, 60) for n, m in (("a", 0.0), ("b", 0.0), ("c", 3.0))}
    found = compare_groups({**groups, "nobody": np.array([])})
    assert found is not None
    assert found.name == "Kruskal-Wallis H"
    assert found.p_value < 1e-10
    p = {(pair.first, pair.second): pair.p_value for pair in found.pairs}
    assert p["a", "c"] < 1e-6
    assert p["a", "b"] > 0.01
    same = compare_groups({"a": np.full(5, 2.0), "b": np.full(5, 2.0), "c": np.full(9, 2.0)})
    assert same is not None
    assert same.p_value == 1.0
    assert compare_groups({"a": np.array([1.0])}) is None


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 100), max_size=50), st.floats(0, 3))
def test_everyone_is_classified_once(numbers: list[float], width: float) -> None:
    levels = [Level(label=f"level {k}", value=50 * (2 / 3) ** k) for k in range(4)]
    counts = classify(np.array(numbers), levels, width)
    assert sum(counts.values()) == len(numbers)
    near = sum(any(abs(n - x.value) <= width for x in levels) for n in numbers)
    assert counts["other"] == len(numbers) - near


def test_levels() -> None:
    levels = [Level(label="0", value=50), Level(label="1", value=33.3)]
    assert classify(np.array([50, 49, 34, 33.3, 20]), levels, 1.0) == {"0": 2, "1": 2, "other": 1}
    assert classify(np.array([]), levels, 1.0) == {"0": 0, "1": 0, "other": 0}


# Arithmetic
@pytest.mark.parametrize(
    ("text", "checked", "wrong"),
    [
        ("2/3 of 50 is 33.33", 1, 0),
        ("2/3 of 50 is about 33", 1, 0),
        ("so 50 * 2/3 = 33.3, and 2/3 of 33.3 = 20", 2, 1),
        ("(50 + 40) / 2 = 45", 1, 0),
        ("50*2/3 = 100/3 = 33.33", 1, 0),
        ("the average is 45 and 2/3 of it is 30", 0, 0),
        ("100 \u00d7 0.5 = 60", 1, 1),
        ("I pick 3, since 2/3 of the average is what wins", 0, 0),
        ("10/0 = 5", 0, 0),
        ("2/3 * 50 = 33%", 0, 0),
        ("20 \u2212 5 = 15 and 20 - 5 = 16.5", 2, 1),
        ("it costs 3 * 4 = $12", 1, 0),
        ("the average of 0-100 is 50", 0, 0),
        ("(2/3)^2 * 50 = 22.22", 0, 0),
        ("the average \u00d7 2/3 = 33.33", 0, 0),
        ("the mean times 2/3 = 33.33", 0, 0),
        ("n * 2 + 3 = 11", 0, 0),
        ("2/3 is 67 percent", 0, 0),
        ("the average is 50 and 2/3 of 50 is 33.3", 1, 0),
    ],
)
def test_sums_in_texts(text: str, checked: int, wrong: int) -> None:
    found, slips = find_slips(text)
    assert (found, len(slips)) == (checked, wrong)


@given(st.text())
def test_any_text_can_be_looked_through(text: str) -> None:
    checked, slips = find_slips(text)
    assert len(slips) <= checked


def test_slips_of_a_run() -> None:
    found = all_slips([(1, "p", 4, "1 + 1 = 3"), (2, "p", 5, "1 + 1 = 2"), (2, "p", 6, "no sums")])
    assert (found.checked, found.wrong, found.texts) == (2, 1, 2)
    assert found.examples[0].where == (1, "p", 4)
    assert found.examples[0].right == 2.0


# The page
def recorded(folder: Path, rows: list[dict[str, Any]], **manifest: Any) -> RecordedRun:
    """A run as the recorder writes it."""
    path = folder / "r1"
    path.mkdir()
    names = [*SCHEMA.names, *(n for n in rows[0] if n not in SCHEMA.names)]
    usual = {"run": "r1", "population": "p", "method": "m", "call": 1, "tokens": 3, "tokens_out": 2}
    columns = {n: [{**usual, **row}.get(n) for row in rows] for n in names}
    table = pa.table(
        {
            n: pa.array(c, SCHEMA.field(n).type if n in SCHEMA.names else None)
            for n, c in columns.items()
        }
    )
    pq.write_table(table, path / "answers.parquet")
    numbers = sorted({row["round"] for row in rows})
    rounds = [
        {
            "round": n,
            "answers": sum(r["round"] == n and not r.get("error") for r in rows),
            "failed": sum(r["round"] == n and bool(r.get("error")) for r in rows),
            "tokens": 3,
            "seconds": 1.0,
            "values": {"mean": 5.0 + n, "winning": 3.0, "who": {"a<b>": n}},
            "usage": {"requests": 2, "money": 0.5},
        }
        for n in numbers
    ]
    (path / "rounds.json").write_text(json.dumps(rounds))
    told = {"run": "r1", "name": "x", "state": "finished", "reason": None, "seed": 1, **manifest}
    (path / "manifest.json").write_text(json.dumps(told))
    return RecordedRun(path)


EVIL = "<script>alert('$x^2$')</script>"


def rows(count: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "round": 1 + i % 2,
            "agent": i // 2,
            "value": None if i % 10 == 0 else float(i),
            "answer": None
            if i % 10 == 0
            else json.dumps({"number": i, "text": EVIL, "word": EVIL}),
            "error": "unparsable" if i % 10 == 0 else None,
            "message": EVIL if i % 10 == 0 else None,
            "model": EVIL if i % 3 else "plain",
            "schooling": EVIL if i % 4 < 2 else "none",
        }
        for i in range(count)
    ]


def spec() -> ReportSpec:
    return ReportSpec(
        about=EVIL,
        variables=[
            Variable(
                name="number",
                label=f"number {EVIL}",
                low=0,
                high=40,
                mark="winning",
                mark_label=EVIL,
                shares=[Share(label=EVIL, low=0, high=5)],
                levels=[Level(label=EVIL, value=10), Level(label="b", value=20)],
                level_width=2,
                references=[
                    Reference(label=EVIL, value=12, kind="human", source=EVIL, round=1),
                    Reference(
                        label="winning", value=4, kind="paper", source="s", round=2, of="mark"
                    ),
                ],
            ),
            Variable(name="word", label=EVIL, field="word", kind="category"),
            Variable(name="text", label=EVIL, field="text", kind="text"),
        ],
        series=["who"],
    )


def test_nothing_that_was_said_is_markup(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        rows(),
        report=spec().model_dump(mode="json"),
        scripted=[EVIL],
        models={EVIL: {"model": EVIL}},
        scenario={"name": EVIL, "agents": {"count": 20}},
    )
    report = Report(EVIL, [(EVIL, load(run)), ("again", load(run))])
    page = report.html()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 10
    names = {name for name in report.figures if "again" not in name}
    assert {"r1-number", "r1-number-others", "r1-number-levels", "r1-word", "r1-rounds"} <= names
    assert any("schooling" in name for name in names)
    drawn = report.save_figures(tmp_path / "figures", "png")
    assert all(path.stat().st_size > 1000 for path in drawn)
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://matplotlib", "")[:0]


def test_what_the_page_says(tmp_path: Path) -> None:
    run = recorded(tmp_path, rows(), report=spec().model_dump(mode="json"))
    data = load(run)
    page = Report("t", [("t", data)]).html()
    assert "unparsable" in page
    assert "10.0 %" in page  # four of forty
    assert len(data.numbers(data.spec.variables[0], 2)) == 20
    assert len(data.numbers(data.spec.variables[0], 1)) == 16
    assert data.recorded("winning") == {1: 3.0, 2: 3.0}
    assert data.series("who") == {"a<b>": {1: 1.0, 2: 2.0}}
    assert data.by == ["schooling", "model"]
    assert not data.scripted


def test_a_run_of_which_nothing_is_known(tmp_path: Path) -> None:
    bare = [{"round": 1, "agent": i, "value": float(i)} for i in range(5)]
    data = load(recorded(tmp_path, bare))
    assert [v.name for v in data.spec.variables] == ["value"]
    assert "<svg" in Report("t", [("t", data)]).html()


def test_how_a_model_is_called() -> None:
    assert model_name({"backend": "openai", "model": "m", "reported": {"model": "other"}}) == "m"
    assert model_name({"max_tokens": 40, "reported": {"model": "small.gguf"}}) == "small.gguf"
    assert model_name({"backend": "scripted"}) == "scripted"
    assert model_name({"mixture": {"weights": {"a": 1}}}) == "a mixture"


def test_a_run_without_an_answer(tmp_path: Path) -> None:
    failed = [{"round": 1, "agent": i, "error": "refused", "message": "no"} for i in range(5)]
    run = recorded(tmp_path, failed, report=spec().model_dump(mode="json"))
    assert "refused" in Report("t", [("t", load(run))]).html()


def test_specifications_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="are for numbers"):
        Variable(name="x", label="x", kind="text", levels=[Level(label="a", value=1)])
    with pytest.raises(ValueError, match="letters"):
        Variable(name="not a word", label="x")
