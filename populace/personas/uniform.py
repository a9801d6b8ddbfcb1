"""Random numbers by place: the number for (seed, name, index) is had without the others.

So any slice of a population can be drawn on the worker that needs it, and is the same slice
whatever else is drawn. SplitMix64 (Steele, Lea and Flood 2014) over the index, vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from populace._random import stream_key

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_AGAIN = np.uint64(0xD1342543DE82EF95)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_FEISTEL_ROUNDS = 4


def _mix(values: Any) -> Any:
    values = (values ^ (values >> np.uint64(30))) * _A
    values = (values ^ (values >> np.uint64(27))) * _B
    return values ^ (values >> np.uint64(31))


def uniform(seed: int, name: str, index: Any, attempt: int = 0) -> Any:
    """Numbers from [0, 1), one per index.

    Args:
        seed: of the population.
        name: what is drawn; different names are independent.
        index: an array of whole numbers.
        attempt: another number for each attempt to draw again.

    Returns:
        An array of floats of the index's shape.
    """
    with np.errstate(over="ignore"):
        key = np.uint64(stream_key(seed, name))
        at = np.asarray(index, dtype=np.uint64) + np.uint64(1)
        bits = _mix(key + at * _GOLDEN + np.uint64(attempt) * _AGAIN)
    return (bits >> np.uint64(11)) * 2.0**-53


def shuffled(seed: int, name: str, index: Any, size: int) -> Any:
    """Where each index of ``range(size)`` goes in a shuffle of it; a permutation.

    A Feistel network over the next power of four, walked until it lands inside (Black and
    Rogaway 2002: "Ciphers with arbitrary finite domains").
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [
        np.uint64(stream_key(seed, f"{name}/shuffle/{round_number}"))
        for round_number in range(_FEISTEL_ROUNDS)
    ]
    values = np.array(index, dtype=np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        with np.errstate(over="ignore"):
            for key in keys:
                left, right = right, left ^ (_mix(right * _GOLDEN + key) & mask)
        values[outside] = (left << half) | right
        outside = values >= size
    return values.astype(np.int64)
