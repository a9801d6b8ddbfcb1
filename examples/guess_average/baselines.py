"""Players without a language model, as theories of how people play have them.

They are asked as the others are, and answer the same; so a study can say what a model adds.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from rules import Target

from populace import Agent

_MOST_LEVELS = 60


class _Rule(Agent):
    """A player that follows a rule, and is told of each round by its numbers."""

    def __init__(self, low: float, high: float, target: Target) -> None:
        self.low = low
        self.high = high
        # Plain numbers: what agents hold is saved after each round.
        self.offset, self.factor = target.offset, target.factor

    @property
    def middle(self) -> float:
        """What players who pick anything pick on average."""
        return (self.low + self.high) / 2

    def inside(self, number: float) -> float:
        """The number, or the nearest that may be picked."""
        return min(self.high, max(self.low, number))

    def pick(self, mean: float | None) -> float:
        """The number that is picked, after a round with this mean."""
        raise NotImplementedError

    def play(self, mean: float | None) -> dict[str, Any]:
        """Pick a number.

        Args:
            mean: of the last round; None in the first.

        Returns:
            ``{"number": the pick, "text": ""}``.
        """
        number = self.inside(self.pick(mean))
        self.picked = number
        return {"number": number, "text": ""}

    def nearness(self, winning: float, near: float) -> str:
        """The kind of player, if the last pick was near the winning number; else nothing."""
        return type(self).__name__ if abs(self.picked - winning) <= near else ""


class LevelK(_Rule):
    """Level 0 picks anything; level k takes all others to be of level k - 1 (Nagel 1995).

    After a round, what the others do on average is known: the steps go on from its mean.
    """

    def __init__(self, low: float, high: float, target: Target, level: int) -> None:
        super().__init__(low, high, target)
        self.level = level

    def pick(self, mean: float | None) -> float:
        """See ``_Rule.pick``."""
        if self.level == 0:
            return self.random.uniform(self.low, self.high)
        number = self.middle if mean is None else mean
        return self.target.steps(number, self.level)[-1]


class CognitiveHierarchy(_Rule):
    """Levels are Poisson distributed; level k takes the others to be of the levels below k.

    They are weighed as Poisson has them, cut off at k (Camerer, Ho and Chong, Quarterly Journal of
    Economics 119, 2004).
    """

    def __init__(self, low: float, high: float, target: Target, tau: float) -> None:
        super().__init__(low, high, target)
        self.tau = tau

    def pick(self, mean: float | None) -> float:
        """See ``_Rule.pick``."""
        level = self._level()
        if level == 0:
            return self.random.uniform(self.low, self.high)
        return hierarchy(self.target, self.middle if mean is None else mean, self.tau, level)[-1]

    def _level(self) -> int:
        """A level, drawn once: a player thinks as far in each round."""
        if not hasattr(self, "level"):
            drawn, self.level = self.random.random(), _MOST_LEVELS
            reached = itertools.accumulate(poisson(self.tau, _MOST_LEVELS))
            for level, so_far in enumerate(reached):
                if drawn < so_far:
                    self.level = level
                    break
        return self.level


class BestResponse(_Rule):
    """Picks anything at first; then what would have won the last round."""

    def pick(self, mean: float | None) -> float:
        """See ``_Rule.pick``."""
        if mean is None:
            return self.random.uniform(self.low, self.high)
        return self.target.of(mean)


def poisson(tau: float, count: int) -> list[float]:
    """Shares of the levels 0 to ``count - 1``."""
    return [math.exp(-tau) * tau**k / math.factorial(k) for k in range(count)]


def hierarchy(target: Target, start: float, tau: float, levels: int) -> list[float]:
    """What the levels 0 to ``levels`` of a cognitive hierarchy pick on average."""
    shares = poisson(tau, levels + 1)
    picks = [start]
    for level in range(1, levels + 1):
        below = math.fsum(share * pick for share, pick in zip(shares, picks, strict=False))
        picks.append(target.of(below / math.fsum(shares[:level])))
    return picks
