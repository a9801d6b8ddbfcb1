"""Flow control: what bounds the messages between a caller and a shard, both ways.

**Calls.** A caller may have ``CALL_WINDOW`` bytes of calls at a shard that are not *begun*;
what goes beyond waits, packed, with the caller. A shard gives credit back as it begins calls,
not as it answers them: a call that waits (for a model, another agent) must not keep others
out, for it may wait for one of these. A call in the queue of a busy agent counts as not begun;
but where nothing at all moves at a shard for a while, it gives that credit back as well, since
then such an agent may wait for a call that has no credit.

**Answers.** A worker may have ``ANSWER_WINDOW`` bytes of answers under way that were not
*taken*: for all single calls of a caller together, which takes them as they arrive, and for
each population call by itself, whose answers count as taken when whoever reads the batches has
come so far. What goes beyond waits, packed, on the worker.

All counts only rise, so a lost message about them is made up for by the next.
"""

from __future__ import annotations

from collections import deque
from typing import Any

CALL_WINDOW = 8 << 20
"""Bytes of calls to one shard that may be under way and not begun."""
CALL_OVERHEAD = 64
"""Bytes that a call counts for beyond its share of the message: what a worker needs to hold it."""
ANSWER_WINDOW = 4 << 20
"""Bytes of answers that may be under way and not taken."""


def call_cost(size: int, count: int) -> int:
    """What a row of ``size`` bytes with ``count`` calls takes of the window."""
    return size + CALL_OVERHEAD * count


class Lane:
    """The caller's side: what went to one shard, and what waits for credit."""

    __slots__ = ("backlog", "credited", "moved", "sent", "shard", "taken", "told")

    def __init__(self, shard: str, now: float) -> None:
        self.shard = shard
        self.sent = 0
        """Cost of all calls sent."""
        self.credited = 0
        """Cost of those that the shard has begun."""
        self.backlog: deque[Any] = deque()
        """What waits, in order: packed messages, and makers of such."""
        self.moved = now
        """When credit last came, or was not needed."""
        self.taken = 0
        """Bytes of answers to single calls that came from the shard."""
        self.told = 0
        """What the shard was told of it."""

    @property
    def open(self) -> bool:
        """Whether a message may go out; it may overshoot the window."""
        return self.sent - self.credited < CALL_WINDOW

    def credit(self, begun: int, now: float) -> None:
        """Take in how much the shard has begun so far."""
        if begun > self.credited:
            self.credited = begun
            self.moved = now

    def take(self, size: int) -> int | None:
        """Count answers that came; returns what to tell the shard, if it is time to."""
        self.taken += size
        if self.taken - self.told < ANSWER_WINDOW // 4:
            return None
        self.told = self.taken
        return self.taken


class Answered:
    """The worker's side of answers: rows on their way to one taker."""

    __slots__ = ("held", "sent", "taken")

    def __init__(self) -> None:
        self.sent = 0
        self.taken = 0
        self.held: deque[Any] = deque()
        """Packed rows that wait, with their groups."""

    @property
    def open(self) -> bool:
        """Whether a row may go out; it may overshoot the window."""
        return self.sent - self.taken < ANSWER_WINDOW


class Account:
    """The worker's side of calls: what one caller's calls take at a shard."""

    __slots__ = ("answered", "begun", "caller", "forgiven", "parked", "told")

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.begun = 0
        """Cost of calls that left the shard's queue so far."""
        self.parked = 0
        """Of it, what sits in the queues of busy agents."""
        self.forgiven = 0
        """Of that, what is counted as begun nevertheless."""
        self.told = 0
        self.answered = Answered()
        """Answers to this caller's single calls."""

    @property
    def credit(self) -> int:
        """What the caller may count as begun; it only rises."""
        return self.begun - self.parked + self.forgiven

    @property
    def due(self) -> bool:
        """Whether the caller should be told."""
        return self.credit - self.told >= CALL_WINDOW // 4

    @property
    def crowded(self) -> bool:
        """Whether so much is parked that the caller may be held up by it."""
        return self.parked - self.forgiven >= CALL_WINDOW // 2

    def unpark(self, cost: int) -> None:
        """A parked call has begun, or was cancelled."""
        self.parked -= cost
        if self.forgiven:
            self.forgiven = max(0, self.forgiven - cost)

    def forgive(self) -> None:
        """Count all that is parked as begun."""
        self.forgiven = self.parked
