"""Drawing rows: vectorised, seeded, any slice of a population without the rest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from populace.personas.expressions import Expression
from populace.personas.people import read_rows
from populace.personas.raking import RakingError, rake
from populace.personas.spec import Attribute, Draw, Joint, PopulationFile, Rule, frozen
from populace.personas.uniform import shuffled, uniform
from shared.errors import InvalidInputError

_ATTEMPTS = 200
_WHOLE = 2.0**62
HOUSEHOLD, ROLE = "household", "role"
"""Columns that households add: the household's number from 0, and the member's role."""


@dataclass
class Coded:
    """A column of categories: their names, and the number of each row's."""

    names: list[str]
    codes: Any

    def texts(self) -> Any:
        """The names, row by row."""
        return np.asarray(self.names)[self.codes]


Columns = dict[str, Any]
"""Name to ``Coded``, or to an array of numbers."""


def plain_column(column: Any) -> Any:
    """A column as an array of numbers or texts."""
    return column.texts() if isinstance(column, Coded) else column


def largest_remainder(shares: Any, size: int) -> Any:
    """Whole numbers that add up to ``size`` and are nearest to the shares (Hamilton's method)."""
    wanted = np.asarray(shares, dtype=float) * size
    counts = np.floor(wanted + 1e-9).astype(np.int64)
    left = size - int(counts.sum())
    if left > 0:
        order = np.argsort(-(wanted - counts), kind="stable")
        counts[order[:left]] += 1
    return counts


@dataclass
class _Source:
    """A joint table, ready to be drawn from."""

    key: str
    spec: Joint
    columns: Columns
    weights: Any
    bounds: Any = field(default=None)


