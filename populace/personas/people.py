"""People for a run: where a population comes from, and one person as an agent sees it.

Every worker imports this, so pyarrow, which few need, is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa

TEXT, PROBLEM = "text", "problem"
"""The columns that hold a written persona, if there is one, and why there is none."""
_NO_ATTRIBUTES = frozenset((TEXT, PROBLEM))


def attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what a model wrote of it."""
    return {name: value for name, value in row.items() if name not in _NO_ATTRIBUTES}


def told(row: Mapping[str, Any]) -> str:
    """Attributes as one text: ``age: 34; education: high school``."""
    return "; ".join(
        f"{name.replace('_', ' ')}: {value}" for name, value in row.items() if value is not None
    )


class Persona(Mapping[str, Any]):
    """One person: ``persona["age"]`` or ``persona.age``; ``persona.text`` for a prompt."""

    __slots__ = ("_people", "_row")

    def __init__(self, people: People, row: int) -> None:
        self._people = people
        self._row = row

    def __getitem__(self, name: str) -> Any:
        return self._people.value(name, self._row)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._people.names)

    def __len__(self) -> int:
        return len(self._people.names)

    @property
    def text(self) -> str:
        """The person in words: as written, or its attributes in one sentence."""
        if TEXT in self._people.names:
            text = self[TEXT]
            if text:
                return str(text)
        return f"You are a person with these attributes: {told(attributes(self))}."

    def __repr__(self) -> str:
        return f"<Persona {dict(self)}>"


