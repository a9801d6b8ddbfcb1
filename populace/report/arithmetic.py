"""Slips of arithmetic in what models wrote: sums that are written out, worked out again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from simpleeval import SimpleEval

_NUMBER = r"\d+(?:\.\d+)?"
_OPERATOR = "(?:[-+*/x\u00d7\u00b7\u00f7\u2212]|\\bof\\b|\\btimes\\b)"
_CLAIM = re.compile(
    rf"(?<![\w.,)/*^])(?P<left>[(\s]*-?{_NUMBER}(?:[\s()]*{_OPERATOR}[\s()]*{_NUMBER})+[\s)]*)"
    r"(?:=|\u2248|\bis\b|\bequals\b|\bgives\b)\s*(?:about|approximately|roughly|~)?\s*"
    rf"\$?(?P<right>-?{_NUMBER})(?![\d%]|\.\d|\s*[-+*/\u00d7\u00b7\u00f7(%^]|\s*per\s?cent)",
    re.IGNORECASE,
)
_PART = re.compile(
    r"(?:[-+*/x^\u00d7\u00b7\u00f7\u2212]|\b(?:times|by|of|plus|minus|over))\s*$", re.IGNORECASE
)
"""What goes before the end of a longer sum, whose beginning is not in numbers."""
_RANGE = re.compile(r"\d+(?:\.\d+)?[-\u2013]\d+(?:\.\d+)?")
_SIGNS = str.maketrans(
    {"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "x": "*", "X": "*"}
)
_LONGEST = 120
_MOST_EXAMPLES = 20


@dataclass(frozen=True)
class Slip:
    """A sum that does not come out."""

    text: str
    """As it was written."""
    right: float
    """What it comes to."""
    where: tuple[int, str, int] | None = None
    """Round, population, agent."""


@dataclass
class Slips:
    """What was found in many texts."""

    checked: int = 0
    """Sums that could be worked out."""
    wrong: int = 0
    texts: int = 0
    """Texts that hold a sum."""
    examples: list[Slip] = field(default_factory=list)


def find_slips(text: str) -> tuple[int, list[Slip]]:
    """Work the sums of a text out again; gives how many there were, and those that are wrong.

    A result may be rounded or cut off at its last digit. What can't be read as a sum is left out.
    """
    checked = 0
    wrong = []
    for found in _CLAIM.finditer(text):
        left = found["left"].strip()
        if len(left) > _LONGEST or _RANGE.fullmatch(left) or _PART.search(text[: found.start()]):
            continue
        worked = _work_out(left)
        if worked is None:
            continue
        checked += 1
        told = found["right"]
        places = len(told.partition(".")[2])
        # What needs no rounding must be right; else the last digit may be rounded or cut off.
        exact = abs(worked - round(worked, places)) < 1e-9
        allowed = 1e-9 if exact else 10.0**-places * (1 + 1e-9)
        if abs(worked - float(told)) > allowed:
            wrong.append(Slip(" ".join(found[0].split()), worked))
    return checked, wrong


def _work_out(left: str) -> float | None:
    words = re.sub(r"\b(?:of|times)\b", "*", left, flags=re.IGNORECASE)
    try:
        value = SimpleEval(functions={}, names={}).eval(words.translate(_SIGNS).strip())
        return float(value)
    except Exception:  # whatever a text holds, it is no sum then
        return None


def all_slips(texts: Iterable[tuple[int, str, int, str]]) -> Slips:
    """The same for the texts of a run: (round, population, agent, text)."""
    found = Slips()
    for number, population, agent, text in texts:
        checked, wrong = find_slips(text)
        found.checked += checked
        found.wrong += len(wrong)
        found.texts += checked > 0
        for slip in wrong[: _MOST_EXAMPLES - len(found.examples)]:
            found.examples.append(Slip(slip.text, slip.right, (number, population, agent)))
    return found
