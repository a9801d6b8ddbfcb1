"""Answers of a run, grouped by a column such as one of the personas'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shared.errors import InvalidInputError


def grouped(path: Path, by: str) -> list[dict[str, Any]]:
    """Per round and value of a column: answers, failures, mean and standard deviation.

    Args:
        path: the run's ``answers.parquet``.
        by: the column.

    Returns:
        ``{"round", by, "answers", "failed", "mean", "deviation", "tokens"}``, by round and value.

    Raises:
        InvalidInputError: there is no such file or column.
    """
    try:
        table = pq.read_table(path)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise InvalidInputError(f"{path} can't be read: {error}") from None
    if by not in table.column_names:
        raise InvalidInputError(
            f"the answers have no column {by!r} (there are: {', '.join(table.column_names)})"
        )
    table = table.append_column("_failed", pc.is_valid(table["error"]).cast(pa.int64()))
    found = table.group_by(["round", by]).aggregate(
        [
            ("agent", "count"),
            ("_failed", "sum"),
            ("value", "mean"),
            ("value", "stddev"),
            ("tokens", "sum"),
        ]
    )
    rows = [
        {
            "round": row["round"],
            by: row[by],
            "answers": row["agent_count"] - row["_failed_sum"],
            "failed": row["_failed_sum"],
            "mean": row["value_mean"],
            "deviation": row["value_stddev"],
            "tokens": row["tokens_sum"],
        }
        for row in found.to_pylist()
    ]
    return sorted(rows, key=lambda row: (row["round"], str(row[by])))
