"""Where people come from: names, files, or what a request itself holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from populace.personas.people import PROBLEM, TEXT, find_people, people_path, read_rows
from populace.personas.sampling import Sampler
from populace.personas.spec import PopulationFile
from shared.errors import InvalidInputError
from shared.messages.persona import PeopleRequest
from shared.settings import Settings

_MOST_CATEGORIES = 200


def open_sampler(
    source: str | dict[str, Any], settings: Settings, overrides: dict[str, Any] | None = None
) -> Sampler:
    """The sampler of a population: a template, the path of a file, or what a file would hold.

    Raises:
        InvalidInputError: there is none, or it may not be read.
        PopulationError: it can't be used.
    """
    if isinstance(source, dict):
        return Sampler(PopulationFile(source, overrides))
    path = _path(source, settings)
    if path.suffix not in (".yaml", ".yml"):
        raise InvalidInputError(f"{path.name} holds people, not a population file")
    return Sampler(PopulationFile(path, overrides))


def _path(name: str, settings: Settings) -> Path:
    found = find_people(name, Path(), settings.personas_dir)
    return people_path(found, (*settings.roots, settings.personas_dir.resolve()))


@dataclass(frozen=True)
class Source:
    """People that can be had in slices."""

    size: int
    sampler: Sampler | None
    table: pa.Table | None

    def rows(self, start: int = 0, stop: int | None = None) -> pa.Table:
        """The people from ``start`` up to, and without, ``stop``; only these are drawn."""
        stop = self.size if stop is None else stop
        if self.sampler is not None:
            return self.sampler.rows(start, stop)
        assert self.table is not None
        return self.table.slice(start, stop - start)


def open_source(request: PeopleRequest, settings: Settings) -> Source:
    """The people that a request means.

    Raises:
        InvalidInputError: there are none, or they may not be read.
        PopulationError: the population file can't be used.
    """
    problem = request.given()
    if problem is not None:
        raise InvalidInputError(problem)
    overrides = {
        key: value
        for key, value in (("size", request.size), ("seed", request.seed))
        if value is not None
    }
    if request.rows is not None:
        try:
            table = pa.Table.from_pylist(request.rows)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InvalidInputError(f"rows: must all have the same columns: {error}") from None
        return _of_table(table, request.size, "rows")
    if request.population is not None:
        return _of_sampler(open_sampler(request.population, settings, overrides))
    assert request.people is not None
    path = _path(request.people, settings)
    if path.suffix in (".yaml", ".yml"):
        return _of_sampler(Sampler(PopulationFile(path, overrides)))
    return _of_table(read_rows(path), request.size, path.name)


def open_people(request: PeopleRequest, settings: Settings) -> tuple[pa.Table, Sampler | None]:
    """All the people that a request means, and their sampler if they are drawn.

    Raises:
        InvalidInputError: there are none, or they may not be read.
        PopulationError: the population file can't be used.
    """
    source = open_source(request, settings)
    return source.rows(), source.sampler


def _of_sampler(sampler: Sampler) -> Source:
    return Source(sampler.spec.size, sampler, None)


def _of_table(table: pa.Table, size: int | None, what: str) -> Source:
    if size is not None and size > table.num_rows:
        raise InvalidInputError(
            f"{what} holds {table.num_rows:,} people, fewer than {size:,}; for a template of the "
            "same name say template:NAME"
        )
    return Source(table.num_rows if size is None else size, None, table)


def categories_of(table: pa.Table) -> dict[str, list[str]]:
    """The categories of each column of texts, where they are few enough to be categories."""
    found: dict[str, list[str]] = {}
    for name in table.column_names:
        kind = table[name].type
        if name in (TEXT, PROBLEM, "name") or not (
            pa.types.is_dictionary(kind) or pa.types.is_string(kind)
        ):
            continue
        distinct = [v for v in table[name].cast(pa.string()).unique().to_pylist() if v]
        if len(distinct) <= _MOST_CATEGORIES:
            found[name] = distinct
    return found
