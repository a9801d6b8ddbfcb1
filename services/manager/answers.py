"""A run's files, read for pages: the last answer of each agent, means by group, one agent's rows.

All of it runs in threads. A file that is gone meanwhile (parts become one file when a run ends) is
a ``FileNotFoundError``, upon which the files are looked for again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from populace.recorded import concat_answers
from shared.errors import InvalidInputError

P = ParamSpec("P")
R = TypeVar("R")

PAGE = 50
"""Agents on a page."""
MOST_ROWS = 500
"""Answers, or messages, of one agent that are shown: the last ones."""
OPERATORS = ("=", "≠", "<", "≤", ">", "≥", "contains")
KNOWN = (
    "run",
    "round",
    "population",
    "agent",
    "method",
    "call",
    "value",
    "answer",
    "error",
    "message",
    "tokens",
    "tokens_out",
    "seconds",
    "model",
    "backend",
)
_TAKEN = ("round", "population", "agent", "method", "value", "answer", "error", "message")
_SUMS = ("answers", "failed", "tokens")
_LINES = 12


def _readable(function: Callable[P, R]) -> Callable[P, R]:
    """Have what goes wrong with files said in a sentence."""

    @functools.wraps(function)
    def read(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise InvalidInputError(f"the run's files can't be read: {error}") from None

    return read


@dataclass(frozen=True)
class Filter:
    """A condition on a column."""

    column: str
    operator: str
    value: str


@dataclass
class Index:
    """The last answer of each agent of a run."""

    table: pa.Table
    """By population and agent; then the columns of the answer, sums, and persona columns."""
    personas: list[str]
    """Names of the persona columns."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Agents by population."""


@dataclass
class _Sums:
    """Of one population, while an index is made."""

    seen: Any = field(default_factory=lambda: np.zeros(0, bool))
    counts: dict[str, Any] = field(
        default_factory=lambda: {name: np.zeros(0, np.int64) for name in _SUMS}
    )

    def grow(self, size: int) -> None:
        """Have room for so many agents."""
        if size > len(self.seen):
            more = size - len(self.seen)
            self.seen = np.concatenate([self.seen, np.zeros(more, bool)])
            for name, held in self.counts.items():
                self.counts[name] = np.concatenate([held, np.zeros(more, np.int64)])


def answer_files(folder: Path) -> list[Path]:
    """The files that hold a run's answers, oldest first."""
    whole = folder / "answers.parquet"
    return [whole] if whole.exists() else sorted((folder / "answers.parts").glob("*.parquet"))


def message_files(folder: Path) -> list[Path]:
    """The files that hold what agents said to one another, oldest first."""
    whole = folder / "messages.parquet"
    return [whole] if whole.exists() else sorted((folder / "messages.parts").glob("*.parquet"))


def stamp_of(file: Path) -> tuple[str, int, int]:
    """What changes when a file does."""
    status = file.stat()
    return str(file), status.st_mtime_ns, status.st_size


@_readable
def persona_columns(file: Path) -> list[str]:
    """Names of the persona columns of a file of answers.

    Raises:
        InvalidInputError: it can't be read.
    """
    return [name for name in pq.read_schema(file).names if name not in KNOWN]


# The index
@_readable
def make_index(files: list[Path]) -> Index:
    """Read files, from the last row to the first; memory grows with agents, not with answers.

    Raises:
        InvalidInputError: a file can't be read.
    """
    sums: dict[str, _Sums] = {}
    pieces: list[pa.Table] = []
    for file in reversed(files):
        with pq.ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            wanted = [*_TAKEN, *(n for n in names if n not in KNOWN)]
            for group in reversed(range(parquet.num_row_groups)):
                rows = _latest_of_group(parquet, group, sums)
                if len(rows):
                    whole = parquet.read_row_group(group, columns=wanted)
                    pieces.append(_plain(whole.take(pa.array(rows))))
    if not pieces:
        return Index(pa.table({"population": [], "agent": []}), [])
    table = concat_answers(pieces)
    agents = table["agent"].to_numpy()
    populations = table["population"].combine_chunks().dictionary_encode()
    codes = populations.indices.to_numpy(zero_copy_only=False)
    for name in _SUMS:
        column = np.zeros(len(agents), np.int64)
        for code, population in enumerate(populations.dictionary.to_pylist()):
            here = codes == code
            column[here] = sums[population].counts[name][agents[here]]
        table = table.append_column(name, pa.array(column))
    table = table.sort_by([("population", "ascending"), ("agent", "ascending")]).combine_chunks()
    personas = [n for n in table.column_names if n not in (*KNOWN, *_SUMS)]
    sizes = {name: int(one.seen.size) for name, one in sorted(sums.items())}
    return Index(table, personas, sizes)