class People:
    """The rows of the people that one shard's agents are.

    Args:
        table: a row for each agent.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table.combine_chunks()
        self.names: list[str] = table.column_names
        self._names = frozenset(self.names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def value(self, name: str, row: int) -> Any:
        """One person's value.

        Raises:
            KeyError: there is no such attribute.
        """
        if name not in self._names:
            raise KeyError(f"this persona has no {name!r} (it has: {', '.join(self.names)})")
        return self._table.column(name)[row].as_py()

    def column(self, name: str) -> pa.ChunkedArray:
        """An attribute of all people."""
        return self._table.column(name)

    def columns(self, rows: Sequence[int]) -> dict[str, list[Any]]:
        """The attributes of some people in the order of ``rows``, without written texts."""
        import pyarrow as pa

        some = self._table.take(pa.array(rows, pa.int64()))
        return {
            name: some.column(name).to_pylist() for name in self.names if name not in _NO_ATTRIBUTES
        }


_TEMPLATES = Path(__file__).parent / "templates"
_TEMPLATE = "template:"


def templates() -> list[str]:
    """Names of the population files that come with Populace."""
    return sorted(path.stem for path in _TEMPLATES.glob("*.yaml"))


def find_people(name: str, folder: Path | None, stored: Path) -> str:
    """What a scenario means: a file beside it, stored by name, or ``template:`` and its name.

    Raises:
        InvalidInputError: there is none.
    """
    if name.startswith(_TEMPLATE):
        name = name.removeprefix(_TEMPLATE)
        if name not in templates():
            raise InvalidInputError(
                f"there is no template {name!r} (there are: {', '.join(templates())})"
            )
        return f"{_TEMPLATE}{name}"
    for place in (*([folder / name] if folder is not None else []), stored / f"{name}.parquet"):
        if place.is_file():
            return str(place.resolve())
    if (_TEMPLATES / f"{name}.yaml").is_file():
        return f"{_TEMPLATE}{name}"
    known = sorted({*(p.stem for p in stored.glob("*.parquet")), *templates()})
    raise InvalidInputError(
        f"there are no people named {name!r}: neither a file beside the scenario, nor stored, nor "
        f"a template (there are: {', '.join(known) or 'none'})"
    )


def load_people(source: str, roots: Sequence[Path], count: int, start: int, stop: int) -> People:
    """The people from ``start`` to ``stop`` of ``count``; only these are drawn.

    Args:
        source: what ``find_people`` gave.
        roots: folders below which files may be read.
        count: number of agents of the whole population.
        start: first agent's number.
        stop: number after the last one's.

    Raises:
        InvalidInputError: the file can't be used, or holds too few people.
        PopulationError: it is a population file that can't be used.
    """
    path = people_path(source, roots)
    if path.suffix in (".yaml", ".yml"):
        try:
            from populace.personas.sampling import Sampler
            from populace.personas.spec import PopulationFile
        except ImportError as error:
            raise InvalidInputError(
                f"populations need numpy and scipy ({error}): pip install 'populace[personas]'"
            ) from None
        return People(Sampler(PopulationFile(path, {"size": count})).rows(start, stop))
    table = read_rows(path)
    _are_enough(path, table.num_rows, count)
    return People(table.slice(start, stop - start))


def _are_enough(path: Path, rows: int, count: int) -> None:
    if rows < count:
        raise InvalidInputError(
            f"{path.name} holds {rows:,} people, fewer than the {count:,} agents"
        )


def known_attributes(source: str, count: int) -> list[str]:
    """Names of what is known of the people, once it is sure that there are enough of them.

    Args:
        source: what ``find_people`` gave.
        count: number of agents of the whole population.

    Raises:
        InvalidInputError: the file can't be used, or holds too few people.
        PopulationError: it is a population file that can't be used.
    """
    path = Path(source).resolve()
    if path.suffix != ".parquet" or source.startswith(_TEMPLATE):
        return load_people(source, [path.parent], count, 0, 1).names
    import pyarrow as pa
    import pyarrow.parquet

    try:  # what it says of itself: it may hold millions of texts
        file = pa.parquet.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidInputError(f"{path} can't be read: {error}") from None
    with file:
        _are_enough(path, file.metadata.num_rows, count)
        return list(file.schema_arrow.names)


def find_matching(source: str, count: int, condition: str) -> list[int]:
    """Numbers of the people of whom a condition holds, out of the first ``count``.

    Args:
        source: what ``find_people`` gave.
        count: number of agents of the whole population.
        condition: an expression over attributes, such as ``age < 25 and gender == "female"``; a
            missing value is no number, and the empty text.

    Raises:
        InvalidInputError: the file or the condition can't be used.
        PopulationError: it is a population file that can't be used.
    """
    import pyarrow as pa

    try:
        from populace.personas.expressions import Expression
    except ImportError as error:
        raise InvalidInputError(
            f"conditions need numpy ({error}): pip install 'populace[personas]'"
        ) from None

    people = load_people(source, [Path(source).resolve().parent], count, 0, count)
    expression = Expression(condition, people.names)
    columns = {}
    for name in expression.names:
        column = people.column(name)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = column.fill_null("")
        columns[name] = column.to_numpy(zero_copy_only=False)
    found = expression.evaluate(columns, count)
    if found.dtype != bool:
        raise InvalidInputError(f"the condition {condition!r} is neither true nor false")
    return [int(number) for number in found.nonzero()[0]]


def people_path(source: str, roots: Sequence[Path]) -> Path:
    """The file that ``find_people`` found, if it may be read.

    Raises:
        InvalidInputError: it lies outside the folders of which files may be read.
    """
    if source.startswith(_TEMPLATE):
        name = source.removeprefix(_TEMPLATE)
        if name not in templates():  # a path would lead out of their folder
            raise InvalidInputError(f"there is no template {name!r}")
        return _TEMPLATES / f"{name}.yaml"
    path = Path(source).resolve()
    if not any(root in path.parents for root in roots):
        raise InvalidInputError(
            f"the people's file {source!r} is outside the folders that these services read "
            f"({', '.join(map(str, roots)) or 'none'}); see POPULACE_CODE_ROOTS"
        )
    return path


def read_rows(path: Path) -> pa.Table:
    """The rows of a file: .parquet, .csv with a header, or .jsonl with an object per line.

    Raises:
        InvalidInputError: it can't be read, or has another ending.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet

    readers = {
        ".parquet": pa.parquet.read_table,
        ".csv": pa.csv.read_csv,
        ".jsonl": pa.json.read_json,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise InvalidInputError(f"{path}: the ending must be one of {', '.join(readers)}")
    try:
        return reader(path)
    except FileNotFoundError:
        raise InvalidInputError(f"{path}: there is no such file") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidInputError(f"{path} can't be read: {error}") from None
