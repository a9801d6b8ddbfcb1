"""Populations: those that are stored, the templates, and those that are being written."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from populace.personas.jobs import people_job
from populace.personas.people import PROBLEM, TEXT, templates
from shared.errors import InvalidInputError
from shared.ids import check_token
from shared.messages.persona import (
    EnrichRequest,
    JobInfo,
    JobRecord,
    Sampled,
    SampleRequest,
)
from shared.service import ask

if TYPE_CHECKING:
    from services.manager.manager import Manager

_MOST_BARS = 30
_BINS = 24
_SAMPLE = 12
_DRAWN = 1500
"""People that are drawn of a template, to show what it is like."""
_WITHIN = 30.0
_DESCRIBED_HELD = 20


class PeopleBook:
    """Looks populations up, and has them written.

    Args:
        manager: whose.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._described: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()

    async def all(self) -> dict[str, Any]:
        """Stored populations, templates, and what was or is being written."""
        stored = await asyncio.to_thread(_stored, self._manager.settings.personas_dir)
        return {"stored": stored, "templates": templates(), "jobs": await self.jobs()}

    async def jobs(self) -> list[dict[str, Any]]:
        """Populations that are, or were, written, latest first.

        Raises:
            BusError: the broker does not answer.
        """
        bus, subjects = self._manager.bus, self._manager.settings.subjects
        bucket = await bus.bucket(subjects.bucket_persona_jobs)
        found = []
        for entry in await bucket.entries():
            if "." in entry.key:  # rows of one
                continue
            info = JobRecord.model_validate_json(entry.value).info
            found.append({**info.model_dump(mode="json"), "over": info.over})
        return sorted(found, key=lambda row: -row["updated"])

    async def one(self, name: str, seed: int = 0) -> dict[str, Any]:
        """A stored population, or a template: margins, and a few people.

        Args:
            name: of the population; ``template:`` before that of a template.
            seed: which people are shown.

        Raises:
            InvalidInputError: there is none of that name.
        """
        if name.startswith("template:"):
            return await self._template(name, seed)
        path = self._manager.settings.personas_dir / f"{check_token(name, 'the name')}.parquet"
        job = next((job for job in await self.jobs() if job["name"] == name), None)
        if path.is_file():
            told = await asyncio.to_thread(self._described_once, path, seed)
        elif job is not None:  # it is stored once it is written
            told = {
                "people": job["total"],
                "written": 0,
                "margins": [],
                "sample": [],
                "columns": [],
            }
        else:
            raise InvalidInputError(f"there is no stored population {name!r}")
        return {"name": name, "template": False, "job": job, **told}

    def _described_once(self, path: Path, seed: int) -> dict[str, Any]:
        """In a thread: read once for each state of the file."""
        status = path.stat()
        key = (str(path), status.st_mtime_ns, status.st_size, seed)
        held = self._described.get(key)
        if held is None:
            held = self._described[key] = _describe(path, seed)
            while len(self._described) > _DESCRIBED_HELD:
                self._described.popitem(last=False)
        return held

    async def _template(self, name: str, seed: int) -> dict[str, Any]:
        if name.removeprefix("template:") not in templates():
            raise InvalidInputError(f"there is no template {name!r}")
        request = SampleRequest(people=name, size=_DRAWN)
        subject = self._manager.settings.subjects.persona("sample")
        told = await ask(self._manager.bus, subject, request, Sampled, timeout=_WITHIN)
        table = pa.Table.from_pylist(told.rows or [])
        shown = _described(table, seed)
        fit = told.fit or {}
        asked = {m["name"]: m["asked"] for m in fit.get("margins", ())}
        for margin in shown["margins"]:
            margin["asked"] = [
                asked.get(margin["name"], {}).get(label) for label in margin["labels"]
            ]
        return {"name": name, "template": True, "job": None, **shown}

    async def write(self, request: EnrichRequest) -> JobInfo:
        """Have a population written.

        Raises:
            RemoteError: the persona service refused.
            BusError: none answers.
        """
        subject = self._manager.settings.subjects.persona("enrich")
        return await ask(self._manager.bus, subject, request, JobInfo, timeout=120, patience=2)

    async def draw(self, request: SampleRequest, *, replace: bool = False) -> Sampled:
        """Draw a population and store it.

        Args:
            request: which; ``store`` names it.
            replace: whether one of that name may be replaced.

        Raises:
            InvalidInputError: there is one of that name.
            RemoteError: the persona service refused.
            BusError: none answers.
        """
        if request.store is None:
            raise InvalidInputError("store: under which name the people are kept is missing")
        folder = self._manager.settings.personas_dir
        name = check_token(request.store, "the name")
        if not replace and (folder / f"{name}.parquet").exists():
            raise InvalidInputError(
                f"there is a population {name!r} already: choose another name, or say that it may "
                "be replaced"
            )
        subject = self._manager.settings.subjects.persona("sample")
        return await ask(self._manager.bus, subject, request, Sampled, timeout=120, patience=2)

    async def cancel(self, name: str) -> JobInfo:
        """Stop the writing of a population.

        Raises:
            RemoteError: it was never written.
            BusError: no persona service answers.
        """
        check_token(name, "the name")
        return await people_job(self._manager.bus, self._manager.settings, name, cancel=True)


