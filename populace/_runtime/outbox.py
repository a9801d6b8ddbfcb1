"""What a worker sends to callers' inboxes: answers within their window, and what was kept."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from populace._runtime import pieces
from populace._runtime.flow import Answered
from shared.bus import Bus
from shared.codec import Codec
from shared.errors import BusError, CodecError, PayloadTooLargeError
from shared.logs import get_logger
from shared.messages import batch

if TYPE_CHECKING:
    from populace._runtime.shard import Group

_log = get_logger(__name__)

_RETAINED_BYTES = 32 << 20
_ROOM = 512
"""Bytes of a message left to what stands around its rows."""


class Outbox:
    """Packs answers, holds back what its taker can't take yet, and can repeat what was sent.

    Args:
        bus: the connection.
        codec: packs values.
        released: told of a group whose last row that was held back is on its way.
    """

    def __init__(self, bus: Bus, codec: Codec, released: Callable[[Group], None]) -> None:
        self._bus = bus
        self._codec = codec
        self._released = released
        self._rows: dict[tuple[str, str], list[tuple[Group, bytes]]] = {}
        self._fetched: dict[str, list[list[Any]]] = {}
        self._scheduled = False
        self._retained: deque[tuple[str, set[int], bytes]] = deque()
        self._retained_bytes = 0

    # Answers
    def answer(self, group: Group, row: list[Any]) -> None:
        """Send a row of answers at the end of this tick, or when its taker is ready."""
        flow = group.flow
        for packed in self._pack(row):
            if flow.held or not flow.open:
                flow.held.append((group, packed))
                group.held += 1
            else:
                self._let_out(flow, group, packed)
        self._schedule()

    def _let_out(self, flow: Answered, group: Group, packed: bytes) -> None:
        flow.sent += len(packed)
        self._rows.setdefault((group.caller, group.shard.id), []).append((group, packed))

    def release(self, flow: Answered) -> None:
        """Send what was held back and may go now."""
        while flow.held and flow.open:
            group, packed = flow.held.popleft()
            group.held -= 1
            self._let_out(flow, group, packed)
            if not group.held:
                self._released(group)
        self._schedule()

    def _pack(self, row: list[Any]) -> Iterator[bytes]:
        """A row as bytes; as several rows if it would be too large for one message."""
        try:
            packed = self._codec.pack(row)
        except CodecError:
            self._replace_unpackable(row)
            packed = self._codec.pack(row)
        if len(packed) <= self._bus.max_payload - _ROOM:
            yield packed
            return
        number, sequence, positions, values, errors, tokens = row
        if len(values) > 1:
            listed = list(batch.numbers(positions))
            half = len(listed) // 2
            # Sequences only have to differ: a half's has a further part.
            for part, start, stop in ((1, 0, half), (2, half, len(listed))):
                yield from self._pack(
                    [
                        number,
                        f"{sequence}.{part}",
                        batch.column(listed[start:stop]),
                        values[start:stop],
                        [[p - start, e] for p, e in errors if start <= p < stop],
                        tokens if part == 1 else 0,
                    ]
                )
            return
        try:
            pieces.check_size(len(packed), "the answer takes")
        except PayloadTooLargeError as error:
            described = [type(error).__name__, str(error), ""]
            packed = self._codec.pack(
                [number, sequence, positions, [None], [[0, described]], tokens]
            )
        yield packed

    def _replace_unpackable(self, row: list[Any]) -> None:
        """Turn answers that can't travel into errors, each by itself."""
        values, errors = row[3], row[4]
        for place, value in enumerate(values):
            try:
                self._codec.pack(value)
            except CodecError as error:
                values[place] = None
                errors.append([place, ["CodecError", f"the answer: {error}", ""]])

    # Answers for others
    def fetched(self, inbox: str, number: int, outcome: int, content: Any) -> None:
        """Send what was asked for, at the end of this tick."""
        try:
            packed = self._codec.pack(content)
        except CodecError as error:
            outcome, packed = batch.FAILED, self._codec.pack([type(error).__name__, str(error), ""])
        self.fetched_packed(inbox, number, outcome, packed)

    def fetched_packed(self, inbox: str, number: int, outcome: int, packed: bytes) -> None:
        """The same for what is packed already."""
        self._fetched.setdefault(inbox, []).append([number, outcome, packed])
        self._schedule()

    # Sending
    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send what has gathered."""
        self._scheduled = False
        collected, self._rows = self._rows, {}
        for (inbox, shard), rows in collected.items():
            for some in self._in_messages(rows, lambda row: len(row[1])):
                charge = sum(len(packed) for group, packed in some if not group.streams)
                message = [
                    batch.ANSWERS,
                    shard,
                    charge,
                    [packed for _, packed in some],
                    time.time(),
                ]
                self.send(inbox, message, {group.number for group, _ in some})
        fetched, self._fetched = self._fetched, {}
        for inbox, asked in fetched.items():
            for part in self._in_messages(asked, lambda row: len(row[2])):
                self.send(inbox, [batch.FETCHED, part])

    def _in_messages(self, rows: list[Any], size: Callable[[Any], int]) -> Iterator[Sequence[Any]]:
        limit = self._bus.max_payload - _ROOM
        start = total = 0
        for i, row in enumerate(rows):
            more = size(row) + 16
            if i > start and total + more > limit:
                yield rows[start:i]
                start, total = i, 0
            total += more
        yield rows[start:]

    def send(self, inbox: str, message: list[Any], calls: set[int] | None = None) -> None:
        """Send a message now; one with answers to ``calls`` can be repeated for a while."""
        data = self._codec.pack(message)
        try:
            pieces.send(self._bus, self._codec, inbox, data)
        except PayloadTooLargeError:
            raise
        except BusError as error:
            _log.error("answers could not be sent", inbox=inbox, error=str(error))
        if calls:
            self._retained.append((inbox, calls, data))
            self._retained_bytes += len(data)
            while self._retained_bytes > _RETAINED_BYTES:
                self._retained_bytes -= len(self._retained.popleft()[2])

    def repeat(self, inbox: str, calls: set[int]) -> set[int]:
        """Send answers to these calls again; returns the calls that there were any for."""
        found: set[int] = set()
        for held_inbox, numbers, data in list(self._retained):
            if held_inbox == inbox and numbers & calls:
                pieces.send(self._bus, self._codec, inbox, data)
                found |= numbers
        return found & calls
