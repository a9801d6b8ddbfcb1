"""Summaries don't depend on how the agents are divided."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populace._runtime.reduce import MAX_COUNTED, ExactSum, Partial
from shared.errors import InvalidInputError

numbers = st.floats(allow_nan=False, allow_infinity=False, width=64).map(lambda x: x * 1e-200)
anything = st.lists(numbers | st.floats(-1e6, 1e6), max_size=60)


@given(anything, st.integers(1, 7))
def test_a_sum_is_exact_however_it_is_divided(values: list[float], pieces: int) -> None:
    merged = ExactSum()
    for i in range(pieces):
        part = ExactSum()
        part.add(values[i::pieces][: len(values) // 2])
        part.add(values[i::pieces][len(values) // 2 :])
        merged.merge(part)
    exact = sum(map(Fraction, values), Fraction())
    assert merged.value == float(exact)
    assert merged.value == math.fsum(values)


def test_infinities_and_nan() -> None:
    total = ExactSum()
    total.add([1.0, math.inf])
    assert total.value == math.inf
    total.add([-math.inf])
    assert math.isnan(total.value)


@given(st.lists(st.floats(-100, 100) | st.text(max_size=3) | st.none(), max_size=50))
def test_summaries_merge_to_the_same(values: list[object]) -> None:
    whole = Partial("count", None)
    whole.add(values)
    merged = Partial("count", None)
    for i in range(3):
        part = Partial("count", None)
        part.add(values[i::3])
        part.add_failure("late", f"agent {i}", i)
        merged.merge(part.pack())
    a, b = whole.summary(), merged.summary()
    assert (a.count, a.numbers, a.mean, a.sd) == (b.count, b.numbers, b.mean, b.sd)
    assert (a.minimum, a.maximum, a.counts) == (b.minimum, b.maximum, b.counts)
    assert b.failures == {"late": 3}
    assert b.failure_example == "late: agent 0"


def test_mean_and_sd() -> None:
    partial = Partial("mean", None)
    partial.add([2, 4, 4, 4, 5, 5, 7, 9])
    summary = partial.summary()
    assert (summary.mean, summary.sd) == (5.0, 2.0)


def test_the_mean_of_yes_and_no_is_a_share() -> None:
    partial = Partial("mean", None)
    partial.add([True, False, True, True, None, "x"])
    summary = partial.summary()
    assert (summary.mean, summary.numbers, summary.count) == (0.75, 4, 6)


def test_deviations_of_large_numbers() -> None:
    partial = Partial("mean", None)
    partial.add([1e9, 1e9 + 1, 1e9 + 2])
    assert partial.summary().sd == math.sqrt(2 / 3)


def test_numbers_beyond_floats() -> None:
    partial = Partial("mean", None)
    partial.add([10**400, 3])
    assert (partial.summary().count, partial.summary().numbers) == (2, 1)
    partial.add([1.7e308] * 10)
    assert partial.summary().mean == math.inf


def test_too_many_different_answers_to_count() -> None:
    partial = Partial("count", None)
    partial.add([str(i) for i in range(MAX_COUNTED + 1)])
    with pytest.raises(InvalidInputError, match="more than 10,000 different answers"):
        partial.summary()
