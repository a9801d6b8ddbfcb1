"""What a reviewer asks of numbers: intervals, tests, effect sizes, shares, levels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from populace.report.spec import Level

Numbers = NDArray[np.float64]
Interval = tuple[float, float]

CONFIDENCE = 0.95
RESAMPLES = 2000
_MOST_RESAMPLED = 20_000
"""Beyond so many answers intervals come from the normal and the binomial distribution."""
_CELLS = 4_000_000


@dataclass(frozen=True)
class Described:
    """A sample of numbers."""

    count: int
    mean: float
    sd: float
    """Of the sample (division by n - 1); 0 for one number."""
    median: float
    quartiles: Interval
    mean_interval: Interval
    """95 % confidence: by bootstrap (percentiles), or for large samples the normal one."""
    median_interval: Interval
    """The same, or for large samples by order statistics."""


def describe(values: Numbers, seed: int = 0) -> Described | None:
    """Describe a sample; None if it is empty.

    Args:
        values: finite numbers.
        seed: of the resampling, so that a report is the same each time.
    """
    if not len(values):
        return None
    if len(values) > _MOST_RESAMPLED:
        mean_interval, median_interval = _of_many(values)
    else:
        mean_interval, median_interval = _bootstrap(values, seed)
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return Described(
        count=len(values),
        mean=float(values.mean()),
        sd=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        median=float(median),
        quartiles=(float(low), float(high)),
        mean_interval=mean_interval,
        median_interval=median_interval,
    )


def _bootstrap(values: Numbers, seed: int) -> tuple[Interval, Interval]:
    draw = np.random.default_rng(seed)
    means, medians = [], []
    left = RESAMPLES
    while left > 0:
        some = max(1, min(left, _CELLS // len(values)))
        drawn = values[draw.integers(0, len(values), (some, len(values)))]
        means.append(drawn.mean(axis=1))
        medians.append(np.median(drawn, axis=1))
        left -= some
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    mean_low, mean_high = np.quantile(np.concatenate(means), tails)
    low, high = np.quantile(np.concatenate(medians), tails)
    return (float(mean_low), float(mean_high)), (float(low), float(high))


def _of_many(values: Numbers) -> tuple[Interval, Interval]:
    half = stats.norm.ppf((1 + CONFIDENCE) / 2)
    error = half * values.std(ddof=1) / math.sqrt(len(values))
    mean = values.mean()
    ordered = np.sort(values)
    low, high = stats.binom.ppf([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], len(values), 0.5)
    last = len(values) - 1
    return (
        (float(mean - error), float(mean + error)),
        (float(ordered[min(last, int(low))]), float(ordered[min(last, int(high))])),
    )


def share_interval(count: int, total: int) -> Interval:
    """95 % confidence of a share: Wilson's score interval (1927)."""
    if total == 0:
        return 0.0, 1.0
    found = stats.binomtest(count, total).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class Pair:
    """Two groups compared."""

    first: str
    second: str
    p_value: float
    """Of Mann and Whitney's test, two-sided; of several pairs after Holm's correction."""
    delta: float
    """Cliff's delta: how much more often the first's number is the larger, from -1 to 1."""
    g: float
    """Hedges' g: the means' difference in standard deviations, for small samples corrected."""


@dataclass(frozen=True)
class Test:
    """Several groups compared."""

    name: str
    statistic: float
    p_value: float
    effect: float
    effect_name: str
    pairs: list[Pair]


def compare_groups(groups: Mapping[str, Numbers]) -> Test | None:
    """Test whether groups differ; None if fewer than two have two numbers or more.

    Two groups: Mann and Whitney's test, with Cliff's delta. More: Kruskal and Wallis's, with
    epsilon squared (H / (n - 1)), and all pairs after Holm's correction.
    """
    held = {name: values for name, values in groups.items() if len(values) > 1}
    if len(held) < 2:
        return None
    pairs = [_pair(a, held[a], b, held[b]) for a, b in itertools.combinations(held, 2)]
    if len(held) == 2:
        (pair,) = pairs
        first, second = held.values()
        statistic = float(_mann_whitney(first, second)[0])
        return Test("Mann-Whitney U", statistic, pair.p_value, pair.delta, "Cliff's delta", pairs)
    everything = np.concatenate(list(held.values()))
    if np.ptp(everything) == 0:
        statistic, p_value = 0.0, 1.0
    else:
        found = stats.kruskal(*held.values())
        statistic, p_value = float(found.statistic), float(found.pvalue)
    corrected = holm([pair.p_value for pair in pairs])
    return Test(
        "Kruskal-Wallis H",
        statistic,
        p_value,
        statistic / (len(everything) - 1),
        "epsilon squared",
        [
            Pair(pair.first, pair.second, p, pair.delta, pair.g)
            for pair, p in zip(pairs, corrected, strict=True)
        ],
    )


def _mann_whitney(first: Numbers, second: Numbers) -> tuple[float, float]:
    if np.ptp(np.concatenate([first, second])) == 0:
        return len(first) * len(second) / 2, 1.0
    found = stats.mannwhitneyu(first, second, alternative="two-sided")
    return float(found.statistic), float(found.pvalue)


def _pair(name: str, first: Numbers, other: str, second: Numbers) -> Pair:
    statistic, p_value = _mann_whitney(first, second)
    delta = 2 * statistic / (len(first) * len(second)) - 1
    return Pair(name, other, p_value, delta, hedges_g(first, second))


def hedges_g(first: Numbers, second: Numbers) -> float:
    """The means' difference in pooled standard deviations, corrected (Hedges 1981); 0 if none."""
    n, m = len(first), len(second)
    if n + m < 3:
        return 0.0
    pooled = ((n - 1) * first.var(ddof=1) + (m - 1) * second.var(ddof=1)) / (n + m - 2)
    difference = float(first.mean() - second.mean())
    if pooled <= 0:
        return 0.0 if difference == 0 else math.copysign(math.inf, difference)
    return difference / math.sqrt(pooled) * (1 - 3 / (4 * (n + m) - 9))


def holm(p_values: Sequence[float]) -> list[float]:
    """P values of several tests, corrected so that together they err as one (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - place)))
        corrected[i] = largest
    return corrected


def classify(values: Numbers, levels: Sequence[Level], width: float) -> dict[str, int]:
    """How many numbers belong to each level: the nearest, if it is within ``width``; "other".

    Args:
        values: finite numbers.
        levels: at least one.
        width: how far a number may lie from its level.
    """
    if not len(values):
        return {**{level.label: 0 for level in levels}, "other": 0}
    places = np.array([level.value for level in levels])
    distances = np.abs(values[:, None] - places[None, :])
    nearest = distances.argmin(axis=1)
    near = distances[np.arange(len(values)), nearest] <= width
    counts = np.bincount(nearest[near], minlength=len(levels))
    found = {level.label: int(n) for level, n in zip(levels, counts, strict=True)}
    return {**found, "other": int(len(values) - near.sum())}