class Sampler:
    """Draws the rows of a population.

    Args:
        file: the population.

    Raises:
        PopulationError: a table can't be used, or an expression or condition leads nowhere.
    """

    def __init__(self, file: PopulationFile) -> None:
        self.file = file
        self.spec = file.spec
        self.rejected: Counter[str] = Counter()
        """Draws that a constraint rejected, by constraint."""
        self._sources = [self._load(i, joint) for i, joint in enumerate(self.spec.joint)]
        self.names: list[str] = [n for source in self._sources for n in source.columns]
        """Attributes, in their order."""
        self._categories: dict[str, list[str]] = {
            name: column.names
            for source in self._sources
            for name, column in source.columns.items()
            if isinstance(column, Coded)
        }
        self._expressions: dict[str, Expression] = {}
        for name, attribute in self.spec.attributes.items():
            self._prepare(name, attribute)
        self._constraints = [
            self._expression(("constraints", i), text, self.names)
            for i, text in enumerate(self.spec.constraints)
        ]
        self._check_households()
        self._sizes: Any = None

    # Preparing
    def _load(self, number: int, joint: Joint) -> _Source:
        key = ("joint", number)
        table = self._read(key, joint)
        names = joint.columns or [c for c in table.column_names if c != joint.weight]
        for name in [*names, *([joint.weight] if joint.weight else [])]:
            if name not in table.column_names:
                there = ", ".join(table.column_names)
                raise self.file.complain(key, f"{joint.file} has no column {name!r} ({there})")
        columns: Columns = {}
        for name in names:
            columns[name] = _coded(table[name])
        weights = np.ones(table.num_rows)
        if joint.weight:
            weights = np.asarray(table[joint.weight].to_numpy(zero_copy_only=False), dtype=float)
            if not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() <= 0:
                raise self.file.complain(key, "weights must be 0 or more, and not all 0")
        if joint.margins:
            weights = self._rake(key, joint, columns, weights)
        return _Source(f"joint/{number}", joint, columns, weights / weights.sum())

    def _read(self, key: tuple[Any, ...], joint: Joint) -> Any:
        if self.file.folder is None:
            raise self.file.complain((*key, "file"), "tables can be named in a file alone")
        path = (self.file.folder / joint.file).resolve()
        if self.file.folder.resolve() not in path.parents:
            raise self.file.complain((*key, "file"), "must lie beside the population file")
        if not path.is_file():
            raise self.file.complain((*key, "file"), f"there is no file {joint.file!r} beside it")
        try:
            table = read_rows(path)
        except InvalidInputError as error:
            raise self.file.complain((*key, "file"), str(error)) from None
        if table.num_rows == 0:
            raise self.file.complain((*key, "file"), f"{joint.file} has no rows")
        return table

    def _rake(self, key: tuple[Any, ...], joint: Joint, columns: Columns, weights: Any) -> Any:
        codes, targets, names = {}, {}, {}
        for name, shares in joint.margins.items():
            place = (*key, "margins", name)
            column = columns.get(name)
            if not isinstance(column, Coded):
                raise self.file.complain(place, f"{joint.file} has no categories named {name!r}")
            missing = [c for c in shares if c not in column.names]
            column.names.extend(missing)
            codes[name], names[name] = column.codes, column.names
            targets[name] = np.array([shares.get(c, 0.0) for c in column.names])
        try:
            return rake(weights, codes, targets, names)
        except RakingError as error:
            raise self.file.complain((*key, "margins"), str(error)) from None

    def _prepare(self, name: str, attribute: Attribute) -> None:
        key = ("attributes", name)
        if name in self.names:
            raise self.file.complain(key, "a joint table has this attribute already")
        if attribute.derive is not None:
            self._expressions[name] = self._expression(
                (*key, "derive"), attribute.derive, self.names
            )
        for i, rule in enumerate(attribute.table or []):
            for other, wanted in rule.when.items():
                self._check_condition((*key, "table", i, "when", other), other, wanted)
        self._note_categories(name, attribute)
        self.names.append(name)

    def _check_condition(self, key: tuple[Any, ...], other: str, wanted: str | list[str]) -> None:
        known = self._categories.get(other)
        if known is None:
            there = ", ".join(self._categories) or "none"
            raise self.file.complain(
                key, f"{other!r} has no categories before this attribute (there are: {there})"
            )
        for category in [wanted] if isinstance(wanted, str) else wanted:
            if category not in known:
                raise self.file.complain(
                    key, f"{other} has no category {category!r} (it has: {', '.join(known)})"
                )

    def _note_categories(self, name: str, attribute: Attribute) -> None:
        if attribute.shares or attribute.quotas:
            self._categories[name] = list(attribute.shares or attribute.quotas or {})
        elif attribute.table:
            kinds = {rule.shares is not None for rule in attribute.table}
            if len(kinds) > 1:
                raise self.file.complain(
                    ("attributes", name, "table"), "some rules give categories, others numbers"
                )
            if kinds == {True}:
                found = [c for rule in attribute.table for c in rule.shares or {}]
                self._categories[name] = list(dict.fromkeys(found))

    def _expression(self, key: tuple[Any, ...], text: str, known: list[str]) -> Expression:
        try:
            return Expression(text, list(known))
        except InvalidInputError as error:
            raise self.file.complain(key, str(error)) from None

    def _needs(self, attribute: Attribute, name: str) -> list[str]:
        """The attributes from which one follows."""
        if attribute.derive is not None:
            return self._expressions[name].names
        return [other for rule in attribute.table or [] for other in rule.when]

    def _check_households(self) -> None:
        households = self.spec.households
        if households is None:
            return
        for i, name in enumerate(households.shared):
            if name not in self.spec.attributes:
                raise self.file.complain(
                    ("households", "shared", i), f"{name!r} is none of the attributes"
                )
            needed = self._needs(self.spec.attributes[name], name)
            for other in needed:
                if other not in households.shared:
                    raise self.file.complain(
                        ("households", "shared", i),
                        f"{name!r} follows from {other!r}, which is not shared; share that too",
                    )
            if self.spec.attributes[name].quotas is not None:
                raise self.file.complain(
                    ("households", "shared", i),
                    f"{name!r} has quotas of people, which can't be met by whole households",
                )
        for name in (HOUSEHOLD, ROLE):
            if name in self.names:
                raise self.file.complain(("households",), f"{name!r} names what households add")

    @property
    def categories(self) -> dict[str, list[str]]:
        """The categories of each attribute that has any."""
        return {name: list(found) for name, found in self._categories.items()}

    # Drawing
    def rows(self, start: int = 0, stop: int | None = None) -> pa.Table:
        """The people from ``start`` up to, and without, ``stop``.

        Raises:
            PopulationError: a constraint can't be met.
            IndexError: there are no such people.
        """
        stop = self.spec.size if stop is None else stop
        if not 0 <= start <= stop <= self.spec.size:
            raise IndexError(f"the population has people 0 to {self.spec.size - 1}")
        index = np.arange(start, stop, dtype=np.int64)
        homes = self._homes(start, stop)
        columns = self._draw(index, homes, 0)
        if self._constraints and len(index):
            self._meet_constraints(index, homes, columns)
        return self._table(columns, homes)

    def _homes(self, start: int, stop: int) -> tuple[Any, Any] | None:
        """Number of the household and place in it, of each person."""
        households = self.spec.households
        if households is None:
            return None
        if self._sizes is None:
            names = list(households.sizes)
            bounds = np.cumsum(list(households.sizes.values()))
            # As many households as could be needed; sums are cheap, so they start from the first.
            drawn = uniform(self.spec.seed, "households", np.arange(self.spec.size))
            sizes = np.asarray(names)[_choose(bounds, drawn)]
            self._sizes = np.concatenate([[0], np.cumsum(sizes)])
        people = np.arange(start, stop)
        home = np.searchsorted(self._sizes, people, side="right") - 1
        return home, people - self._sizes[home]

    def _draw(self, index: Any, homes: tuple[Any, Any] | None, attempt: int) -> Columns:
        columns: Columns = {}
        for source in self._sources:
            places = self._rows_of(source, index, attempt)
            for name, column in source.columns.items():
                columns[name] = (
                    Coded(column.names, column.codes[places])
                    if isinstance(column, Coded)
                    else column[places]
                )
        shared = self.spec.households.shared if self.spec.households else []
        for name, attribute in self.spec.attributes.items():
            if homes is not None and name in shared:
                columns[name] = self._values(name, attribute, homes[0], columns, 0)
            else:
                columns[name] = self._values(name, attribute, index, columns, attempt)
        return columns

    def _rows_of(self, source: _Source, index: Any, attempt: int) -> Any:
        if source.spec.exact:
            return self._exact(source.key, source.weights, index)
        if source.bounds is None:
            source.bounds = np.cumsum(source.weights)
        return _choose(source.bounds, uniform(self.spec.seed, source.key, index, attempt))

    def _exact(self, name: str, shares: Any, index: Any) -> Any:
        bounds = np.cumsum(largest_remainder(shares, self.spec.size))
        places = shuffled(self.spec.seed, name, index, self.spec.size)
        return np.searchsorted(bounds, places, side="right")

    def _values(
        self, name: str, attribute: Attribute, index: Any, columns: Columns, attempt: int
    ) -> Any:
        if attribute.quotas is not None:
            shares = list(attribute.quotas.values())
            return Coded(list(attribute.quotas), self._exact(name, shares, index))
        if attribute.derive is not None:
            return self._derived(name, columns, len(index))
        drawn = uniform(self.spec.seed, name, index, attempt)
        try:
            if attribute.table is None:
                return _drawn(attribute, drawn)
            return self._given(name, attribute.table, drawn, columns)
        except ValueError as error:
            raise self.file.complain(("attributes", name), str(error)) from None

    def _derived(self, name: str, columns: Columns, size: int) -> Any:
        expression = self._expressions[name]
        used = {n: plain_column(columns[n]) for n in expression.names}
        try:
            found = expression.evaluate(used, size)
        except InvalidInputError as error:
            raise self.file.complain(("attributes", name, "derive"), str(error)) from None
        if found.dtype.kind in "US":
            encoded = pa.array(found).dictionary_encode()
            codes = np.asarray(encoded.indices, dtype=np.int64)
            return Coded(encoded.dictionary.to_pylist(), codes)
        return found if found.dtype.kind != "b" else Coded(["no", "yes"], found.astype(np.int64))

    def _given(self, name: str, table: list[Rule], drawn: Any, columns: Columns) -> Any:
        left = np.ones(len(drawn), dtype=bool)
        categories = self._categories.get(name)
        found: Any = np.zeros(len(drawn), dtype=np.int64 if categories else float)
        for rule in table:
            here = left.copy()
            for other, wanted in rule.when.items():
                column = columns[other]
                listed = [wanted] if isinstance(wanted, str) else wanted
                numbers = [column.names.index(c) for c in listed if c in column.names]
                here &= np.isin(column.codes, numbers)
            left &= ~here
            if not here.any():
                continue
            values = _drawn(rule, drawn[here])
            if isinstance(values, Coded):
                assert categories is not None
                own = np.array([categories.index(c) for c in values.names])
                found[here] = own[values.codes]
            else:
                found[here] = values
        if left.any():
            example = int(np.flatnonzero(left)[0])
            named = sorted({other for rule in table for other in rule.when})
            case = ", ".join(f"{n} = {plain_column(columns[n])[example]}" for n in named)
            raise self.file.complain(
                ("attributes", name, "table"),
                f"no rule fits {case}; add one without 'when' for the rest",
            )
        if categories:
            return Coded(categories, found)
        whole = all(rule.round is not None and rule.round <= 0 for rule in table)
        return found.astype(np.int64) if whole else found

    def _meet_constraints(
        self, index: Any, homes: tuple[Any, Any] | None, columns: Columns
    ) -> None:
        """Draw again, by themselves, those who break a constraint."""
        bad = self._breaking(columns, len(index))
        for attempt in range(1, _ATTEMPTS + 1):
            if not len(bad):
                return
            some = None if homes is None else (homes[0][bad], homes[1][bad])
            again = self._draw(index[bad], some, attempt)
            for name, column in again.items():
                held = columns[name]
                if isinstance(held, Coded):
                    if held.names != column.names:  # derived ones number theirs as they come
                        _unite(held, column)
                    held.codes[bad] = column.codes
                else:
                    if not held.flags.writeable:
                        held = columns[name] = held.copy()
                    held[bad] = column
            bad = bad[self._breaking(again, len(bad))]
        example = int(bad[0])
        person = ", ".join(f"{n} = {plain_column(columns[n])[example]}" for n in self.names)
        broken = self._broken_by(columns, example, len(index))
        raise self.file.complain(
            ("constraints", broken),
            f"{self.spec.constraints[broken]!r} could not be met in {_ATTEMPTS} draws for "
            f"{len(bad)} people, such as one with {person} (quotas and what a household shares are "
            "not drawn again)",
        )

    def _holding(self, number: int, columns: Columns, size: int) -> Any:
        expression = self._constraints[number]
        used = {n: plain_column(columns[n]) for n in expression.names}
        try:
            return np.asarray(expression.evaluate(used, size), dtype=bool)
        except InvalidInputError as error:
            raise self.file.complain(("constraints", number), str(error)) from None

    def _breaking(self, columns: Columns, size: int) -> Any:
        """Places of those who break a constraint; counted."""
        good = np.ones(size, dtype=bool)
        for number, text in enumerate(self.spec.constraints):
            holds = self._holding(number, columns, size)
            self.rejected[text] += int(size - holds.sum())
            good &= holds
        return np.flatnonzero(~good)

    def _broken_by(self, columns: Columns, place: int, size: int) -> int:
        for number in range(len(self._constraints)):
            if not self._holding(number, columns, size)[place]:
                return number
        return 0

    def _table(self, columns: Columns, homes: tuple[Any, Any] | None) -> pa.Table:
        arrays: dict[str, Any] = {}
        for name, column in columns.items():
            if isinstance(column, Coded):
                codes = pa.array(column.codes.astype(np.int32))
                arrays[name] = pa.DictionaryArray.from_arrays(
                    codes, pa.array(column.names, pa.string())
                )
            else:
                arrays[name] = pa.array(np.ascontiguousarray(column))
        if homes is not None:
            arrays[HOUSEHOLD] = pa.array(homes[0])
            roles = self.spec.households.roles if self.spec.households else []
            if roles:
                codes = pa.array(np.minimum(homes[1], len(roles) - 1).astype(np.int32))
                arrays[ROLE] = pa.DictionaryArray.from_arrays(codes, pa.array(roles))
        return pa.table(arrays)


