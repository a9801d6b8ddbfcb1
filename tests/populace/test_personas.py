"""Drawing populations: exact where asked, the same in slices, and clear about what can't be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from populace.personas.expressions import Expression
from populace.personas.fit import fit_report
from populace.personas.people import People
from populace.personas.raking import RakingError, rake
from populace.personas.sampling import Sampler, largest_remainder, save
from populace.personas.spec import TEMPLATES, PopulationError, PopulationFile
from populace.personas.uniform import shuffled, uniform
from shared.errors import InvalidInputError

FULL: dict[str, Any] = {
    "name": "full",
    "size": 3000,
    "seed": 3,
    "attributes": {
        "gender": {"shares": {"female": 0.51, "male": 0.49}},
        "education": {"quotas": {"primary": 0.2, "secondary": 0.5, "bachelor": 0.2, "phd": 0.1}},
        "age": {
            "distribution": "norm",
            "params": {"loc": 42, "scale": 18},
            "min": 16,
            "max": 95,
            "round": 0,
        },
        "occupation": {
            "table": [
                {"when": {"education": "phd"}, "shares": {"teacher": 0.6, "engineer": 0.4}},
                {
                    "when": {"education": ["bachelor", "secondary"], "gender": "female"},
                    "shares": {"teacher": 0.3, "clerk": 0.7},
                },
                {"shares": {"clerk": 0.5, "farmer": 0.5}},
            ]
        },
        "income": {"histogram": {"edges": [0, 10, 50, 100], "shares": [0.5, 0.4, 0.1]}},
        "band": {"derive": "'young' if age < 30 else ('old' if age >= 65 else 'middle')"},
    },
    "constraints": ["age >= 24 or education != 'phd'"],
}


def write(folder: Path, content: Any, name: str = "people.yaml") -> Path:
    path = folder / name
    path.write_text(
        content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    )
    return path


def sampler(folder: Path, content: Any, **overrides: Any) -> Sampler:
    return Sampler(PopulationFile(write(folder, content), overrides))


def counts(table: pa.Table, name: str) -> Counter[Any]:
    return Counter(table[name].to_pylist())


# Random numbers by place
@given(st.integers(0, 1 << 40), st.integers(1, 400))
def test_shuffles_are_permutations(seed: int, size: int) -> None:
    whole = shuffled(seed, "x", np.arange(size), size)
    assert sorted(whole) == list(range(size))
    some = np.arange(size)[:: max(1, size // 7)]
    assert list(shuffled(seed, "x", some, size)) == [whole[i] for i in some]


def test_uniform_numbers_are_uniform_and_by_place() -> None:
    numbers = uniform(1, "a", np.arange(100_000))
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert np.histogram(numbers, 20)[0].std() < 150
    assert list(uniform(1, "a", np.arange(50, 60))) == list(numbers[50:60])
    for other in (uniform(2, "a", [5]), uniform(1, "b", [5]), uniform(1, "a", [5], 1)):
        assert other[0] != numbers[5]
    pairs = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(pairs) < 0.02


# Quotas
@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8),
    st.integers(1, 1000),
)
def test_largest_remainders(weights: list[float], size: int) -> None:
    shares = np.array(weights) / sum(weights)
    found = largest_remainder(shares, size)
    assert found.sum() == size
    assert (np.abs(found - shares * size) < 1).all()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 500),
    st.integers(0, 1 << 30),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(0, 500),
    st.integers(0, 500),
)
def test_quotas_and_slices(size: int, seed: int, weights: list[int], a: int, b: int) -> None:
    import tempfile

    total = sum(weights)
    quotas = {f"c{i}": w / total for i, w in enumerate(weights)}
    content = {
        "name": "p",
        "size": size,
        "seed": seed,
        "attributes": {
            "kind": {"quotas": quotas},
            "of_kind": {
                "table": [
                    {"when": {"kind": "c0"}, "shares": {"x": 0.5, "y": 0.5}},
                    {"shares": {"y": 0.2, "z": 0.8}},
                ]
            },
            "age": {"distribution": "uniform", "params": {"loc": 0, "scale": 100}, "round": 0},
        },
        "constraints": ["age > 10 or of_kind != 'x'"],
    }
    with tempfile.TemporaryDirectory() as folder:
        whole = sampler(Path(folder), content).rows()
        start, stop = sorted((min(a, size), min(b, size)))
        part = sampler(Path(folder), content).rows(start, stop)
    assert part.to_pylist() == whole.slice(start, stop - start).to_pylist()
    expected = largest_remainder(list(quotas.values()), size)
    assert [counts(whole, "kind")[c] for c in quotas] == list(expected)
    for row in whole.to_pylist():
        assert (row["of_kind"] in ("x", "y")) if row["kind"] == "c0" else row["of_kind"] != "x"
        assert row["age"] > 10 or row["of_kind"] != "x"


def test_everything_at_once(tmp_path: Path) -> None:
    drawn = sampler(tmp_path, FULL)
    table = drawn.rows()
    assert table.column_names == ["gender", "education", "age", "occupation", "income", "band"]
    assert counts(table, "education") == {
        "primary": 600,
        "secondary": 1500,
        "bachelor": 600,
        "phd": 300,
    }
    assert 1400 < counts(table, "gender")["female"] < 1660
    rows = table.to_pylist()
    assert all(16 <= r["age"] <= 95 and isinstance(r["age"], int) for r in rows)
    assert all(r["age"] >= 24 for r in rows if r["education"] == "phd")
    assert all(r["occupation"] in ("teacher", "engineer") for r in rows if r["education"] == "phd")
    for row in rows:
        age = row["age"]
        assert row["band"] == ("young" if age < 30 else "old" if age >= 65 else "middle")
    income = np.array(table["income"])
    assert 0.45 < (income < 10).mean() < 0.55
    assert 0.07 < (income > 50).mean() < 0.13
    assert drawn.rejected["age >= 24 or education != 'phd'"] > 10
    again = sampler(tmp_path, FULL).rows()
    assert again.equals(table)
    assert not sampler(tmp_path, FULL, seed=4).rows().equals(table)
    report = fit_report(drawn, table)
    assert report.worst < 0.1
    assert all(m.p_value is None or m.p_value > 1e-4 for m in report.margins)
    assert "occupation given education = phd" in [m.name for m in report.margins]
    assert "education = phd with occupation = clerk" in report.absent
    wrong = table.set_column(0, "gender", pa.array(["male"] * 3000))
    (gender,) = [m for m in fit_report(drawn, wrong).margins if m.name == "gender"]
    assert (gender.variation, gender.p_value) == (0.51, 0.0)
    with pytest.raises(InvalidInputError, match="no column 'gender'"):
        fit_report(drawn, table.drop_columns(["gender"]))


# Tables
def test_microdata_joint_tables_and_exact_counts(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("region,age,w\nnorth,30,1\nsouth,40,3\nsouth,50,0\n")
    pq.write_table(
        pa.table({"diet": ["meat", "none", "fish"], "n": [1, 2, 1]}), tmp_path / "diet.parquet"
    )
    content = {
        "name": "p",
        "size": 1000,
        "joint": [
            {"file": "people.csv", "weight": "w"},
            {"file": "diet.parquet", "weight": "n", "exact": True},
        ],
        "attributes": {"old": {"derive": "age >= 40"}},
    }
    drawn = sampler(tmp_path, content)
    table = drawn.rows()
    pairs = Counter(zip(table["region"].to_pylist(), table["age"].to_pylist(), strict=True))
    assert set(pairs) == {("north", 30), ("south", 40)}
    assert 200 < pairs[("north", 30)] < 300
    assert counts(table, "diet") == {"meat": 250, "none": 500, "fish": 250}
    assert counts(table, "old")["yes"] == pairs[("south", 40)]
    assert drawn.rows(10, 20).to_pylist() == table.slice(10, 10).to_pylist()
    assert [m.name for m in fit_report(drawn, table).margins] == ["region", "diet"]


def test_raking_meets_its_margins(tmp_path: Path) -> None:
    source = np.random.default_rng(1)
    names = {k: [f"{k}{i}" for i in range(n)] for k, n in (("a", 3), ("b", 4), ("c", 2), ("d", 5))}
    codes = {k: source.integers(0, len(v), 2000) for k, v in names.items()}
    margins = {k: source.dirichlet(np.full(len(v), 5.0)) for k, v in names.items()}
    fitted = rake(source.random(2000) + 0.1, codes, margins, names)
    for name, target in margins.items():
        there = np.bincount(codes[name], weights=fitted)
        assert np.abs(there - target).max() < 1e-6
    columns = {k: [names[k][i] for i in v] for k, v in codes.items()}
    pq.write_table(pa.table(columns), tmp_path / "seed.parquet")
    asked = {k: {n: float(s) for n, s in zip(names[k], v, strict=True)} for k, v in margins.items()}
    content = {
        "name": "p",
        "size": 20_000,
        "joint": [{"file": "seed.parquet", "margins": asked, "exact": True}],
    }
    table = sampler(tmp_path, content).rows()
    for name, shares in asked.items():
        for category, share in shares.items():
            assert counts(table, name)[category] / 20_000 == pytest.approx(share, abs=0.02)


def test_margins_that_cannot_be_met() -> None:
    names = {"a": ["x", "y"], "b": ["u", "v"]}
    codes = {"a": np.array([0, 1]), "b": np.array([0, 1])}
    with pytest.raises(RakingError, match=r"asks for 0\.5 of a = 'y', but no row"):
        rake([1.0, 0.0], codes, {"a": np.array([0.5, 0.5])}, names)
    contrary = {"a": np.array([0.5, 0.5]), "b": np.array([0.9, 0.1])}
    with pytest.raises(RakingError, match="can't be met together"):
        rake([1.0, 1.0], codes, contrary, names)


def test_households_share_and_have_roles(tmp_path: Path) -> None:
    content = {
        "name": "p",
        "size": 1000,
        "attributes": {
            "region": {"shares": {"north": 0.4, "south": 0.6}},
            "age": {"distribution": "uniform", "params": {"loc": 1, "scale": 80}, "round": 0},
        },
        "households": {
            "sizes": {1: 0.3, 2: 0.3, 4: 0.4},
            "shared": ["region"],
            "roles": ["first", "second", "child"],
        },
        "constraints": ["age >= 2"],
    }
    drawn = sampler(tmp_path, content)
    table = drawn.rows()
    homes: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        homes.setdefault(row["household"], []).append(row)
    assert {len(members) for home, members in homes.items()} <= {1, 2, 3, 4}
    for members in homes.values():
        assert len({m["region"] for m in members}) == 1
        assert [m["role"] for m in members] == ["first", "second", "child", "child"][: len(members)]
    assert drawn.rows(333, 444).to_pylist() == table.slice(333, 111).to_pylist()


# Files
def test_the_templates_are_good() -> None:
    for path in TEMPLATES.glob("*.yaml"):
        drawn = Sampler(PopulationFile(path))
        table = drawn.rows()
        assert drawn.spec.source
        assert fit_report(drawn, table).worst < 0.08
    education = Sampler(PopulationFile(TEMPLATES / "education.yaml")).rows()
    assert set(counts(education, "education").values()) == {200}
    occupation = Sampler(PopulationFile(TEMPLATES / "occupation.yaml")).rows()
    assert set(counts(occupation, "occupation").values()) == {200}


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_rows_are_written(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "deep" / f"people.{ending}"
    save(sampler(tmp_path, FULL).rows(0, 3), path)
    assert "secondary" in path.read_bytes().decode("latin-1") or path.stat().st_size > 0
    with pytest.raises(InvalidInputError, match="the ending must be"):
        save(pa.table({"a": [1]}), tmp_path / "people.xlsx")


WRONG: list[tuple[str, str]] = [
    ("name: p\nattributes:\n  a: {shares: {x: 0.5, y: 0.3}}\n", r":3: .*add up to 1, not 0.8"),
    ("name: p\nattributes:\n  a: {shares: {x: -0.5, y: 1.5}}\n", r":3: .*must be 0 or more"),
    (
        "name: p\nattributes:\n  a: {quotas: {x: 1}, shares: {x: 1}}\n",
        r":3: .*give one of shares and quotas, not both",
    ),
    ("name: p\nattributes:\n  a: {distribution: nrom}\n", r":3: .*no distribution named 'nrom'"),
    (
        "name: p\nattributes:\n  a: {distribution: norm, params: {mean: 3}}\n",
        r":3: .*parameters don't fit 'norm'",
    ),
    (
        "name: p\nattributes:\n  a: {histogram: {edges: [0, 1], shares: [0.5, 0.5]}}\n",
        r":3: .*2 shares need 3 edges",
    ),
    ("name: p\nattributes:\n  a: {derive: 'b + 1'}\n", r":3: .*uses 'b', which is no attribute"),
    (
        "name: p\nattributes:\n  a: {shares: {x: 1}}\n  b:\n    table:\n"
        "      - {when: {a: z}, shares: {u: 1}}\n",
        r":6: .*a has no category 'z' \(it has: x\)",
    ),
    (
        "name: p\nattributes:\n  a: {shares: {x: 0.5, y: 0.5}}\n  b:\n    table:\n"
        "      - {when: {a: x}, shares: {u: 1}}\n",
        r":5: .*no rule fits a = y; add one without 'when'",
    ),
    (
        "name: p\nattributes:\n  a: {shares: {x: 1}}\nconstraints:\n  - a == 'y'\n",
        r":5: .*could not be met in 200 draws",
    ),
    ("name: p\nattributes:\n  a: {shares: {x: 1}}\nconstraint:\n  - a\n", r":4: constraint: "),
    ("name: p\njoint:\n  - {file: nowhere.csv}\n", r":3: .*no file 'nowhere.csv' beside it"),
    ("name: p\nsize: many\nattributes:\n  a: {shares: {x: 1}}\n", r":2: size: "),
    ("name: p\n", r":1: .*needs attributes, or a joint table"),
    ("name: p\nattributes:\n  a: {shares: {x: 1}\n", r":4: is not valid YAML"),
    (
        "name: p\nattributes:\n  a: {shares: {x: 1}}\nconstraints:\n  - a.upper() == 'X'\n",
        r":5: .*calls '\?'",
    ),
    (
        "name: p\nattributes:\n  a: {shares: {x: 1}}\nhouseholds: {sizes: {2: 1}, shared: [b]}\n",
        r":4: .*'b' is none of the attributes",
    ),
]


@pytest.mark.parametrize(("text", "complaint"), WRONG)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(PopulationError, match=complaint) as caught:
        sampler(tmp_path, text).rows()
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "people.yaml"))
    assert "\n" not in message


# Expressions
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a + 1", [2, 3, 4]),
        ("-a ** 2", [-1, -4, -9]),
        ("a > 1 and not b == 'x'", [False, True, False]),
        ("1 < a <= 3", [False, True, True]),
        ("b in ('x', 'z')", [True, False, True]),
        ("b not in ['x']", [False, True, False]),
        ("'p' if a < 2 else b", ["p", "y", "x"]),
        ("min(a, 2) + max(a, 2)", [3, 4, 5]),
        ("round(a / 2)", [0, 1, 2]),
        ("7", [7, 7, 7]),
    ],
)
def test_expressions(text: str, expected: list[Any]) -> None:
    columns = {"a": np.array([1, 2, 3]), "b": np.array(["x", "y", "x"])}
    assert list(Expression(text, ["a", "b"]).evaluate(columns, 3)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a.real",
        "a[0]",
        "__import__('os')",
        "lambda: 1",
        "[x for x in a]",
        "a = 1",
        "f'{a}'",
        "c",
        "(",
    ],
)
def test_expressions_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        Expression(text, ["a"])


def drawn(attributes: dict[str, Any], size: int = 1000, **more: Any) -> pa.Table:
    raw = {"name": "x", "size": size, "attributes": attributes, **more}
    return Sampler(PopulationFile(raw)).rows()


def test_expressions_leave_their_columns_alone() -> None:
    numbers = {"distribution": "uniform", "params": {"scale": 100}}
    columns = {"a": numbers, "b": numbers, "c": numbers}
    plain = drawn(columns)
    derived = drawn({**columns, "least": {"derive": "min(a, b, c)"}, "no": {"derive": "~(a > 50)"}})
    assert derived.select(["a", "b", "c"]).equals(plain)
    for row in derived.to_pylist():
        assert row["least"] == min(row["a"], row["b"], row["c"])
        assert (row["no"] == "yes") == (row["a"] <= 50)
    both = drawn({**columns, "both": {"derive": "(a > 20) & (a < 60) | (b > 99)"}})
    for row in both.to_pylist():
        assert (row["both"] == "yes") == (20 < row["a"] < 60 or row["b"] > 99)
    for text, complaint in (
        ("sqrt(a, b)", "sqrt takes 1 values, not 2"),
        ("a is 3", "operator Is"),
        ("a << 2", "operator LShift"),
        ("3j", "values are numbers and texts"),
        ("max(*a)", "takes 1 or more"),
    ):
        with pytest.raises(PopulationError, match=complaint):
            drawn({"a": numbers, "x": {"derive": text}})


def test_bounds_truncate_rather_than_heap_up() -> None:
    tail = drawn({"x": {"distribution": "norm", "params": {"loc": 42}, "min": 60, "max": 70}})
    values = np.asarray(tail["x"])
    assert ((values >= 60) & (values <= 70)).all()
    assert len(np.unique(values)) > 900
    histogram = {"edges": [0, 10, 20], "shares": [0.5, 0.5]}
    cut = np.asarray(drawn({"x": {"histogram": histogram, "min": 5, "max": 12}})["x"])
    assert (cut == 5).sum() + (cut == 12).sum() == 0
    assert 0.6 < (cut < 10).mean() < 0.82  # five of seven parts
    for fields, complaint in (
        ({"distribution": "norm", "min": 400}, "nothing between min and max"),
        ({"histogram": histogram, "min": 30}, "nothing between min and max"),
        ({"distribution": "pareto", "params": {"b": 0.02}, "round": 0}, "whole number|not finite"),
    ):
        with pytest.raises(PopulationError, match=complaint):
            drawn({"x": fields})


def test_shares_within_the_tolerance_are_made_whole() -> None:
    quotas = {"a": 0.3, "b": 0.3, "c": 0.3999995}
    assert drawn({"x": {"quotas": quotas}}, 3_000_000).num_rows == 3_000_000


def test_what_households_share_follows_from_what_they_share() -> None:
    attributes = {
        "job": {"shares": {"a": 0.5, "b": 0.5}},
        "town": {"table": [{"when": {"job": "a"}, "shares": {"x": 1}}, {"shares": {"y": 1}}]},
    }
    households = {"sizes": {2: 1.0}, "shared": ["town"]}
    with pytest.raises(PopulationError, match="'town' follows from 'job', which is not shared"):
        drawn(attributes, households=households)
    together = drawn(attributes, households={**households, "shared": ["job", "town"]}).to_pylist()
    assert all(a["town"] == b["town"] for a, b in zip(together[::2], together[1::2], strict=True))


def test_fit_of_people_from_elsewhere() -> None:
    raw = {"name": "x", "size": 10, "attributes": {"a": {"quotas": {"u": 0.6, "v": 0.4}}}}
    sampler = Sampler(PopulationFile(raw))
    assert fit_report(sampler, sampler.rows()).margins[0].exact
    one_sided = fit_report(sampler, pa.table({"a": ["u"] * 10}))
    assert not one_sided.margins[0].exact
    assert (one_sided.margins[0].p_value or 1) < 0.05
    with pytest.raises(InvalidInputError, match="has 1 empty values"):
        fit_report(sampler, pa.table({"a": ["u", None]}))


def test_written_people_are_not_drawn_over(tmp_path: Path) -> None:
    from populace.personas.sampling import refuse_to_replace_texts

    path = tmp_path / "p.parquet"
    save(pa.table({"a": [1]}), path)
    refuse_to_replace_texts(path)
    save(pa.table({"a": [1]}).replace_schema_metadata({b"populace": b"{}"}), path)
    with pytest.raises(InvalidInputError, match="whom a model has written"):
        refuse_to_replace_texts(path)


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1], [1]])
def test_attributes_come_in_the_order_of_the_people_asked_for(rows: list[int]) -> None:
    """Also where all are asked for: agents answer in any order."""
    people = People(pa.table({"age": [30, 40, 50], "text": ["a", "b", "c"]}))
    assert people.columns(rows) == {"age": [[30, 40, 50][row] for row in rows]}
