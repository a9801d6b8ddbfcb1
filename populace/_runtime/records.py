"""Records: answers as the result stream carries them, stored before they count as recorded.

A batch is plain columns, so that a reader needs msgpack or JSON and nothing of ours::

    {"run", "round", "population", "method",
     "call": which recorded call of the run, from 1,
     "batch": the batch's name, unique in the run,
     "life": which life of the run, see ``Subjects.scope``,
     "agents": [numbers], "values": [answers, None if failed],
     "errors": [[place in the columns, kind, message], ...],
     "tokens": [...] or None, "tokens_out": [...] or None, "models": [...] or None,
     "seconds": [...] or None,
     "field": the part of each answer that is its number, or None,
     "backends": names of the model back ends that answered,
     "backend_of": [names], where these are several; or None,
     "personas": {attribute: [values]} or None}
"""

from __future__ import annotations

import asyncio
from typing import Any

from shared.bus import Bus
from shared.codec import CONTENT_TYPE, JSON_TYPE, MSGPACK_TYPE, pack_plain, plain, to_json, writable
from shared.errors import BusError, CodecError, PopulaceError
from shared.logs import get_logger
from shared.streams import append_patiently
from shared.subjects import Subjects

_log = get_logger(__name__)

_AT_ONCE = 16
_MESSAGE_LIMIT = 2000


class Recorder:
    """Publishes records to a run's result stream, a bounded number of batches at once."""

    def __init__(self, bus: Bus, subjects: Subjects, run: str, results_format: str) -> None:
        self._bus = bus
        self._subjects = subjects
        self._run = run
        self._as_json = results_format == "json"
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def store(self, columns: dict[str, Any]) -> None:
        """Store one batch; returns once the stream has it.

        Raises:
            PopulaceError: the stream would not take it, though it was tried for a while.
        """
        columns = {**columns, "run": self._run, "values": [plain(v) for v in columns["values"]]}
        if self._as_json:
            columns["personas"] = _plain_personas(columns["personas"])
        async with self._slots:
            await self._store(columns)

    async def store_messages(self, columns: dict[str, Any]) -> None:
        """Store a batch of messages between agents; one that can't be is lost, with a word."""
        subject = self._subjects.run_messages(self._run, columns["round"])
        lists = ("senders", "receivers", "arguments", "values", "errors")
        data = _packed(columns)
        if len(data) > self._bus.max_payload and len(columns["senders"]) > 1:
            half = len(columns["senders"]) // 2
            for name, cut in (("a", slice(0, half)), ("b", slice(half, None))):
                part = {key: columns[key][cut] for key in lists}
                await self.store_messages({**columns, **part, "batch": columns["batch"] + name})
            return
        name = f"{self._bus.process}/messages/{columns['batch']}"
        try:
            async with self._slots:
                await append_patiently(self._bus, subject, data, headers={}, message_id=name)
        except BusError as error:
            _log.error("messages are not recorded", batch=columns["batch"], error=str(error))

    async def _store(self, columns: dict[str, Any]) -> None:
        data = to_json(columns) if self._as_json else _packed(columns)
        if len(data) > self._bus.max_payload:
            await self._store_halves(columns, len(data))
            return
        subject = self._subjects.run_results(self._run, columns["round"])
        headers = {CONTENT_TYPE: JSON_TYPE if self._as_json else MSGPACK_TYPE}
        name = f"{self._bus.process}/{columns['batch']}"
        try:
            await append_patiently(self._bus, subject, data, headers=headers, message_id=name)
        except BusError as error:
            raise PopulaceError(f"the result stream does not take records: {error}") from error

    async def _store_halves(self, columns: dict[str, Any], size: int) -> None:
        count = len(columns["agents"])
        if count == 1:
            reason = f"the answer takes {size} bytes, more than one message may hold"
            _log.error("an answer is too large to be recorded", batch=columns["batch"], bytes=size)
            await self._store(
                {**columns, "values": [None], "errors": [[0, "PayloadTooLargeError", reason]]}
            )
            return
        half = count // 2
        for name, start, stop in (("a", 0, half), ("b", half, count)):
            await self._store(
                {
                    **columns,
                    "batch": f"{columns['batch']}{name}",
                    "agents": columns["agents"][start:stop],
                    "values": columns["values"][start:stop],
                    "errors": [
                        [place - start, kind, text]
                        for place, kind, text in columns["errors"]
                        if start <= place < stop
                    ],
                    "tokens": columns["tokens"] and columns["tokens"][start:stop],
                    "tokens_out": columns["tokens_out"] and columns["tokens_out"][start:stop],
                    "models": columns["models"] and columns["models"][start:stop],
                    "backend_of": columns["backend_of"] and columns["backend_of"][start:stop],
                    "seconds": columns["seconds"] and columns["seconds"][start:stop],
                    "personas": columns["personas"]
                    and {k: v[start:stop] for k, v in columns["personas"].items()},
                }
            )


def _packed(columns: dict[str, Any]) -> bytes:
    try:
        return pack_plain(columns)
    except CodecError:  # half a character in what is said, or an attribute of a rare type
        if columns.get("personas"):
            columns = {**columns, "personas": _plain_personas(columns["personas"])}
        return pack_plain(writable(columns))


def _plain_personas(personas: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
    """Attributes in JSON's terms: dates as texts, say."""
    return personas and {name: [_plain_cell(c) for c in cells] for name, cells in personas.items()}


def _plain_cell(cell: Any) -> Any:
    try:
        return plain(cell)
    except CodecError:
        return str(cell)


def batch_of(
    *,
    round_number: int,
    population: str,
    method: str,
    call: int,
    batch: str,
    life: int,
    agents: list[int],
    values: list[Any],
    errors: list[list[Any]],
    tokens: list[int] | None = None,
    tokens_out: list[int] | None = None,
    models: list[str | None] | None = None,
    seconds: list[float] | None = None,
    field: str | None = None,
    backends: list[str] | None = None,
    backend_of: list[str | None] | None = None,
    personas: dict[str, list[Any]] | None = None,
) -> dict[str, Any]:
    """The columns of one batch; ``errors`` are ``[place, kind, message]``."""
    return {
        "round": round_number,
        "population": population,
        "method": method,
        "call": call,
        "batch": batch,
        "life": life,
        "agents": agents,
        "values": values,
        "errors": [[place, kind, text[:_MESSAGE_LIMIT]] for place, kind, text in errors],
        "tokens": tokens,
        "tokens_out": tokens_out,
        "models": models,
        "seconds": seconds,
        "field": field,
        "backends": backends or [],
        "backend_of": backend_of,
        "personas": personas,
    }