def _unite(held: Coded, other: Coded) -> None:
    """Have both number their categories alike."""
    names = list(dict.fromkeys([*held.names, *other.names]))
    held.names = names
    other.codes = np.array([names.index(n) for n in other.names])[other.codes]
    other.names = names


def _choose(bounds: Any, drawn: Any) -> Any:
    """Which class each drawn number falls into, by the classes' upper bounds."""
    return np.minimum(np.searchsorted(bounds, drawn, side="right"), len(bounds) - 1)


def _drawn(draw: Draw, drawn: Any) -> Any:
    """Values for numbers drawn evenly from [0, 1).

    Raises:
        ValueError: nothing lies between the bounds, or a value is too large to be a whole number.
    """
    if draw.shares is not None:
        return Coded(list(draw.shares), _choose(np.cumsum(list(draw.shares.values())), drawn))
    if draw.histogram is not None:
        found = _of_histogram(draw, drawn)
    else:
        found = _of_distribution(draw, drawn)
    if draw.min is not None or draw.max is not None:
        found = np.clip(found, draw.min, draw.max)  # what rounding errors may have carried over
    if draw.round is not None:
        found = np.round(found, draw.round)
        if draw.round <= 0:
            if len(found) and not (np.abs(found) < _WHOLE).all():
                raise ValueError("a value is too large for a whole number; set max")
            found = found.astype(np.int64)
    return found


