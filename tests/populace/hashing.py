"""A nursery's child that says what the hash of a text is to it."""

from __future__ import annotations

from collections.abc import Callable

SERVICE = "hashing"


def live(order: str, lifeline: int, say: Callable[[str], None]) -> int:
    """See ``nursery.Child``."""
    say(str(hash(order)))
    return 0
