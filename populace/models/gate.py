"""How many requests one process has under way: more while that serves more, fewer under pressure.

Throughput is measured over windows of about as many answers as there are slots. While a window with
more slots served more per second, slots double; once it doesn't, the best number so far
is kept, and a little more is tried now and then. Where a quarter of the attempts ends with a 429
or a time-out, a third of the slots goes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

_FIRST = 16
_GROWTH = 2.0
_BETTER = 1.05
_LESS = 0.67
_CUT_EVERY = 1.0
_FULL = 0.8
"""Share of the slots that must have been in use, on average, for a window to say anything."""
_MUCH, _SOME, _FEW = 0.25, 0.15, 4
"""Shares of attempts under pressure from which slots are cut, and from which they don't grow; and
signs of it that may be chance."""
_WINDOW = 0.5
_TRY_AGAIN = 20
_AHEAD = 4
"""A part of the slots for which prompts wait here already: a look into the queue takes its time."""


class Gate:
    """Slots for requests.

    Args:
        most: slots, at most.
        fixed: have exactly so many, since the engine's own number is known.
    """

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        self.most = most
        self._fixed = fixed
        self.slots = most if fixed else min(most, _FIRST)
        self.used = 0
        self.cap: int | None = None
        """This process's share of what the whole installation may have under way."""
        self._freed = asyncio.Event()
        self._inside = 0
        self.unkept = 0
        """Answers that came and are not stored yet. They hold their slots, so that no crash costs
        more than there are slots."""
        self._queue: deque[asyncio.Future[bool]] = deque()
        self._closed = False
        self._since = time.monotonic()
        self._served = self._filled = self._pressed = 0
        self._settling = False
        self._best_rate = 0.0
        self._best_slots = self.slots
        self._windows = 0
        self._cut_at = 0.0

    @property
    def limit(self) -> int:
        """Requests that may be under way."""
        return self.slots if self.cap is None else min(self.slots, self.cap)

    @property
    def free(self) -> int:
        """How many more to take: slots that nobody has, and a few to have at hand for the next."""
        return self.limit + self.limit // _AHEAD - self.used

    @property
    def _has_room(self) -> bool:
        return self.under_way < self.limit

    @property
    def under_way(self) -> int:
        """Slots that are held."""
        return self._inside + self.unkept

    def kept(self, count: int) -> None:
        """Answers were stored."""
        self.unkept -= count
        self._let_in()

    async def enter(self) -> bool:
        """Wait until one more request may really leave: batches take more than there is room for.

        Returns:
            Whether it may; then it is followed by ``leave``. False: those that wait were turned
            away, and are for another process.
        """
        if self._closed or self.limit == 0:
            return False
        if self._has_room and not self._queue:
            self._inside += 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.leave()  # it was let in, and does not want to any more
            raise

    def leave(self, *, answered: bool = False) -> None:
        """A request is over; if it was answered, its slot is free once the answer is ``kept``."""
        self._inside -= 1
        self.unkept += answered
        self._let_in()

    def _let_in(self) -> None:
        while self._queue and self._has_room:
            turn = self._queue.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(True)

    def turn_away(self) -> None:
        """Let nobody in who waits."""
        queue, self._queue = self._queue, deque()
        for turn in queue:
            if not turn.done():
                turn.set_result(False)

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True
        self._freed.set()
        self.turn_away()

    async def wait(self) -> int:
        """Wait for a free slot; gives how many there are, 0 once the gate is closed."""
        while self.free <= 0 and not self._closed:
            self._freed.clear()
            await self._freed.wait()
        return 0 if self._closed else self.free

    def take(self, count: int) -> None:
        """Use slots; a batch may take a few more than there are."""
        self.used += count

    def release(self, count: int) -> None:
        """Slots that were taken were not needed: nothing was served in them."""
        self.used -= count
        self._freed.set()

    def give_back(self, count: int = 1) -> None:
        """Requests were answered."""
        self._filled += self.used * count
        self.used -= count
        self._served += count
        self._freed.set()
        if not self._fixed and self._served >= self.slots:
            self._consider()

    def share(self, cap: int | None) -> None:
        """Take no more than this share of the installation's."""
        self.cap = cap
        self._freed.set()
        self._let_in()
        if self.limit == 0:
            self.turn_away()  # what waits here would wait for ever

    def pressure(self) -> None:
        """The endpoint asked for less, or did not answer in time."""
        self._pressed += 1
        now = time.monotonic()
        if self._fixed or now - self._cut_at < _CUT_EVERY:
            return  # one cut for what may be many signs of the same moment
        few = self._pressed < max(_FEW, self.slots * _MUCH)
        if few or self._pressed < _MUCH * (self._pressed + self._served):
            return
        self._cut_at = now
        self.slots = max(1, int(self.slots * _LESS))
        self._best_rate, self._best_slots = 0.0, self.slots
        self._begin()

    def _consider(self) -> None:
        now = time.monotonic()
        passed = now - self._since
        if passed < _WINDOW:
            return
        rate = self._served / passed
        full = self._filled >= _FULL * self._served * self.limit
        pressed = self._pressed / (self._pressed + self._served)
        self._begin()
        if self._settling:
            self._settling = False
            return  # slots changed within this window
        if not full or pressed > _SOME:
            return  # there was not enough to do, or more would not be welcome
        self._windows += 1
        if rate > self._best_rate * _BETTER:
            self._best_rate, self._best_slots = rate, self.slots
            self._grow()
        elif self.slots > self._best_slots:
            self.slots = self._best_slots
            self._settling = True
        elif self._windows % _TRY_AGAIN == 0:
            self._best_rate = rate
            self._grow()

    def _grow(self) -> None:
        self.slots = min(self.most, max(self.slots + 1, int(self.slots * _GROWTH)))
        self._settling = True
        self._freed.set()
        self._let_in()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._served = self._filled = self._pressed = 0
