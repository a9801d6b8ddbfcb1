"""Events of a run's environments as a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from services.recorder.messages import column_of, json_text, write_table
from shared.logs import get_logger

_log = get_logger(__name__)

SCHEMA = pa.schema(
    [
        pa.field("run", pa.string()),
        pa.field("path", pa.string()),
        pa.field("name", pa.string()),
        pa.field("round", pa.int32()),
        pa.field("number", pa.int64()),
        pa.field("by", pa.string()),
        pa.field("arguments", pa.string()),
        pa.field("value", pa.string()),
    ]
)
"""``number``: counts an environment's events, from 1. ``by``: the agent whose call led to it."""


_LIFE = b"life"
"""Where the file says which life of the run it was written in."""


class EventTable:
    """Collects events; of one that is told again as its round is played again, the last counts.

    Args:
        run: the run's name.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._by_path: dict[str, dict[int, tuple[Any, ...]]] = {}

    def add(self, told: dict[str, Any]) -> None:
        """Take an event as the stream holds it."""
        path, number = str(told["path"]), int(told["number"])
        events = self._by_path.setdefault(path, {})
        if events.pop(number, None) is not None:
            # What followed when this was told first did not happen.
            for later in [n for n in events if n > number]:
                del events[later]
        events[number] = (
            self._run,
            path,
            str(told["name"]),
            int(told["round"]),
            number,
            str(told["by"]) or None,
            json_text(told["arguments"]),
            json_text(told["value"]),
        )

    def read(self, path: Path, is_outdated: Callable[[int, int], bool]) -> None:
        """Take what a run had told when it was over for the first time.

        Args:
            path: the file of then; there may be none.
            is_outdated: whether a round was played again by a later life than the one given.
        """
        if not path.exists():
            return
        try:
            table = pq.read_table(path).select(SCHEMA.names)
        except (pa.ArrowException, OSError, KeyError) as why:
            _log.error("the events on disk are damaged", file=str(path), error=str(why))
            return
        life = int((table.schema.metadata or {}).get(_LIFE, b"1"))
        for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
            _, where, _, round_number, number, *_ = row
            if not is_outdated(life, round_number):
                self._by_path.setdefault(where, {})[number] = row

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(map(len, self._by_path.values()))

    @property
    def missing(self) -> int:
        """How many were told, and were gone from the stream before they could be read."""
        return sum(max(events) - len(events) for events in self._by_path.values() if events)

    def write(self, path: Path, life: int) -> None:
        """Write them, by environment and number, as of a life of the run."""
        rows = [
            events[number]
            for _, events in sorted(self._by_path.items())
            for number in sorted(events)
        ]
        columns: list[Any] = list(zip(*rows, strict=True)) if rows else [[] for _ in SCHEMA]
        table = pa.table(
            [column_of(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)],
            schema=SCHEMA.with_metadata({_LIFE: str(life)}),
        )
        write_table(table, path)
