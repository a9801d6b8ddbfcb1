"""How well rows meet what a population file asks for."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, Field

from populace.personas.sampling import (
    HOUSEHOLD,
    Coded,
    Sampler,
    largest_remainder,
    plain_column,
)
from shared.errors import InvalidInputError

_MOST_CATEGORIES = 60
_EXPECTED = 5.0
"""Rows that independent attributes would give a pair, before its absence is worth a word."""


class Margin(BaseModel):
    """One margin (or one conditional, or joint, distribution): asked against obtained."""

    name: str
    count: int
    """Rows that it speaks of."""
    asked: dict[str, float]
    """Category to share."""
    obtained: dict[str, float]
    variation: float
    """Total variation distance: half the sum of the absolute differences, 0 to 1."""
    exact: bool = False
    """Whether it is met as exactly as whole people can meet it."""
    chi_square: float | None = None
    """Pearson's statistic; None where it says nothing: exact margins, and those without rows."""
    p_value: float | None = None
    """Of the statistic, were the rows independent draws; small values deserve a look."""


class Numbers(BaseModel):
    """A numeric attribute: what was obtained."""

    name: str
    mean: float
    deviation: float
    quantiles: dict[str, float]


class Fit(BaseModel):
    """A population's fit report."""

    population: str
    rows: int
    margins: list[Margin] = Field(default_factory=list)
    numbers: list[Numbers] = Field(default_factory=list)
    rejected: dict[str, int] = Field(default_factory=dict)
    """Constraint to the draws that it rejected."""
    absent: list[str] = Field(default_factory=list)
    """Pairs of categories that never come together, though both are frequent."""
    duplicates: int = 0
    """Rows that are equal to an earlier one (people may be alike; it is told for what it is)."""

    @property
    def worst(self) -> float:
        """The largest total variation of any margin."""
        return max((m.variation for m in self.margins), default=0.0)


def fit_report(sampler: Sampler, table: pa.Table) -> Fit:
    """Compare rows with what their population file asks for.

    Args:
        sampler: of the population.
        table: rows of it, all or some, drawn here or made elsewhere.

    Raises:
        InvalidInputError: the table lacks an attribute.
    """
    spec = sampler.spec
    missing = [name for name in sampler.names if name not in table.column_names]
    if missing:
        raise InvalidInputError(
            f"the table has no column {missing[0]!r}, which {spec.name} asks for "
            f"(it has: {', '.join(table.column_names)})"
        )
    columns = {name: _column(name, table[name]) for name in sampler.names}
    report = Fit(population=spec.name, rows=table.num_rows)
    report.rejected = {text: count for text, count in sampler.rejected.items() if count}
    for name, attribute in spec.attributes.items():
        column = columns[name]
        if attribute.quotas is not None:
            margin = _margin(name, attribute.quotas, column)
            _mark_exact(attribute.quotas, margin)
            report.margins.append(margin)
        elif attribute.shares is not None:
            report.margins.append(_margin(name, attribute.shares, column))
        elif attribute.table is not None:
            report.margins.extend(_conditionals(name, sampler, columns))
        if not isinstance(column, Coded):
            report.numbers.append(_numbers(name, column))
    for source in sampler._sources:
        for name, shares in source.spec.margins.items():
            report.margins.append(_margin(f"{name} (margin)", shares, columns[name]))
        report.margins.extend(_joint(source, columns))
    report.absent = _absent(columns, table.num_rows)
    own = table.select([n for n in table.column_names if n != HOUSEHOLD])
    distinct = own.group_by(own.column_names).aggregate([]).num_rows
    report.duplicates = table.num_rows - distinct
    return report


def _column(name: str, column: Any) -> Any:
    if column.null_count:
        raise InvalidInputError(
            f"the column {name!r} has {column.null_count:,} empty values; fill them, or leave "
            "those people out"
        )
    if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
        values = np.asarray(column.to_numpy(zero_copy_only=False))
        if not np.isfinite(values).all():
            raise InvalidInputError(f"the column {name!r} has values that are not finite")
        return values
    texts = column.cast(pa.string()).combine_chunks()
    encoded = pc.dictionary_encode(texts)
    return Coded(encoded.dictionary.to_pylist(), np.asarray(encoded.indices, dtype=np.int64))


def _mark_exact(quotas: dict[str, float], margin: Margin) -> None:
    """Note it if the rows are as many as quotas mean (largest remainder)."""
    counts = largest_remainder(list(quotas.values()), margin.count)
    wanted = dict(zip(quotas, counts, strict=True))
    names = {*wanted, *margin.obtained}
    margin.exact = bool(margin.count) and all(
        round(margin.obtained.get(n, 0.0) * margin.count) == wanted.get(n, 0) for n in names
    )
    if margin.exact:
        margin.chi_square = margin.p_value = None


