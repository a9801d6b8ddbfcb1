"""Calls that were made and are not fully answered, as their caller holds them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from populace.errors import WireError, error_from_wire
from populace.placeholder import Placeholder, failure_in

if TYPE_CHECKING:
    from populace._runtime.driver import CallTask, PlainCall
    from populace.answers import Answers


class Column:
    """Values for the agents of a population, one each; made by ``populace.each``."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values


class Queued:
    """A call to one agent that waits for the end of the tick."""

    __slots__ = (
        "args",
        "by",
        "class_path",
        "index",
        "key",
        "kwargs",
        "method",
        "placeholder",
        "round",
        "storm",
    )

    def __init__(
        self,
        placeholder: Placeholder[Any],
        index: int,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        class_path: tuple[str, str | None] | None,
        by: CallTask | PlainCall | None,
        round_number: int,
        key: list[Any] | None,
    ) -> None:
        self.placeholder = placeholder
        self.index = index
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.class_path = class_path
        self.by = by
        self.round = round_number if by is None else by.group.round
        self.key = key
        """What makes a call to an environment the same call when it is made again."""
        self.storm: Sequence[str] = () if by is None else by.group.storm
        """The events that led to this call, each the cause of the next."""

    def like(self, other: Queued) -> bool:
        """Whether both fit into one group of calls."""
        return (
            self.method == other.method
            and len(self.args) == len(other.args)
            and self.kwargs.keys() == other.kwargs.keys()
            and self.class_path == other.class_path
            and (self.by is None) == (other.by is None)
            and self.round == other.round
            and self.storm == other.storm
            and self.placeholder.wanted == other.placeholder.wanted
            and self.placeholder.deadline == other.placeholder.deadline
        )


class OpenCall:
    """A group of calls that is not fully answered."""

    __slots__ = ("cost", "deadline", "number", "row", "seen", "sent", "shard", "timeout", "tokens")

    def __init__(self, number: int, shard: str, row: bytes, cost: int, timeout: float) -> None:
        self.number = number
        self.shard = shard
        self.row = row
        """The packed calls; kept until they are answered, so that they can be sent again."""
        self.cost = cost
        """What it takes of its lane's window."""
        self.timeout = timeout
        self.deadline = 0.0
        self.sent = False
        """Whether it left, or waits for credit."""
        self.tokens = 0
        """Model tokens that the answers so far have cost."""
        self.seen: set[int | str] = set()
        """Numbers of the answer batches that came; a repeated one is dropped."""

    def start_clock(self) -> None:
        """Count the time-out from now."""
        self.deadline = time.monotonic() + self.timeout

    @property
    def paused(self) -> bool:
        """Whether it waits for this side, so that no time-out may strike."""
        return False

    @property
    def taken(self) -> int:
        """Bytes of its answers that were taken, if they are counted by themselves."""
        return 0

    def answers(
        self, positions: Sequence[int], values: list[Any], errors: list[Any], size: int
    ) -> bool:
        """Take a batch of ``size`` bytes; returns whether the group is answered in full."""
        raise NotImplementedError

    def fail(self, error: WireError) -> None:
        """Fail all that is not answered."""
        raise NotImplementedError


class OpenSingles(OpenCall):
    """Calls to single agents that travel as one group."""

    __slots__ = ("cancelled", "left", "placeholders")

    def __init__(
        self,
        number: int,
        shard: str,
        row: bytes,
        cost: int,
        timeout: float,
        placeholders: list[Placeholder[Any]],
    ) -> None:
        super().__init__(number, shard, row, cost, timeout)
        self.placeholders = placeholders
        self.left = len(placeholders)
        self.cancelled: list[int] = []
        """Positions cancelled before the group left."""

    def answers(
        self, positions: Sequence[int], values: list[Any], errors: list[Any], size: int
    ) -> bool:
        """See ``OpenCall``."""
        held = self.placeholders
        failed: dict[int, WireError] = dict(errors)
        for place, position in enumerate(positions):
            placeholder = held[position]
            if placeholder.done():
                continue  # cancelled or timed out here, and so counted already
            self.left -= 1
            error = failed.get(place)
            if error is None:
                settle(placeholder, values[place])
            else:
                placeholder._set_error(
                    error_from_wire(placeholder.label, placeholder.method, error)
                )
        return self.left <= 0

    def kept(self, positions: Sequence[int]) -> bool:
        """Note that answers are kept where they were made."""
        for position in positions:
            if not self.placeholders[position].done():
                self.left -= 1
                self.placeholders[position]._set_kept()
        return self.left <= 0

    def fail(self, error: WireError) -> None:
        """See ``OpenCall``."""
        for placeholder in self.placeholders:
            placeholder._set_error(error_from_wire(placeholder.label, placeholder.method, error))


class OpenPart(OpenCall):
    """The part of a population call that went to one shard (or a slice of it)."""

    __slots__ = ("agents", "answered", "came", "offset", "size", "told", "untaken")

    def __init__(
        self,
        number: int,
        shard: str,
        row: bytes,
        cost: int,
        timeout: float,
        agents: Answers[Any],
        offset: int,
        size: int,
    ) -> None:
        super().__init__(number, shard, row, cost, timeout)
        self.agents = agents
        self.offset = offset
        """The first agent's number within the population."""
        self.size = size
        self.answered = 0
        self.came = 0
        """Bytes of answers that came."""
        self.untaken = 0
        """Of these, what nobody has taken yet."""
        self.told = 0
        """Bytes taken as the worker was told."""

    @property
    def paused(self) -> bool:
        """Whether it waits for whoever reads the answers."""
        return self.untaken > 0

    @property
    def taken(self) -> int:
        """Bytes of answers that were taken."""
        return self.came - self.untaken

    def answers(
        self, positions: Sequence[int], values: list[Any], errors: list[Any], size: int
    ) -> bool:
        """See ``OpenCall``."""
        self.start_clock()
        self.answered += len(positions)
        self.came += size
        self.untaken += size
        self.agents._tokens_of[self.number] = self.tokens
        self.agents._take(self.offset, positions, values, errors, self, size)
        return self.answered >= self.size

    def summary(
        self, done: int, failed: int, tokens: int, peek: float | None, partial: list[Any] | None
    ) -> bool:
        """Take what a reduction has come to; ``partial`` is there at its end."""
        self.start_clock()
        self.agents._progress(self.number, done, failed, tokens, peek)
        if partial is None:
            return False
        self.agents._take_partial(self.size, partial)
        return True

    def fail(self, error: WireError) -> None:
        """See ``OpenCall``."""
        self.agents._part_failed(self, error)


def settle(placeholder: Placeholder[Any], value: Any) -> None:
    """Give a placeholder its answer, or the error that stands for one that can't be read."""
    failure = failure_in(value)
    if failure is None:
        placeholder._set_value(value)
    else:
        placeholder._set_error(failure)