def _plain(table: pa.Table) -> pa.Table:
    """The table with columns that can be compared, under names that are no others'."""
    names = [f"persona_{n}" if n in _SUMS and n not in KNOWN else n for n in table.column_names]
    table = table.rename_columns(names)
    for place, one in enumerate(table.schema):
        if pa.types.is_dictionary(one.type):
            table = table.set_column(place, one.name, table[one.name].cast(pa.string()))
        elif pa.types.is_nested(one.type):
            texts = [
                None if v is None else json.dumps(v, ensure_ascii=False, default=str)
                for v in table[one.name].to_pylist()
            ]
            table = table.set_column(place, one.name, pa.array(texts, pa.string()))
    return table


def _latest_of_group(parquet: pq.ParquetFile, group: int, sums: dict[str, _Sums]) -> Any:
    """Rows of a row group that are the last of their agents; all of its rows are summed up."""
    counted = [name for name in ("error", "tokens") if not _says_nothing(parquet, group, name)]
    part = parquet.read_row_group(group, columns=["population", "agent", *counted])
    agents = part["agent"].to_numpy()
    failed = part["error"].is_valid().to_numpy() if "error" in counted else None
    tokens = pc.fill_null(part["tokens"], 0).to_numpy() if "tokens" in counted else None
    populations = part["population"].combine_chunks().dictionary_encode()
    codes = populations.indices.to_numpy(zero_copy_only=False)
    names = populations.dictionary.to_pylist()
    used = np.unique(codes)
    found = []
    for code in used:
        held = sums.setdefault(names[code], _Sums())
        rows = slice(None) if len(used) == 1 else np.flatnonzero(codes == code)
        who = agents[rows]
        size = int(who.max()) + 1
        held.grow(size)
        counts = np.bincount(who, minlength=size)
        if failed is not None:
            lost = np.bincount(who[failed[rows]], minlength=size)
            held.counts["failed"][:size] += lost
            counts = counts - lost
        held.counts["answers"][:size] += counts
        if tokens is not None:
            spent = np.bincount(who, weights=tokens[rows], minlength=size)
            held.counts["tokens"][:size] += spent.astype(np.int64)
        if held.seen[who].all():
            continue
        last = np.full(size, -1, np.int64)
        # Of several rows of one agent, the last one stays.
        last[who] = np.arange(len(agents))[rows]
        new = (last >= 0) & ~held.seen[:size]
        found.append(last[new])
        held.seen[:size] |= new
    return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)


def _says_nothing(parquet: pq.ParquetFile, group: int, name: str) -> bool:
    """Whether the statistics of a row group say that a column has no value but 0 there."""
    place = parquet.schema_arrow.names.index(name)
    rows = parquet.metadata.row_group(group)
    if rows.num_columns != len(parquet.schema_arrow.names):
        return False  # columns within columns: their places are others
    told = rows.column(place).statistics
    if told is None or not told.has_null_count:
        return False
    if told.null_count == rows.num_rows:
        return True
    return bool(told.has_min_max and told.min == 0 and told.max == 0)


# Pages of it
@_readable
def select(
    index: Index,
    population: str,
    filters: list[Filter],
    sort: str,
    start: int,
    *,
    size: int = PAGE,
) -> dict[str, Any]:
    """One page of agents.

    Args:
        index: the run's.
        population: whose; empty: all.
        filters: conditions that all hold.
        sort: a column, with ``-`` before it for the largest first.
        start: number of the first one on the page.
        size: how many.

    Raises:
        InvalidInputError: there is no such column, or a value can't be compared with it.
    """
    table = index.table
    if population:
        table = table.filter(pc.equal(table["population"], population))
    for one in filters:
        table = table.filter(_mask(table, one))
    name = sort.removeprefix("-")
    if name and table.num_rows:
        _column(table, name)
        order = "descending" if sort.startswith("-") else "ascending"
        # A page is all that is needed of the order, and equal values stay in the agents' order.
        keys = [(name, order), ("population", "ascending"), ("agent", "ascending")]
        best = pc.select_k_unstable(table, min(start + size, table.num_rows), keys)
        rows = table.take(best[start:])
    else:
        rows = table.slice(start, size)
    return {
        "matching": table.num_rows,
        "total": index.table.num_rows,
        "start": start,
        "columns": [n for n in table.column_names if n != "message"],
        "personas": index.personas,
        "rows": rows.to_pylist(),
    }


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        known = ", ".join(table.column_names)
        raise InvalidInputError(f"there is no column {name[:100]!r} (there are: {known})")
    return table[name]


