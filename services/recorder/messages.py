"""Messages between agents as a table: who called whom with what, and what came back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shared.codec import to_json, writable
from shared.errors import CodecError
from shared.logs import get_logger

_log = get_logger(__name__)

SCHEMA = pa.schema(
    [
        pa.field("run", pa.string()),
        pa.field("round", pa.int32()),
        pa.field("sender", pa.string()),
        pa.field("receiver", pa.string()),
        pa.field("method", pa.string()),
        pa.field("arguments", pa.string()),
        pa.field("answer", pa.string()),
        pa.field("error", pa.string()),
        pa.field("batch", pa.string()),
    ]
)
"""``sender`` and ``receiver``: agents by name, environments by path. ``sender`` is null where the
caller did not wait for the answer. ``arguments`` (``[args, kwargs]``) and ``answer`` are JSON."""


class MessageTable:
    """Collects a run's messages in parts, as answers are collected.

    Args:
        path: the run's folder.
        run: its name.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run
        self._parts = path / "messages.parts"
        self._columns: list[list[Any]] = [[] for _ in SCHEMA]
        self._seen: set[str] = set()
        self._part = 0
        merged = path / "messages.parquet"
        if merged.exists() and not self._parts.exists():  # the run was over, and goes on
            self._parts.mkdir()
            merged.rename(self._parts / "000000.parquet")
        self._read()

    def _read(self) -> None:
        """Learn what is on disk."""
        self._seen.clear()
        for file in self._files():
            self._part = max(self._part, int(file.stem))
            table = read_part(file, ["batch"])
            if table is not None:
                self._seen.update(table["batch"].unique().to_pylist())

    def _files(self) -> list[Path]:
        return sorted(self._parts.glob("*.parquet"))

    @property
    def batches(self) -> int:
        """How many batches were taken, or left out."""
        return len(self._seen)

    def leave_out(self, told: dict[str, Any]) -> None:
        """Note a batch that does not count any more."""
        self._seen.add(str(told["batch"]))

    @property
    def waiting(self) -> int:
        """Rows that are not on disk yet."""
        return len(self._columns[0])

    def add(self, told: dict[str, Any]) -> None:
        """Take a batch; one that came before is left out.

        Raises:
            CodecError: it hasn't the columns of one.
        """
        try:
            batch, round_number, method = str(told["batch"]), int(told["round"]), told["method"]
            if batch in self._seen:
                return
            rows = list(
                zip(
                    told["senders"],
                    told["receivers"],
                    told["arguments"],
                    told["values"],
                    told["errors"],
                    strict=True,
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CodecError(f"a batch of messages has the wrong shape: {error!r}") from None
        self._seen.add(batch)
        for sender, receiver, arguments, value, failure in rows:
            row = (
                self._run,
                round_number,
                sender,
                receiver,
                str(method),
                json_text(arguments),
                None if failure else json_text(value),
                failure,
                batch,
            )
            for column, cell in zip(self._columns, row, strict=True):
                column.append(cell)

    def flush(self) -> None:
        """Write what waits as a part of its own."""
        if not self.waiting:
            return
        self._parts.mkdir(parents=True, exist_ok=True)
        table = pa.table(
            [column_of(c, f.type) for c, f in zip(self._columns, SCHEMA, strict=True)],
            schema=SCHEMA,
        )
        self._part += 1
        write_table(table, self._parts / f"{self._part:06d}.parquet")
        self._columns = [[] for _ in SCHEMA]

    def restore(self, round_number: int) -> None:
        """Forget what is of later rounds than this one."""
        self.flush()
        for file in self._files():
            keep_rounds(file, round_number)
        self._read()

    def finish(self) -> int:
        """Write ``messages.parquet`` if there are any; returns how many."""
        self.flush()
        count = 0
        files = self._files()
        if files:
            draft = self._path / "messages.tmp"
            with pq.ParquetWriter(draft, SCHEMA, compression="zstd") as writer:
                for file in files:
                    table = read_whole(file).cast(SCHEMA)
                    count += table.num_rows
                    writer.write_table(table)
            put_in_place(draft, self._path / "messages.parquet")
            shutil.rmtree(self._parts)
        return count


def read_part(file: Path, columns: list[str] | None = None) -> pa.Table | None:
    """A part of a run's results, or None if it is damaged: then it is put aside.

    What it held is read from the stream again when the run is over.

    Raises:
        OSError: the disk does not give it; that is no fault of the file.
    """
    try:
        return pq.read_table(file, columns=columns)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OSError) as why:
        if isinstance(why, OSError) and why.errno is not None:
            raise
        _log.error("a part of a run's results is damaged", file=str(file), error=str(why))
        file.rename(file.with_suffix(".damaged"))
        return None


def read_whole(file: Path) -> pa.Table:
    """A part of a run's results that had been read before.

    Raises:
        OSError: it is damaged beyond what was looked at then: the run has to be read anew.
    """
    table = read_part(file)
    if table is None:
        raise OSError(f"{file} is damaged")
    return table


def keep_rounds(file: Path, last: int) -> None:
    """Drop what a part holds of later rounds than this one."""
    table = read_part(file)
    if table is None:
        return
    kept = table.filter(pc.field("round") <= last)
    if kept.num_rows < table.num_rows:
        write_table(kept, file)


def json_text(value: Any) -> str:
    """JSON for a table's cell; numbers that JSON lacks become null, as on the wire."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(to_json(value)), ensure_ascii=False)


def column_of(cells: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    """Cells as a column; what texts hold that is no text is left out of them."""
    try:
        return pa.array(cells, kind)
    except UnicodeEncodeError:
        return pa.array([writable(cell) for cell in cells], kind)


def write_table(table: pa.Table, path: Path) -> None:
    """Write a file whole, or not at all."""
    draft = path.with_suffix(".tmp")
    pq.write_table(table, draft, compression="zstd")
    put_in_place(draft, path)


def put_in_place(draft: Path, path: Path) -> None:
    """Give a file its name once it is on the disk, so that no power cut leaves half of one."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
