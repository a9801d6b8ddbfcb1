"""Calls to an environment in agent order: they gather in waves, and each wave is sorted.

While a population call is under way at the members, each of them has, at any time, either a call
waiting here, or finished, or something else to do first. Once nobody is left in the third state
the calls that wait are a wave: they are applied in the order of the members' numbers. Workers
tell how many members have finished; as they do so on the same road as the calls, nobody is
counted as finished whose call is still on its way.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shared.logs import get_logger

if TYPE_CHECKING:
    from populace._runtime.shard import Group
    from populace._runtime.stage import Stage

_log = get_logger(__name__)

_PATIENCE = 10.0
"""Seconds without any call or word after which an incomplete wave is applied all the same."""


class Waves:
    """Gathers the members' calls at one environment.

    Args:
        stage: which applies them.
        population: name of the members' population.
        count: how many there are.
    """

    def __init__(self, stage: Stage, population: str, count: int) -> None:
        self._stage = stage
        self._population = population
        self._count = count
        self._step = 0
        self._finished: dict[tuple[str, int], int] = {}
        self._waiting: list[tuple[int, int, Group, int]] = []
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, group: Group, position: int) -> bool:
        """Keep a call for its wave; returns False if it is none of a member's."""
        key = group.keys[position] if group.keys is not None else None
        if key is None or self._step == 0:
            return False
        population, _, number = str(key[0]).rpartition("/")
        if population != self._population:
            return False
        self._waiting.append((int(number), key[2], group, position))
        self._look()
        return True

    def remove(self, group: Group, position: int) -> bool:
        """Drop a call that was cancelled; returns whether it was waiting."""
        left = [call for call in self._waiting if call[2:] != (group, position)]
        found = len(left) < len(self._waiting)
        self._waiting = left
        return found

    def finished(self, shard: str, call: int, step: int, count: int) -> None:
        """Hear from a worker how many members there have finished a population call."""
        if step > self._step:
            self._step = step
            self._finished.clear()
        if step == self._step:
            self._finished[(shard, call)] = count
            self._look()

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        if (
            len({number for number, *_ in self._waiting}) + sum(self._finished.values())
            >= self._count
        ):
            # Not at once: a word from a worker arrives inside a Task, where no call may run.
            asyncio.get_running_loop().call_soon(self._apply, len(self._waiting))
        else:
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE, self._give_up)

    def _give_up(self) -> None:
        """Some member waits for another that waits here: better out of order than never."""
        missing = self._count - sum(self._finished.values())
        _log.warning(
            "calls are applied before all members have made theirs; the order may differ next time",
            path=self._stage.path,
            waiting=len(self._waiting),
            members_under_way=missing,
        )
        self._apply(len(self._waiting))

    def _apply(self, count: int) -> None:
        if len(self._waiting) != count:
            return  # applied already, or more came, which looked again
        wave, self._waiting = self._waiting, []
        for _, _, group, position in sorted(wave, key=lambda call: call[:2]):
            if not (group.cancelled and position in group.cancelled):
                self._stage.apply(group, position)
