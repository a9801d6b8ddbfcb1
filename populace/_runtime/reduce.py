"""Summaries that are made where the agents live, and merged without rounding.

Sums are kept as a short list of floats whose exact sum is the exact sum of all that was
added (Shewchuk's expansions, made with ``math.fsum``), so that a mean is the same however
the agents are divided over workers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Any, Literal

from shared.errors import InvalidInputError

ReduceKind = Literal["mean", "count"]
REDUCE_KINDS: tuple[ReduceKind, ...] = ("mean", "count")
MAX_COUNTED = 10_000
"""Different answers that a "count" can hold."""
_LARGEST = 1 << 1023
_TINY, _HUGE = 1e-250, 1e290


class ExactSum:
    """A sum of floats without rounding error; ``value`` rounds once, at the end."""

    __slots__ = ("parts", "special")

    def __init__(self, parts: Iterable[float] = (), special: float = 0.0) -> None:
        self.parts = list(parts)
        self.special = special
        """Sum of the infinities and NaNs that were added."""

    def add(self, values: Sequence[float]) -> None:
        """Add many at once."""
        if not all(map(math.isfinite, values)):
            self.special += sum(v for v in values if not math.isfinite(v))
            values = [v for v in values if math.isfinite(v)]
        try:
            total = math.fsum(values)
        except OverflowError:
            self.special, values, total = math.inf, (), 0.0
        everything = [*self.parts, *values]
        parts: list[float] = []
        try:
            rest = math.fsum(everything) if self.parts else total
            while rest:
                parts.append(rest)
                rest = math.fsum(chain(everything, (-p for p in parts)))
        except OverflowError:
            self.special, parts = math.inf, []
        self.parts = parts

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self.special += other.special
        self.add(other.parts)

    @property
    def value(self) -> float:
        """The sum, correctly rounded."""
        return math.fsum(self.parts) + self.special


@dataclass
class Summary:
    """What a population answered, in numbers.

    ``mean``, ``sd``, ``minimum`` and ``maximum`` are over the answers that are numbers, and
    None where there are none; ``sd`` is the population's (division by n).
    """

    count: int = 0
    """Agents that answered."""
    failed: int = 0
    """Agents that did not."""
    failures: dict[str, int] = field(default_factory=dict)
    """The same by kind."""
    numbers: int = 0
    """Answers that were numbers; yes and no count as 1 and 0, so their mean is a share."""
    mean: float | None = None
    sd: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    counts: dict[str, int] = field(default_factory=dict)
    """With ``reduce("count")``: how many gave each answer, most frequent first."""
    tokens: int = 0
    """Prompt and answer tokens of all models asked."""
    failure_example: str = ""
    """The first failure's message, as an example."""


def _exact_squares(values: Sequence[float]) -> list[float]:
    """Floats whose exact sum is the exact sum of the squares.

    Each square and its rounding error, by Dekker's product (1971). Outside of the range in
    which its halves stay normal numbers, the rounded square has to do.
    """
    found: list[float] = []
    for x in values:
        square = x * x
        found.append(square)
        if _TINY < square < _HUGE:
            c = 134217729.0 * x
            high = c - (c - x)
            low = x - high
            found.append(((high * high - square) + 2.0 * high * low) + low * low)
    return found


def has_part(value: Any, name: str) -> bool:
    """Whether an answer has a part of that name."""
    return name in value if isinstance(value, dict) else hasattr(value, name)


def pick(value: Any, name: str | None) -> Any:
    """The named part of an answer (a dict's key or an object's attribute), or the answer."""
    if name is None:
        return value
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


