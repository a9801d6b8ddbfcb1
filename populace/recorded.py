"""Recorded runs: what the recorder wrote of them, as tables; and two of them compared."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from shared.errors import InvalidInputError
from shared.ids import check_token
from shared.settings import Settings, load_settings

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_KEY = ["round", "call", "population", "agent", "method"]
_COMPARED = ["value", "answer", "error"]


class RecordedRun:
    """A run's answers, rounds and manifest, as files hold them.

    While the run is still under way, or if it was cut off, what was written so far is read.

    Args:
        folder: the run's.

    Raises:
        InvalidInputError: it holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder.name
        if not (folder / "answers.parquet").exists() and not self._parts():
            raise InvalidInputError(f"there is no recorded run {self.run!r} in {folder.parent}")

    def _parts(self) -> list[Path]:
        return sorted((self.folder / "answers.parts").glob("*.parquet"))

    @property
    def complete(self) -> bool:
        """Whether the run is over, and all of it is here."""
        return (self.folder / "manifest.json").exists()

    @property
    def manifest(self) -> dict[str, Any]:
        """Scenario, seed, versions, models, machines, times, costs, failures.

        Raises:
            InvalidInputError: the run is not over, or the file can't be read.
        """
        found: dict[str, Any] = self._read("manifest.json")
        return found

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """A row per round: answers, failures, what the scenario noted, seconds, costs.

        Raises:
            InvalidInputError: the run is not over, or the file can't be read.
        """
        found: list[dict[str, Any]] = self._read("rounds.json")
        return found

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            raise InvalidInputError(
                f"the run {self.run!r} is not over, so it has no {name}"
            ) from None
        except ValueError as error:
            raise InvalidInputError(f"{self.folder / name} can't be read: {error}") from None

    def _files(self) -> list[Path]:
        whole = self.folder / "answers.parquet"
        return [whole] if whole.exists() else self._parts()

    def write_csv(self, target: Path | BinaryIO) -> int:
        """Write all answers as CSV; lists and mappings are JSON in their cells.

        Args:
            target: a file's path, or an open file.

        Returns:
            How many there are.

        Raises:
            InvalidInputError: the answers can't be read, or not be written so.
            OSError: the file can't be written.
        """
        import pyarrow as pa
        import pyarrow.csv
        import pyarrow.parquet as pq

        count = 0
        try:
            files = self._files()
            whole = answers_schema([pq.read_schema(file) for file in files])
            schema = pa.schema([_flat(one) for one in whole])
            with pa.csv.CSVWriter(target, schema) as writer:
                for file in files:
                    with pq.ParquetFile(file) as parquet:
                        for batch in parquet.iter_batches():
                            writer.write_table(fit_answers(pa.Table.from_batches([batch]), schema))
                            count += batch.num_rows
        except pa.ArrowException as error:
            raise InvalidInputError(
                f"the answers of {self.run!r} can't be written as CSV: {error}"
            ) from None
        return count

    def to_arrow(self) -> pa.Table:
        """All answers: one row per agent, round and recorded call; see ``docs/results.md``.

        Raises:
            InvalidInputError: a file can't be read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return concat_answers([pq.read_table(file) for file in self._files()])
        except (OSError, pa.ArrowException) as error:
            raise InvalidInputError(f"the answers of {self.run!r} can't be read: {error}") from None

    def to_pandas(self) -> pd.DataFrame:
        """The same as a pandas DataFrame; needs pandas.

        Raises:
            InvalidInputError: it isn't installed.
        """
        _library("pandas")
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """The same as a ``polars.DataFrame``; needs polars.

        Raises:
            InvalidInputError: it isn't installed.
        """
        return _library("polars").from_arrow(self.to_arrow())

    def duckdb(self) -> Any:
        """The same as a ``duckdb.DuckDBPyRelation``, for SQL; needs duckdb.

        Raises:
            InvalidInputError: it isn't installed.
        """
        return _library("duckdb").from_arrow(self.to_arrow())

    def __repr__(self) -> str:
        return f"<RecordedRun {self.run} in {self.folder}>"


def concat_answers(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables of answers as one.

    Persona columns may lack in some; one that has another type in each (an attribute of two
    populations, say) becomes text.
    """
    import pyarrow as pa

    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        schema = answers_schema([table.schema for table in tables])
        return pa.concat_tables([fit_answers(table, schema) for table in tables])


