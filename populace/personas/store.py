"""Keeping ready people under a name: from files, or from DataFrames."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from populace.personas.people import TEXT
from populace.personas.sampling import refuse_to_replace_texts, save
from shared.errors import InvalidInputError
from shared.ids import check_token
from shared.settings import Settings, load_settings


def as_table(people: Any) -> pa.Table:
    """People from a DataFrame (pandas, polars), an Arrow table, or a list of dicts.

    Raises:
        InvalidInputError: it is something else, or the rows don't fit together.
    """
    try:
        if isinstance(people, pa.Table):
            return people
        if hasattr(people, "__arrow_c_stream__"):
            return pa.table(people)
        if isinstance(people, list):
            return pa.Table.from_pylist(people)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, AttributeError) as error:
        raise InvalidInputError(f"the people can't be read as a table: {error}") from None
    raise InvalidInputError(
        f"people come as a DataFrame, an Arrow table or a list of dicts, not as {type(people)}"
    )


def store_people(
    name: str,
    people: Any,
    *,
    columns: Mapping[str, str] | None = None,
    settings: Settings | None = None,
) -> Path:
    """Keep people under a name, for ``personas: <name>`` in scenarios.

    Args:
        name: of the population; one that is there already is replaced.
        people: DataFrame, Arrow table, or list of dicts; a column "text" holds written personas.
        columns: names in ``people`` to the names that the population shall have.
        settings: where to; default: as the environment says.

    Returns:
        The file.

    Raises:
        InvalidInputError: the people or the columns can't be used.
    """
    check_token(name, "the name")
    table = as_table(people)
    for theirs in columns or {}:
        if theirs not in table.column_names:
            raise InvalidInputError(
                f"there is no column {theirs!r} (there are: {', '.join(table.column_names)})"
            )
    renamed = [(columns or {}).get(n, n) for n in table.column_names]
    for ours in renamed:
        if not ours.isidentifier() or ours.startswith("_"):
            raise InvalidInputError(
                f"{ours!r} can't be an attribute's name; map it to one of letters and '_'"
            )
        if renamed.count(ours) > 1:
            raise InvalidInputError(f"two columns would be named {ours!r}")
    table = table.rename_columns(renamed)
    if TEXT in renamed and not pa.types.is_string(table[TEXT].type):
        table = table.set_column(renamed.index(TEXT), TEXT, table[TEXT].cast(pa.string()))
    path = (settings or load_settings()).personas_dir / f"{name}.parquet"
    if table.num_rows == 0:
        raise InvalidInputError("there are no people in it")
    refuse_to_replace_texts(path)
    save(table, path)
    return path


def stored_table(people: Any, settings: Settings) -> str:
    """Keep a table under a name that follows from what it holds; gives that name."""
    table = as_table(people)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    name = f"table-{hashlib.blake2b(sink.getvalue(), digest_size=8).hexdigest()}"
    store_people(name, table, settings=settings)
    return name
