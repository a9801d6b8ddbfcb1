"""Messages that the broker would not take whole travel in pieces."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from shared.bus import Bus
from shared.codec import Codec
from shared.errors import PayloadTooLargeError
from shared.ids import new_id
from shared.logs import get_logger
from shared.messages import batch

_log = get_logger(__name__)

MOST_BYTES = 64 << 20
"""Of the arguments of one call, or its answer."""
_ROOM = 256
"""Bytes of a piece left to what stands around it."""
_PATIENCE = 60.0


def check_size(size: int, what: str) -> None:
    """Refuse what is too large to travel, even in pieces.

    Raises:
        PayloadTooLargeError: it is.
    """
    if size > MOST_BYTES:
        raise PayloadTooLargeError(
            f"{what} {size:,} bytes, more than the {MOST_BYTES:,} that one call or answer may; "
            "pass large data by a file's name"
        )


def send(bus: Bus, codec: Codec, subject: str, data: bytes) -> None:
    """Send a message, in pieces if the broker would not take it whole.

    Raises:
        BusError: it can't be sent.
        PayloadTooLargeError: it is too large even for that.
    """
    limit = bus.max_payload
    if len(data) <= limit:
        bus.send(subject, data)
        return
    check_size(len(data), "a message takes")
    step = limit - _ROOM
    name, count = new_id("big"), -(-len(data) // step)
    for number in range(count):
        part = data[number * step : (number + 1) * step]
        bus.send(subject, codec.pack([batch.PIECE, name, number, count, part]))


class Assembler:
    """Puts pieces together again; what stays unfinished is let go, and said so.

    Calls and answers that are lost with it are asked after by their caller.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[str, tuple[float, dict[int, bytes]]] = OrderedDict()
        self._bytes = 0

    def take(self, fields: list[Any]) -> bytes | None:
        """Take a PIECE; returns the whole message once its last piece is here."""
        _, name, number, count, part = fields
        _, parts = self._open.setdefault(name, (time.monotonic(), {}))
        if number not in parts:
            parts[number] = part
            self._bytes += len(part)
        if len(parts) == count:
            self._forget(name)
            return b"".join(parts[i] for i in range(count))
        for stale in list(self._stale()):
            _log.warning("a large message stayed incomplete and is dropped", message=stale)
            self._forget(stale)
        return None

    def _stale(self) -> Iterator[str]:
        left, now = self._bytes, time.monotonic()
        for name, (since, parts) in self._open.items():
            if left <= 4 * MOST_BYTES and now - since < _PATIENCE:
                return
            left -= sum(map(len, parts.values()))
            yield name

    def _forget(self, name: str) -> None:
        _, parts = self._open.pop(name)
        self._bytes -= sum(map(len, parts.values()))
