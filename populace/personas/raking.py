"""Raking: weights of a table's rows fitted to given margins (iterative proportional fitting)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_TOLERANCE = 1e-9
_ROUNDS = 5000


class RakingError(ValueError):
    """The margins can't be met."""


def rake(
    weights: Any,
    codes: Mapping[str, Any],
    margins: Mapping[str, Any],
    names: Mapping[str, list[str]],
) -> Any:
    """Fit weights to margins (Deming and Stephan 1940).

    Args:
        weights: one per row, not negative.
        codes: for each margin, the number of each row's category.
        margins: for each margin, the share of each category; they add up to 1.
        names: for each margin, its categories' names, for errors.

    Returns:
        The fitted weights; they add up to 1, and meet every margin within 1e-9.

    Raises:
        RakingError: a category that is asked for has no row of weight, or margins contradict.
    """
    fitted = np.asarray(weights, dtype=float)
    fitted = fitted / fitted.sum()
    for name, target in margins.items():
        there = np.bincount(codes[name], weights=fitted, minlength=len(target))
        for i in np.flatnonzero((there <= 0) & (np.asarray(target) > 0)):
            raise RakingError(
                f"the margin asks for {target[i]:.4g} of {name} = {names[name][i]!r}, but no row "
                "of the table has it with a weight above 0"
            )
    worst = np.inf
    for _ in range(_ROUNDS):
        for name, target in margins.items():
            there = np.bincount(codes[name], weights=fitted, minlength=len(target))
            factor = np.divide(target, there, out=np.zeros(len(target)), where=there > 0)
            fitted = fitted * factor[codes[name]]
        errors = {
            name: np.abs(np.bincount(codes[name], weights=fitted, minlength=len(t)) - t).max()
            for name, t in margins.items()
        }
        worst = max(errors.values())
        if worst < _TOLERANCE:
            return fitted / fitted.sum()
    off = max(errors, key=lambda name: errors[name])
    raise RakingError(
        f"the margins can't be met together by the rows of the table (after {_ROUNDS} rounds {off} "
        f"is still off by {worst:.2g}): combinations that they need have no rows"
    )