def _of_histogram(draw: Draw, drawn: Any) -> Any:
    """Within the bounds, as if whatever lies beyond had been drawn again."""
    assert draw.histogram is not None
    edges = np.asarray(draw.histogram.edges, dtype=float)
    bounds = np.concatenate([[0.0], np.cumsum(draw.histogram.shares)])
    low = 0.0 if draw.min is None else float(np.interp(draw.min, edges, bounds))
    high = 1.0 if draw.max is None else float(np.interp(draw.max, edges, bounds))
    if high <= low:
        raise ValueError("the histogram has nothing between min and max")
    return np.interp(low + drawn * (high - low), bounds, edges)


def _of_distribution(draw: Draw, drawn: Any) -> Any:
    """Truncated to the bounds; from the upper end where those lie there, which is exact."""
    assert draw.distribution is not None
    made = frozen(draw.distribution, draw.params)
    discrete = hasattr(made.dist, "pmf")
    low = None if draw.min is None else (draw.min - 1 if discrete else draw.min)
    if low is not None and made.cdf(low) > 0.5:
        top = float(made.sf(low))
        bottom = 0.0 if draw.max is None else float(made.sf(draw.max))
        if top <= bottom:
            raise ValueError(f"{draw.distribution} has nothing between min and max")
        found = made.isf(top - drawn * (top - bottom))
    else:
        bottom = 0.0 if low is None else float(made.cdf(low))
        top = 1.0 if draw.max is None else float(made.cdf(draw.max))
        if top <= bottom:
            raise ValueError(f"{draw.distribution} has nothing between min and max")
        found = made.ppf(bottom + drawn * (top - bottom))
    if not np.isfinite(found).all():
        raise ValueError(f"{draw.distribution} gave a value that is not finite")
    return found


