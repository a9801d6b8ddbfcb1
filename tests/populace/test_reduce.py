"""Summaries don't depend on how the agents are divided."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from populace._runtime.reduce import ExactSum, Partial

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


def test_true_and_false_are_not_numbers() -> None:
    partial = Partial("mean", None)
    partial.add([True, False, 3])
    assert partial.summary().numbers == 1