class Partial:
    """A summary in the making: takes batches of answers, merges with others, travels."""

    __slots__ = (
        "count",
        "counts",
        "example",
        "failed",
        "failures",
        "field",
        "high",
        "kind",
        "low",
        "numbers",
        "squares",
        "total",
    )

    def __init__(self, kind: ReduceKind, field_name: str | None) -> None:
        if kind not in REDUCE_KINDS:
            raise InvalidInputError(
                f"there is no reduction {kind!r}; use one of {', '.join(REDUCE_KINDS)}"
            )
        self.kind = kind
        self.field = field_name
        self.count = 0
        self.failed = 0
        self.failures: Counter[str] = Counter()
        self.example: tuple[int, str] | None = None
        """(agent's number, message) of the failure with the lowest number."""
        self.numbers = 0
        self.total = ExactSum()
        self.squares = ExactSum()
        self.low: float | None = None
        self.high: float | None = None
        self.counts: Counter[str] = Counter()

    def add(self, values: Sequence[Any]) -> None:
        """Take a batch of answers."""
        self.count += len(values)
        if self.field is not None:
            values = [pick(v, self.field) for v in values]
        if self.kind == "count":
            for value in values:
                key = value if isinstance(value, str) else repr(value)
                if key in self.counts or len(self.counts) <= MAX_COUNTED:
                    self.counts[key] += 1
        found = [
            float(v)
            for v in values
            if type(v) in (float, bool) or (type(v) is int and -_LARGEST <= v <= _LARGEST)
        ]
        if found:
            self.numbers += len(found)
            self.total.add(found)
            self.squares.add(_exact_squares(found))
            low, high = min(found), max(found)
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)

    def add_failure(self, kind: str, message: str, agent: int) -> None:
        """Take an agent's failure."""
        self.failed += 1
        self.failures[kind] += 1
        if self.example is None or agent < self.example[0]:
            self.example = (agent, f"{kind}: {message}")

    def pack(self) -> list[Any]:
        """As it travels."""
        return [
            self.count,
            self.failed,
            dict(self.failures),
            list(self.example) if self.example else None,
            self.numbers,
            [self.total.parts, self.total.special],
            [self.squares.parts, self.squares.special],
            self.low,
            self.high,
            dict(self.counts),
        ]

    def merge(self, packed: list[Any]) -> None:
        """Take in another one that travelled."""
        count, failed, failures, example, numbers, total, squares, low, high, counts = packed
        self.count += count
        self.failed += failed
        self.failures.update(failures)
        if example and (self.example is None or example[0] < self.example[0]):
            self.example = (example[0], example[1])
        self.numbers += numbers
        self.total.merge(ExactSum(*total))
        self.squares.merge(ExactSum(*squares))
        lows = [v for v in (self.low, low) if v is not None]
        highs = [v for v in (self.high, high) if v is not None]
        self.low = min(lows, default=None)
        self.high = max(highs, default=None)
        self.counts.update(counts)

    @property
    def mean(self) -> float | None:
        """Mean of the numbers so far."""
        return self.total.value / self.numbers if self.numbers else None

    def _sd(self) -> float:
        """From the exact sums, so that nothing cancels out however large the numbers are."""
        if not math.isfinite(self.total.value) or not math.isfinite(self.squares.value):
            return math.nan
        total = sum(map(Fraction, self.total.parts), Fraction())
        squares = sum(map(Fraction, self.squares.parts), Fraction())
        # Below zero only where squares are too small for a float to hold them exactly.
        return math.sqrt(max(Fraction(), (squares - total * total / self.numbers) / self.numbers))

    def summary(self, tokens: int = 0) -> Summary:
        """The finished summary.

        Raises:
            InvalidInputError: a "count" found too many different answers.
        """
        if len(self.counts) > MAX_COUNTED:
            raise InvalidInputError(
                f"there are more than {MAX_COUNTED:,} different answers, too many to count each; "
                "await the answers, or count a coarser part of them"
            )
        mean = self.mean
        sd = None
        if mean is not None:
            sd = self._sd()
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return Summary(
            count=self.count,
            failed=self.failed,
            failures=dict(sorted(self.failures.items())),
            numbers=self.numbers,
            mean=mean,
            sd=sd,
            minimum=self.low,
            maximum=self.high,
            counts=dict(ordered),
            tokens=tokens,
            failure_example=self.example[1] if self.example else "",
        )
