"""Limits that hold for a whole installation: requests and tokens a minute, and concurrency.

A rate is kept by handing out times, not by counting: the broker holds the time at which the next
request may leave, and whoever wants to send n takes the next n times and moves it on (the generic
cell rate algorithm, ITU-T I.371, without a burst). So any number of services together send evenly,
and none needs to know of the others. What a taker that dies has taken is lost for that moment.
"""

from __future__ import annotations

import abc
import asyncio
import bisect
import contextlib
import hashlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from shared.bus import KeyValue
from shared.errors import BusError, RevisionConflictError
from shared.logs import get_logger
from shared.messages.scenario import Limits, ModelSpec

_log = get_logger(__name__)

_AHEAD = 0.25
"""Seconds for which times are taken at once; more would starve others, less would ask too often."""
_LONGEST_PAUSE = 60.0
"""An endpoint that wants longer is asked again after this: nobody should stand still for a day."""
_FARTHEST = 3600.0
"""A pace that lies further ahead was written by a clock that was wrong."""
_COMPLAIN_EVERY = 200
_LOOK = 1.0
_RETRY, _SLOWER = 0.002, 0.1
_BROKER_AWAY = 0.5


@dataclass(slots=True)
class Pace:
    """What is shared: when the next request, and the next token, may leave (Unix time)."""

    request_at: float = 0.0
    token_at: float = 0.0


class PaceStore(abc.ABC):
    """Where a pace is kept."""

    @abc.abstractmethod
    async def read(self) -> tuple[Pace, int]:
        """The pace, and its revision."""

    @abc.abstractmethod
    async def write(self, pace: Pace, revision: int) -> bool:
        """Write, unless it was changed since; whether it was written."""


class OwnPace(PaceStore):
    """A pace of one process."""

    def __init__(self) -> None:
        self._pace = Pace()

    async def read(self) -> tuple[Pace, int]:
        """See ``PaceStore.read``."""
        return Pace(self._pace.request_at, self._pace.token_at), 0

    async def write(self, pace: Pace, revision: int) -> bool:
        """See ``PaceStore.write``."""
        self._pace = pace
        return True


class SharedPace(PaceStore):
    """A pace that the broker keeps for all.

    Args:
        bucket: where.
        key: whose: of an endpoint.
    """

    def __init__(self, bucket: KeyValue, key: str) -> None:
        self._bucket = bucket
        self._key = key

    async def read(self) -> tuple[Pace, int]:
        """See ``PaceStore.read``."""
        entry = await self._bucket.get(self._key)
        if entry is None:
            return Pace(), 0
        return Pace(*json.loads(entry.value)), entry.revision

    async def write(self, pace: Pace, revision: int) -> bool:
        """See ``PaceStore.write``."""
        data = json.dumps([pace.request_at, pace.token_at]).encode()
        try:
            await self._bucket.write(self._key, data, revision)
        except RevisionConflictError:
            return False
        return True