def answers_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The schema of tables of answers as one, see ``concat_answers``."""
    import pyarrow as pa

    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        types: dict[str, pa.DataType] = {}
        for schema in schemas:
            for one in schema:
                known = types.setdefault(one.name, one.type)
                if known != one.type:
                    types[one.name] = _common(known, one.type)
        return pa.schema([pa.field(name, kind) for name, kind in types.items()])


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    try:
        pair = [pa.schema([("x", one)]), pa.schema([("x", other)])]
        return pa.unify_schemas(pair, promote_options="permissive").field("x").type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return pa.string()


def fit_answers(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table with the columns of a schema of ``answers_schema``; those that it lacks are null."""
    import pyarrow as pa

    columns = []
    for one in schema:
        if one.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, one.type))
            continue
        column = table[one.name]
        if pa.types.is_nested(column.type) and column.type != one.type:
            texts = [None if v is None else json.dumps(v, default=str) for v in column.to_pylist()]
            column = pa.array(texts, pa.string())
        columns.append(column if column.type == one.type else column.cast(one.type))
    return pa.table(columns, schema=schema)


def _flat(one: pa.Field) -> pa.Field:
    """The field as a cell of a table holds it: lists and mappings as JSON."""
    import pyarrow as pa

    flat = not (pa.types.is_dictionary(one.type) or pa.types.is_nested(one.type))
    return one if flat else one.with_type(pa.string())


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InvalidInputError(f"this needs {name}: pip install {name}") from None


def results(run: str, settings: Settings | None = None) -> RecordedRun:
    """A recorded run by its name.

    Args:
        run: the name.
        settings: default: from the environment; ``POPULACE_RUNS_DIR`` says where runs are.

    Raises:
        InvalidInputError: there is none of that name.
    """
    settings = settings or load_settings()
    return RecordedRun(settings.runs_dir / check_token(run, "the run's name"))


def deleted_folder(folder: Path) -> Path:
    """What the folder of a run is called while the run is being deleted."""
    return folder.with_name(f".{folder.name}.deleted")


def put_away(folder: Path) -> Path:
    """Take a run's folder from under its name, before the broker forgets the run.

    Were it the other way round, and the deletion cut short in between, its files would be taken for
    those of the next run of that name.

    Args:
        folder: the run's; there may be none.

    Returns:
        Where it is, to be removed; what a deletion that was cut short has left is there, too.
    """
    away = deleted_folder(folder)
    if folder.exists():
        shutil.rmtree(away, ignore_errors=True)
        folder.rename(away)
    return away


@dataclass
class Comparison:
    """How the answers of two runs differ."""

    equal: int
    """Answers that are the same in both, failures included."""
    different: list[dict[str, Any]]
    """Answers to the same call that differ, the first few: the call, and both."""
    differing: int
    """How many there are of those."""
    only_first: int
    only_second: int
    """Answers to calls that only one of them has."""

    @property
    def identical(self) -> bool:
        """Whether both have the same answers to the same calls."""
        return not (self.differing or self.only_first or self.only_second)


def compare(first: RecordedRun, second: RecordedRun, show: int = 5) -> Comparison:
    """Compare the answers of two runs, call by call.

    Args:
        first: one run.
        second: the other.
        show: how many differences to list.

    Raises:
        InvalidInputError: files can't be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = [*_KEY, *_COMPARED]
    tables = [run.to_arrow().select(columns) for run in (first, second)]
    if tables[0].equals(tables[1]):
        return Comparison(tables[0].num_rows, [], 0, 0, 0)
    joined = tables[0].join(
        tables[1], keys=_KEY, join_type="inner", left_suffix="", right_suffix="_second"
    )
    same = None
    for name in _COMPARED:
        one, other = joined[name], joined[f"{name}_second"]
        nothing = {"nan_is_null": True} if name == "value" else {}
        both_null = pc.and_(pc.is_null(one, **nothing), pc.is_null(other, **nothing))
        here = pc.or_(pc.fill_null(pc.equal(one, other), False), both_null)
        same = here if same is None else pc.and_(same, here)
    differing = joined.filter(pc.invert(same))
    differing = differing.sort_by([(name, "ascending") for name in _KEY])
    found = [
        {
            **{name: row[name] for name in _KEY},
            "first": _shown(row, ""),
            "second": _shown(row, "_second"),
        }
        for row in differing.slice(0, show).to_pylist()
    ]
    assert isinstance(joined, pa.Table)
    return Comparison(
        equal=joined.num_rows - differing.num_rows,
        different=found,
        differing=differing.num_rows,
        only_first=tables[0].num_rows - joined.num_rows,
        only_second=tables[1].num_rows - joined.num_rows,
    )


def _shown(row: dict[str, Any], suffix: str) -> Any:
    error, answer, value = (row[f"{name}{suffix}"] for name in ("error", "answer", "value"))
    if error is not None:
        return f"failed: {error}"
    return value if answer is None else answer
