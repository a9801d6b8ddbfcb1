"""An agent's own random numbers: a small, fast stream that follows from its identity.

``random.Random`` holds 2.5 KB of state, too much for each of a million agents. This is
SplitMix64 (Steele, Lea and Flood 2014: "Fast splittable pseudorandom number generators"):
one integer of state. The usual methods are the standard library's own.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import MutableSequence, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_UNIT = 2.0**-53
_APART = 0xD1342543DE82EF95


def mix(value: int) -> int:
    """SplitMix64's finaliser: 64 well mixed bits of 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, population: str) -> int:
    """The 64 bits that all streams of a population start from."""
    digest = hashlib.blake2b(f"{seed}/{population}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def round_key(key: int, round_number: int) -> int:
    """What all streams of a population in one round start from."""
    return key ^ mix((round_number + 1) * _GOLDEN & _MASK)


def stream_state(key: int, agent: int) -> int:
    """Where the stream of one agent starts, from its round's key.

    Agents lie apart by another odd constant than a stream's steps do, so that one's second
    number is not its neighbour's first; the finaliser scatters the rest.
    """
    return (key + agent * _APART) & _MASK


def shuffled_place(seed: int, name: str, index: int, size: int) -> int:
    """Where an index of ``range(size)`` goes in a shuffle of it, without the rest; a permutation.

    A Feistel network over the next power of four, walked until it lands inside (Black and
    Rogaway 2002: "Ciphers with arbitrary finite domains").
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for key in _shuffle_keys(seed, name):
            left, right = right, left ^ (mix((right * _GOLDEN + key) & _MASK) & mask)
        value = (left << half) | right
        if value < size:
            return value


@functools.lru_cache(maxsize=256)
def _shuffle_keys(seed: int, name: str) -> tuple[int, ...]:
    return tuple(stream_key(seed, f"{name}/shuffle/{i}") for i in range(4))


class AgentRandom:
    """The methods of ``random.Random`` that simulations use, on one integer of state."""

    __slots__ = ("gauss_next", "key", "state")

    def __init__(self, state: int, key: int = 0) -> None:
        self.state = state
        self.key = key
        """The key of the round that it belongs to."""
        self.gauss_next: float | None = None

    def _next(self) -> int:
        self.state = state = (self.state + _GOLDEN) & _MASK
        return mix(state)

    def random(self) -> float:
        """A float, evenly from [0, 1)."""
        # _next and mix, written out: this is called once per agent and round at least.
        self.state = value = (self.state + _GOLDEN) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((value ^ (value >> 31)) >> 11) * _UNIT

    def getrandbits(self, k: int) -> int:
        """A whole number of k random bits."""
        if k < 0:
            raise ValueError("number of bits must be non-negative")
        value = filled = 0
        while filled < k:
            value = (value << 64) | self._next()
            filled += 64
        return value >> (filled - k)

    def _randbelow(self, n: int) -> int:
        bits = n.bit_length()
        value = self.getrandbits(bits)
        while value >= n:
            value = self.getrandbits(bits)
        return value

    def uniform(self, low: float, high: float) -> float:
        """A float, evenly from [low, high]."""
        return low + (high - low) * self.random()

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """A whole number from ``range(start, stop, step)``."""
        choices = range(start) if stop is None else range(start, stop, step)
        if not choices:
            raise ValueError("empty range for randrange()")
        return choices[self._randbelow(len(choices))]

    def randint(self, low: int, high: int) -> int:
        """A whole number from [low, high], both included."""
        return self.randrange(low, high + 1)

    def choice(self, options: Sequence[T]) -> T:
        """One of the options.

        Raises:
            IndexError: there is none.
        """
        if not options:
            raise IndexError("cannot choose from an empty sequence")
        return options[self._randbelow(len(options))]

    def choices(
        self, options: Sequence[T], weights: Sequence[float] | None = None, *, k: int = 1
    ) -> list[T]:
        """K options, with replacement, by weight."""
        return random.Random.choices(self, options, weights, k=k)  # type: ignore[arg-type]

    def sample(self, options: Sequence[T], k: int) -> list[T]:
        """K different options."""
        return random.Random.sample(self, options, k)  # type: ignore[arg-type]

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Bring the items into a random order, in place."""
        random.Random.shuffle(self, items)  # type: ignore[arg-type]

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        """A float from the normal distribution."""
        return random.Random.gauss(self, mu, sigma)  # type: ignore[arg-type]

    def expovariate(self, rate: float = 1.0) -> float:
        """A float from the exponential distribution of mean 1/rate."""
        return random.Random.expovariate(self, rate)  # type: ignore[arg-type]

    def betavariate(self, alpha: float, beta: float) -> float:
        """A float from the beta distribution."""
        return random.Random.betavariate(self, alpha, beta)  # type: ignore[arg-type]

    def gammavariate(self, alpha: float, beta: float) -> float:
        """A float from the gamma distribution."""
        return random.Random.gammavariate(self, alpha, beta)  # type: ignore[arg-type]

    def lognormvariate(self, mu: float, sigma: float) -> float:
        """A float whose logarithm is normal."""
        return math.exp(mu + sigma * self.gauss())

    def triangular(self, low: float = 0.0, high: float = 1.0, mode: float | None = None) -> float:
        """A float from the triangular distribution."""
        return random.Random.triangular(self, low, high, mode)  # type: ignore[arg-type]