class RateLimiter:
    """Makes requests wait for their times.

    Args:
        limits: what may be asked.
        store: where the pace is kept.
    """

    def __init__(self, limits: Limits, store: PaceStore) -> None:
        per_minute = limits.requests_per_minute
        self._every = 60.0 / per_minute if per_minute else 0.0
        per_minute = limits.tokens_per_minute
        self._token_every = 60.0 / per_minute if per_minute else 0.0
        self._store = store
        self._times: list[float] = []
        self._taking = asyncio.Lock()
        self._pausing: asyncio.Task[None] | None = None
        self._until = 0.0
        self._waiting = 0
        self._owed = 0
        self._closed = asyncio.Event()
        self.waited = 0.0
        """Seconds that requests have waited here, all together."""

    async def admit(self, tokens: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Wait until one more request may leave.

        Args:
            tokens: that it will presumably take; ``settle`` corrects them.
            wanted: asked now and then; who is not wanted any more waits no longer, and leaves its
                time to another.
        """
        if not self._every and not self._token_every:
            return
        began = time.monotonic()
        self._waiting += 1
        try:
            async with self._taking:
                at = await self._take(tokens)
        finally:
            self._waiting -= 1
        while (left := at - time.time()) > 0 and not self._closed.is_set():
            if not wanted():
                self._give_back(at)
                break
            if self._times and self._times[0] < at and not self._token_every:
                self._give_back(at)  # another has given back a sooner one
                at = self._times.pop(0)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), min(left, _LOOK))
        self.waited += time.monotonic() - began

    def _give_back(self, at: float) -> None:
        """A time is not needed here; what tokens it was for is settled elsewhere."""
        if self._every and not self._token_every:
            bisect.insort(self._times, at)

    def close(self) -> None:
        """Let all go that wait: it is for them to see that nothing is to be asked any more."""
        self._closed.set()

    def settle(self, presumed: int, actual: int) -> None:
        """Tell how many tokens a request really took; the next one pays the difference."""
        if self._token_every:
            self._owed += actual - presumed

    async def pause(self, seconds: float) -> None:
        """Nobody sends for a while: the endpoint said so."""
        self._until = max(self._until, time.time() + min(seconds, _LONGEST_PAUSE))
        if self._pausing is None or self._pausing.done():
            # One for all that were told so in the same moment.
            self._pausing = asyncio.ensure_future(self._pause())
        await asyncio.shield(self._pausing)

    async def _pause(self) -> None:
        told = 0.0

        def later(pace: Pace) -> None:
            nonlocal told
            told = self._until
            pace.request_at = max(pace.request_at, told)
            pace.token_at = max(pace.token_at, told)

        async with self._taking:
            while told < self._until:
                await self._change(later)

    async def _take(self, tokens: int) -> float:
        at = 0.0
        if self._every:
            while self._times and self._times[0] < time.time() - self._every:
                del self._times[0]  # it was given back, and nobody took it
            if not self._times:
                taken = await self._take_times()
                self._times = sorted([*self._times, *taken])  # some may have been given back
            at = self._times.pop(0)
        if self._token_every:
            owed, self._owed = self._owed, 0
            at = max(at, await self._take_tokens(tokens + owed))
        return at

    async def _take_times(self) -> list[float]:
        # As many as leave within a moment, and no more than are wanted.
        wanted = max(1, min(self._waiting, int(_AHEAD / self._every)))
        taken: list[float] = []

        def take(pace: Pace) -> None:
            first = max(time.time(), pace.request_at)
            taken[:] = [first + i * self._every for i in range(wanted)]
            pace.request_at = first + wanted * self._every

        await self._change(take)
        return taken

    async def _take_tokens(self, tokens: int) -> float:
        at = 0.0

        def take(pace: Pace) -> None:
            nonlocal at
            at = max(time.time(), pace.token_at)
            pace.token_at = at + tokens * self._token_every

        await self._change(take)
        return at

    async def _change(self, change: Callable[[Pace], None]) -> None:
        """Change the shared pace, however long others or the broker keep it from that."""
        tried = 0
        while True:
            try:
                pace, revision = await self._store.read()
                farthest = time.time() + _FARTHEST
                pace.request_at = min(pace.request_at, farthest)
                pace.token_at = min(pace.token_at, farthest)
                change(pace)
                if await self._store.write(pace, revision):
                    return
            except RevisionConflictError:
                pass
            except BusError as error:
                _log.warning("the pace can't be kept for now", error=str(error))
                await asyncio.sleep(_BROKER_AWAY)
                continue
            tried += 1
            if tried % _COMPLAIN_EVERY == 0:
                _log.warning("many services keep one pace; requests wait for it", tried=tried)
            spread = min(_SLOWER, _RETRY * (1 + tried / 10))
            await asyncio.sleep(random.uniform(spread / 2, spread))  # noqa: S311


def endpoint_key(spec: ModelSpec) -> str:
    """Names what a pace belongs to: equal endpoints and model, whatever else runs ask."""
    told = f"{spec.backend}/{spec.model}/{sorted(spec.endpoints)}/{spec.api_key_env}"
    return hashlib.blake2b(told.encode(), digest_size=10).hexdigest()