def _stored(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("*.parquet")):
        try:
            parquet = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid):
            continue  # half written, or something else
        with parquet:
            names = parquet.schema_arrow.names
            found.append(
                {
                    "name": path.stem,
                    "people": parquet.metadata.num_rows,
                    "columns": [n for n in names if n not in (TEXT, PROBLEM)],
                    "written": TEXT in names,
                    "changed": path.stat().st_mtime,
                }
            )
    return found


def _describe(path: Path, seed: int) -> dict[str, Any]:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InvalidInputError(f"{path.name} can't be read: {error}") from None
    return _described(table, seed)


def _described(table: pa.Table, seed: int) -> dict[str, Any]:
    """Margins of all columns, and a few rows."""
    numbers = random.Random(seed).sample(  # noqa: S311
        range(table.num_rows), min(_SAMPLE, table.num_rows)
    )
    margins = [
        margin
        for name in table.column_names
        if name not in (TEXT, PROBLEM) and (margin := _margin(name, table[name])) is not None
    ]
    written = None
    if TEXT in table.column_names:
        written = table.num_rows - table[TEXT].null_count
    return {
        "people": table.num_rows,
        "written": written,
        "margins": margins,
        "sample": [
            {"number": n, **row}
            for n, row in zip(
                sorted(numbers),
                table.take(pa.array(sorted(numbers), pa.int64())).to_pylist(),
                strict=True,
            )
        ],
        "columns": [n for n in table.column_names if n not in (TEXT, PROBLEM)],
    }


def _margin(name: str, column: pa.ChunkedArray) -> dict[str, Any] | None:
    """How a column is spread: shares of categories, or of bins of a number."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(pa.string()), pa.string()
    whole = len(column) or 1
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        values = column.drop_null().to_numpy()
        if values.size and len(np.unique(values)) > _MOST_BARS:
            if pa.types.is_integer(kind):  # bins of equally many whole numbers
                low, high = int(values.min()), int(values.max())
                width = -(-(high - low + 1) // _BINS)
                edges = np.arange(low, high + width + 1, width)
                counts, _ = np.histogram(values, bins=edges)
                labels = [f"{a} to {b - 1}" for a, b in itertools.pairwise(edges.tolist())]
            else:
                counts, edges = np.histogram(values, bins=_BINS)
                labels = [f"{a:.3g} to {b:.3g}" for a, b in itertools.pairwise(edges.tolist())]
            shares = [float(n) / whole for n in counts]
            return {"name": name, "labels": labels, "shares": shares, "left_out": 0}
    if pa.types.is_nested(kind):
        return None
    counted = pc.value_counts(column.cast(pa.string())).to_pylist()
    counted.sort(key=lambda row: -row["counts"])
    shown = counted[:_MOST_BARS]
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        shown.sort(key=lambda row: float(row["values"] or 0))
    return {
        "name": name,
        "labels": ["(none)" if row["values"] is None else row["values"] for row in shown],
        "shares": [row["counts"] / whole for row in shown],
        "left_out": len(counted) - len(shown),
    }