def _margin(name: str, asked: dict[str, float], column: Any, where: Any = None) -> Margin:
    texts = column.names if isinstance(column, Coded) else [str(v) for v in np.unique(column)]
    codes = (
        column.codes if isinstance(column, Coded) else np.searchsorted(np.unique(column), column)
    )
    if where is not None:
        codes = codes[where]
    counts = np.bincount(codes, minlength=len(texts))
    total = int(counts.sum())
    found = {t: int(c) for t, c in zip(texts, counts, strict=True) if c or t in asked}
    names = list(dict.fromkeys([*asked, *found]))
    obtained = {n: found.get(n, 0) / total if total else 0.0 for n in names}
    variation = sum(abs(obtained[n] - asked.get(n, 0.0)) for n in names) / 2
    margin = Margin(
        name=name, count=total, asked=asked, obtained=obtained, variation=round(variation, 6)
    )
    if total:
        margin.chi_square, margin.p_value = _chi_square(asked, found, total)
    return margin


def _chi_square(
    asked: dict[str, float], found: dict[str, int], total: int
) -> tuple[float | None, float | None]:
    from scipy import stats

    if any(n not in asked or asked[n] == 0 for n, c in found.items() if c):
        return None, 0.0  # what should not be there is there
    kept = [n for n in asked if asked[n] > 0]
    if len(kept) < 2:
        return 0.0, 1.0
    value = sum((found.get(n, 0) - asked[n] * total) ** 2 / (asked[n] * total) for n in kept)
    return round(value, 4), round(float(stats.chi2.sf(value, len(kept) - 1)), 6)


def _conditionals(name: str, sampler: Sampler, columns: dict[str, Any]) -> list[Margin]:
    """A margin per rule of a conditional table."""
    rules = sampler.spec.attributes[name].table or []
    size = len(plain_column(columns[name]))
    left = np.ones(size, dtype=bool)
    found = []
    for rule in rules:
        here = left.copy()
        for other, wanted in rule.when.items():
            listed = [wanted] if isinstance(wanted, str) else wanted
            here &= np.isin(plain_column(columns[other]), listed)
        left &= ~here
        if rule.shares is not None and here.any():
            case = ", ".join(
                f"{other} = {wanted if isinstance(wanted, str) else '/'.join(wanted)}"
                for other, wanted in rule.when.items()
            )
            label = f"{name} given {case}" if case else f"{name} given the rest"
            found.append(_margin(label, rule.shares, columns[name], here))
    return found


def _joint(source: Any, columns: dict[str, Any]) -> list[Margin]:
    """A joint table's cells, where they are few enough to list."""
    names = [n for n, c in source.columns.items() if isinstance(c, Coded)]
    asked: dict[str, float] = {}
    texts = [source.columns[n].texts() for n in names]
    for row, weight in zip(zip(*texts, strict=True), source.weights, strict=True):
        cell = " / ".join(row)
        asked[cell] = asked.get(cell, 0.0) + float(weight)
        if len(asked) > _MOST_CATEGORIES:
            return []
    if not names:
        return []
    joined = plain_column(columns[names[0]])
    for name in names[1:]:
        joined = np.char.add(np.char.add(joined, " / "), plain_column(columns[name]))
    cells = _column("", pa.chunked_array([pa.array(joined)]))
    margin = _margin(" x ".join(names), asked, cells)
    if source.spec.exact:
        _mark_exact(asked, margin)
    return [margin]


def _numbers(name: str, values: Any) -> Numbers:
    points = (0.05, 0.25, 0.5, 0.75, 0.95)
    return Numbers(
        name=name,
        mean=round(float(values.mean()), 4),
        deviation=round(float(values.std()), 4),
        quantiles={f"{p:.0%}": round(float(np.quantile(values, p)), 4) for p in points},
    )


def _absent(columns: dict[str, Any], rows: int) -> list[str]:
    coded = {n: c for n, c in columns.items() if isinstance(c, Coded)}
    found = []
    for a, b in combinations(coded, 2):
        one, other = coded[a], coded[b]
        if len(one.names) * len(other.names) > _MOST_CATEGORIES**2:
            continue
        width = len(other.names)
        counts = np.bincount(one.codes * width + other.codes, minlength=len(one.names) * width)
        cells = counts.reshape(len(one.names), width)
        expected = np.outer(cells.sum(1), cells.sum(0)) / max(1, rows)
        for i, j in zip(*np.nonzero((cells == 0) & (expected >= _EXPECTED)), strict=True):
            found.append(f"{a} = {one.names[i]} with {b} = {other.names[j]}")
    return found