def _coded(column: Any) -> Any:
    """A table's column: categories, or numbers where they are no texts and no few whole ones."""
    if pa.types.is_floating(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=float)
    if pa.types.is_integer(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)
    texts = column.cast(pa.string()).combine_chunks().fill_null("")
    encoded = texts.dictionary_encode()
    return Coded(encoded.dictionary.to_pylist(), np.asarray(encoded.indices, dtype=np.int64))


def save(table: pa.Table, path: Path) -> None:
    """Write a population's rows.

    Raises:
        InvalidInputError: the ending is none of .parquet, .csv, .jsonl, or the place can't be
            written.
    """
    writers: dict[str, Callable[[pa.Table, Path], None]] = {
        ".parquet": lambda rows, to: pq.write_table(rows, to, compression="zstd"),
        ".csv": lambda rows, to: pacsv.write_csv(_decoded(rows), to),
        ".jsonl": _write_lines,
    }
    write = writers.get(path.suffix)
    if write is None:
        raise InvalidInputError(f"{path}: the ending must be one of {', '.join(writers)}")
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(table, half)
            half.replace(path)  # nobody ever sees half a file
        finally:
            half.unlink(missing_ok=True)
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidInputError(f"{path} can't be written: {error}") from None


def refuse_to_replace_texts(path: Path) -> None:
    """Complain if a stored population was written by a model: that has cost something.

    Raises:
        InvalidInputError: it was.
    """
    if path.is_file() and path.suffix == ".parquet":
        schema = pq.read_schema(path)
        if b"populace" in (schema.metadata or {}):
            raise InvalidInputError(
                f"{path} holds people whom a model has written; choose another name, or remove it "
                "first"
            )


def _decoded(table: pa.Table) -> pa.Table:
    return pa.table(
        {
            name: table[name].cast(pa.string())
            if pa.types.is_dictionary(table[name].type)
            else table[name]
            for name in table.column_names
        }
    )


def _write_lines(table: pa.Table, path: Path) -> None:
    import json

    with path.open("w", encoding="utf-8") as out:
        for batch in table.to_batches(10_000):
            for row in batch.to_pylist():
                out.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