def _mask(table: pa.Table, wanted: Filter) -> Any:
    if wanted.operator not in OPERATORS:
        raise InvalidInputError(f"conditions are one of {' '.join(OPERATORS)}")
    column = _column(table, wanted.column)
    kind = column.type
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if wanted.operator == "contains" or not (numeric or pa.types.is_boolean(kind)):
        column = column.cast(pa.string())
    if wanted.operator == "contains":
        return pc.fill_null(pc.match_substring(column, wanted.value, ignore_case=True), False)
    value: Any = wanted.value
    if numeric:
        try:
            value = float(wanted.value)
            if pa.types.is_integer(kind) and value.is_integer():
                value = int(wanted.value) if wanted.value.strip().isdecimal() else int(value)
            elif pa.types.is_integer(kind):
                column = column.cast(pa.float64(), safe=False)
        except (ValueError, OverflowError):
            raise InvalidInputError(
                f"{wanted.column} holds numbers, and {wanted.value[:100]!r} is none"
            ) from None
    elif pa.types.is_boolean(kind):
        value = wanted.value.strip().lower() in ("true", "yes", "1")
    elif wanted.operator not in ("=", "≠"):
        raise InvalidInputError(f"{wanted.column} holds texts, which have no order: use = or ≠")
    compare = {
        "=": pc.equal,
        "≠": pc.not_equal,
        "<": pc.less,
        "≤": pc.less_equal,
        ">": pc.greater,
        "≥": pc.greater_equal,
    }[wanted.operator]
    # Whoever has no value has none that is equal.
    return pc.fill_null(compare(column, value), wanted.operator == "≠")


# Means
@_readable
def by_group(files: list[Path], column: str) -> dict[str, Any]:
    """The mean of the answers' numbers by round and by the value of a persona column.

    Returns:
        ``{"rounds": [...], "lines": {value: [mean or None, ...]}}``, of the most frequent values.

    Raises:
        InvalidInputError: no file has such a column, or it can't be grouped by.
    """
    tables = [
        _plain(pq.read_table(file, columns=["round", column, "value"]))
        for file in files
        if column in pq.read_schema(file).names
    ]
    if not tables:
        raise InvalidInputError(f"no answers have a column {column!r}")
    table = concat_answers(tables)
    table = table.filter(table["value"].is_valid())
    column = table.column_names[1]
    found = table.group_by(["round", column]).aggregate([("value", "mean"), ("value", "count")])
    rounds = sorted(set(found["round"].to_pylist()))
    place = {number: i for i, number in enumerate(rounds)}
    lines: dict[str, list[float | None]] = {}
    weight: dict[str, int] = {}
    for row in found.to_pylist():
        name = str(row[column])
        line = lines.setdefault(name, [None] * len(rounds))
        line[place[row["round"]]] = row["value_mean"]
        weight[name] = weight.get(name, 0) + row["value_count"]
    kept = sorted(lines, key=lambda n: -weight[n])[:_LINES]
    return {"rounds": rounds, "lines": {name: lines[name] for name in sorted(kept)}}


# One agent
@_readable
def answers_in(file: Path, population: str, number: int) -> pa.Table:
    """An agent's answers of one file.

    Raises:
        InvalidInputError: it can't be read.
    """
    wanted = [("population", "=", population), ("agent", "=", number)]
    return _plain(pq.read_table(file, filters=wanted))


@_readable
def messages_in(file: Path, name: str) -> pa.Table:
    """What an agent said to others and heard of them, of one file.

    Raises:
        InvalidInputError: it can't be read.
    """
    return pq.read_table(file, filters=[[("sender", "=", name)], [("receiver", "=", name)]])


@_readable
def last_rows(tables: list[pa.Table], order: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of some tables in order, the last ones if there are many."""
    if not tables:
        return []
    whole = concat_answers(tables)
    if order:
        whole = whole.sort_by([(name, "ascending") for name in order])
    rows: list[dict[str, Any]] = whole.slice(max(0, whole.num_rows - MOST_ROWS)).to_pylist()
    return rows
