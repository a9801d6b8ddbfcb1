"""Answers that stay on the worker that made them, until another worker asks for them."""

from __future__ import annotations

import time
from collections import OrderedDict

Key = tuple[str, int, int]
"""Caller's inbox, number of the call, position within it."""


class Kept:
    """A store bounded in bytes and time; it remembers, within a bound, what it let go.

    Args:
        max_bytes: beyond this the oldest answers go.
        max_age: seconds after which an answer goes.
    """

    _REMEMBERED = 10_000

    def __init__(self, max_bytes: int = 64 << 20, max_age: float = 600.0) -> None:
        self.max_bytes = max_bytes
        self.max_age = max_age
        self.bytes = 0
        self._held: OrderedDict[Key, tuple[int, bytes, float]] = OrderedDict()
        self._gone: OrderedDict[Key, str] = OrderedDict()

    def put(self, key: Key, outcome: int, packed: bytes) -> None:
        """Keep an outcome (OK or FAILED) and the packed value or error."""
        self._held[key] = (outcome, packed, time.monotonic())
        self.bytes += len(packed)
        self.expire()
        while self.bytes > self.max_bytes and self._held:
            oldest, (_, dropped, _) = self._held.popitem(last=False)
            self.bytes -= len(dropped)
            self._remember(
                oldest,
                f"its worker keeps at most {self.max_bytes >> 20} MB of answers for others, and "
                "dropped the oldest",
            )

    def expire(self) -> None:
        """Let go of what is too old."""
        limit = time.monotonic() - self.max_age
        while self._held:
            key, (_, packed, since) = next(iter(self._held.items()))
            if since > limit:
                return
            del self._held[key]
            self.bytes -= len(packed)
            self._remember(key, f"its worker keeps answers for others for {self.max_age:g} s")

    def _remember(self, key: Key, reason: str) -> None:
        self._gone[key] = reason
        while len(self._gone) > self._REMEMBERED:
            self._gone.popitem(last=False)

    def get(self, key: Key) -> tuple[int, bytes] | None:
        """The outcome and packed value, if it is still here."""
        held = self._held.get(key)
        return None if held is None else (held[0], held[1])

    def why_gone(self, key: Key) -> str | None:
        """Why an answer that was here is here no more; None if it never was."""
        return self._gone.get(key)
