"""Players without a language model, as theories of how people play have them.

They are asked as the others are, and answer the same; so a study can say what a model adds.
"""

from __future__ import annotations

import functools
import itertools
import math

from populace import Agent

_MOST_LEVELS = 60


class _Rule(Agent):
    """A player that follows a rule, and is told of each round by its numbers.

    Args:
        low: smallest number that may be picked.
        high: largest.
    """

    def __init__(self, low: float, high: float) -> None:
        self.low = low
        self.high = high

    @property
    def middle(self) -> float:
        """What players who pick anything pick on average."""
        return (self.low + self.high) / 2

    def pick(self, mean: float | None, offset: float, factor: float) -> float:
        """The number that is picked, after a round with this mean."""
        raise NotImplementedError

    def play(self, mean: float | None, offset: float, factor: float) -> float:
        """Pick a number.

        Args:
            mean: of the last round; None in the first.
            offset: of the target.
            factor: of the target; target = offset + factor * mean.
        """
        self.picked = min(self.high, max(self.low, self.pick(mean, offset, factor)))
        return self.picked

    def nearness(self, winning: float, near: float) -> str:
        """The kind of player, if the last pick was near the winning number; else nothing."""
        return type(self).__name__ if abs(self.picked - winning) <= near else ""


class LevelK(_Rule):
    """Level 0 picks anything; level k takes all others to be of level k - 1 (Nagel 1995).

    After a round, what the others do on average is known: the steps go on from its mean.
    """

    def __init__(self, low: float, high: float, level: int) -> None:
        super().__init__(low, high)
        self.level = level

    def pick(self, mean: float | None, offset: float, factor: float) -> float:
        """See ``_Rule.pick``."""
        if self.level == 0:
            return self.random.uniform(self.low, self.high)
        number = self.middle if mean is None else mean
        for _ in range(self.level):
            number = offset + factor * number
        return number


class CognitiveHierarchy(_Rule):
    """Levels are Poisson distributed; level k takes the others to be of the levels below k.

    They are weighed as Poisson has them, cut off at k (Camerer, Ho and Chong, Quarterly Journal of
    Economics 119, 2004).
    """

    def __init__(self, low: float, high: float, tau: float) -> None:
        super().__init__(low, high)
        self.tau = tau
        self.level: int | None = None
        """Drawn once: a player thinks as far in each round."""

    def pick(self, mean: float | None, offset: float, factor: float) -> float:
        """See ``_Rule.pick``."""
        if self.level is None:
            self.level = self._draw()
        if self.level == 0:
            return self.random.uniform(self.low, self.high)
        start = self.middle if mean is None else mean
        return hierarchy(offset, factor, start, self.tau, self.level)[-1]

    def _draw(self) -> int:
        drawn = self.random.random()
        reached = itertools.accumulate(poisson(self.tau, _MOST_LEVELS))
        return next((k for k, so_far in enumerate(reached) if drawn < so_far), _MOST_LEVELS)


class BestResponse(_Rule):
    """Picks anything at first; then what would have won the last round."""

    def pick(self, mean: float | None, offset: float, factor: float) -> float:
        """See ``_Rule.pick``."""
        if mean is None:
            return self.random.uniform(self.low, self.high)
        return offset + factor * mean


@functools.lru_cache
def poisson(tau: float, count: int) -> list[float]:
    """Shares of the levels 0 to ``count - 1``."""
    return [math.exp(-tau) * tau**k / math.factorial(k) for k in range(count)]


@functools.lru_cache
def hierarchy(offset: float, factor: float, start: float, tau: float, levels: int) -> list[float]:
    """What the levels 0 to ``levels`` of a cognitive hierarchy pick on average."""
    shares = poisson(tau, levels + 1)
    picks = [start]
    for level in range(1, levels + 1):
        below = math.fsum(share * pick for share, pick in zip(shares, picks, strict=False))
        picks.append(offset + factor * below / math.fsum(shares[:level]))
    return picks
