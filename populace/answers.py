"""What a population's answers come as: all at once, batch by batch, or as a summary."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from populace._runtime.caller import Caller
from populace._runtime.open_calls import Column, OpenPart
from populace._runtime.reduce import Partial, ReduceKind, Summary
from populace.errors import AgentError, WireError, error_from_wire
from populace.placeholder import failure_in, find_placeholders
from shared.errors import InvalidInputError

if TYPE_CHECKING:
    from populace.population import Population

T = TypeVar("T")

__all__ = ["AnswerBatch", "Answers", "Results", "Summary"]

MOST_PER_MESSAGE = 10_000
"""Agents of one message, where each of them is named or told something of its own."""


@dataclass(slots=True)
class AnswerBatch:
    """Some agents' answers, as they came."""

    agents: Sequence[int]
    """Numbers of the agents, in step with ``values``."""
    values: list[Any]
    """Their answers; None where an agent failed."""
    errors: dict[int, AgentError] = field(default_factory=dict)
    """Agents that failed, by number."""
    _came: tuple[OpenPart, int] | None = field(default=None, repr=False, compare=False)
    """With which part of the call, and its size in bytes, until it counts as taken."""

    def __len__(self) -> int:
        return len(self.values)


class Results(Sequence[Any]):
    """All answers of a population, in the order of the agents' numbers.

    ``results[i]`` is the answer of agent i (of a part of a population: of the i-th of them); it
    raises the agent's error if it failed.
    """

    def __init__(
        self,
        values: list[Any],
        errors: dict[int, AgentError],
        name: str,
        agents: Sequence[int] | None = None,
    ) -> None:
        self.values = values
        """Answers in the agents' order; None where an agent failed."""
        self.errors = errors
        """Errors by place; of a whole population, that is by the agents' numbers."""
        self.agents: Sequence[int] = range(len(values)) if agents is None else agents
        """The agents' numbers, in step with ``values``."""
        self._name = name

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if index in self.errors:
            raise self.errors[index]
        return self.values[index]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def to_pandas(self) -> Any:
        """A pandas DataFrame: population, agent, value, error.

        Raises:
            InvalidInputError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InvalidInputError("to_pandas needs pandas: pip install pandas") from None
        places = range(len(self.values))
        return pandas.DataFrame(
            {
                "population": self._name,
                "agent": list(self.agents),
                "value": self.values,
                "error": [str(self.errors[i]) if i in self.errors else None for i in places],
            }
        )


class Answers(Generic[T]):
    """The answers of a whole population, still to come.

    ``await`` gives ``Results``; ``batches()`` gives them as they come; ``reduce()`` has them
    summarised where the agents live, so that no list of them exists anywhere. As long as none
    of these is asked for, and while whoever reads batches is behind, no more than a few
    megabytes of answers come here; the others stay on the workers.
    """

    def __init__(
        self,
        population: Population,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float | None,
        record: dict[str, Any] | None,
    ) -> None:
        self._population = population
        self._caller: Caller = population._caller
        self._method = method
        self._args, self._kwargs = args, kwargs
        self._timeout = timeout
        self._record = record
        self.count = population.count
        """Agents that were asked."""
        self._sent = False
        self._partial: Partial | None = None
        self._progress_of: dict[int, tuple[int, int, int, float | None]] = {}
        self._tokens_of: dict[int, int] = {}
        self._parts: set[int] = set()
        self._settled = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._cancelled = False
        self._batches: deque[AnswerBatch] = deque()
        self._keeps = False
        """Whether all answers are wanted here, however many they are."""
        self._answered = bytearray()
        self._failed = 0
        self._example = ""
        self._failures: Counter[str] = Counter()
        self.lost: list[tuple[int, int, WireError]] = []
        """Slices (first agent, number of agents, error) whose worker did not answer for them."""
        for value in (*args, *kwargs.values()):
            held = list(value.values) if isinstance(value, Column) else value
            for placeholder in find_placeholders(held):
                placeholder.used = True
            if isinstance(value, Column) and len(value.values) != self.count:
                raise InvalidInputError(
                    f"each() holds {len(value.values)} values for {self.count} agents"
                )
        self._caller.enqueue(self._send)

    # Sending
    def _send(self) -> None:
        if self._cancelled:
            return
        self._sent = True
        options: dict[str, Any] = {}
        if self._partial is not None:
            options["reduce"] = [self._partial.kind, self._partial.field]
        else:
            self._answered = bytearray(self.count)
        if self._record is not None:
            options["record"] = self._record
        options["step"] = self._caller.next_step()
        own = any(isinstance(v, Column) for v in (*self._args, *self._kwargs.values()))
        for shard, places, first in self._population._slices(MOST_PER_MESSAGE if own else None):
            here = slice(first, first + len(places))
            self._caller.call_part(
                self,
                shard.shard,
                self._method,
                [_own(a, here) for a in self._args],
                {k: _own(v, here) for k, v in self._kwargs.items()},
                places,
                first,
                options,
                self._timeout,
            )

    # Told by the caller
    def _take(
        self,
        offset: int,
        positions: Sequence[int],
        values: list[Any],
        errors: list[Any],
        part: OpenPart | None = None,
        size: int = 0,
    ) -> None:
        agents: Sequence[int] = (
            range(positions.start + offset, positions.stop + offset)
            if isinstance(positions, range)
            else [offset + p for p in positions]
        )
        found = {
            agents[place]: error_from_wire(
                self._population._label(agents[place]), self._method, error
            )
            for place, error in errors
        }
        if self._caller.references.bad_objects:
            self._sort_out_unreadable(agents, values, found)
        if isinstance(agents, range):
            self._answered[agents.start : agents.stop] = b"\1" * len(agents)
        else:
            for agent in agents:
                self._answered[agent] = 1
        if found and not self._example:
            error = found[min(found)]
            self._example = f"{error.kind}: {error.message}"
        self._failed += len(found)
        self._failures.update(error.kind for error in found.values())
        came = None if part is None else (part, size)
        self._batches.append(AnswerBatch(agents, values, found, came))
        if self._keeps:
            self._taken(self._batches[-1])
        self._count(len(values))

    def _keep(self) -> None:
        """From now on, take all answers as they come."""
        if not self._keeps:
            self._keeps = True
            for held in self._batches:
                self._taken(held)

    def _taken(self, taken: AnswerBatch) -> None:
        if taken._came is not None:
            part, size = taken._came
            taken._came = None
            self._caller.part_taken(part, size)

    def _sort_out_unreadable(
        self, agents: Sequence[int], values: list[Any], found: dict[int, AgentError]
    ) -> None:
        """Turn answers that can't be read here into errors of their agents."""
        for place, value in enumerate(values):
            failure = failure_in(value)
            if failure is not None:
                values[place] = None
                label = self._population._label(agents[place])
                found[agents[place]] = AgentError(
                    label, self._method, type(failure).__name__, str(failure)
                )

    def _take_partial(self, size: int, packed: list[Any]) -> None:
        assert self._partial is not None
        self._partial.merge(packed)
        self._count(size)

    def _part_failed(self, part: OpenPart, error: WireError) -> None:
        self.lost.append((part.offset, part.size, error))
        if self._partial is not None:
            for agent in range(part.offset, part.offset + part.size):
                self._partial.add_failure(error[0], error[1], agent)
            self._count(part.size)
            return
        left = [
            agent
            for agent in range(part.offset, part.offset + part.size)
            if not self._answered[agent]
        ]
        places = [[place, error] for place in range(len(left))]
        if left:
            self._take(0, left, [None] * len(left), places)

    def _progress(
        self, number: int, done: int, failed: int, tokens: int, mean: float | None
    ) -> None:
        self._progress_of[number] = (done, failed, tokens, mean)
        self._wake()

    def _count(self, more: int) -> None:
        self._settled += more
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # For whoever waits
    def done(self) -> bool:
        """Whether every agent has answered or failed."""
        return self._settled >= self.count or self._cancelled

    @property
    def progress(self) -> tuple[int, int, int]:
        """(agents that answered or failed, of these failed, tokens) so far."""
        if self._partial is not None:
            rows = self._progress_of.values()
            lost = sum(size for _, size, _ in self.lost)
            return (
                sum(r[0] for r in rows) + lost,
                sum(r[1] for r in rows) + lost,
                sum(r[2] for r in rows),
            )
        return self._settled, self._failed, sum(self._tokens_of.values())

    @property
    def first_failure(self) -> str:
        """Kind and message of a failure, as an example; empty if there was none."""
        if self._partial is not None:
            return self._partial.example[1] if self._partial.example else ""
        return self._example

    @property
    def mean_so_far(self) -> float | None:
        """With ``reduce``: roughly the mean of the numbers so far."""
        found = [
            (r[3], r[0] - r[1]) for r in self._progress_of.values() if r[3] is not None and r[0]
        ]
        weight = sum(w for _, w in found)
        return sum(m * w for m, w in found if m is not None) / weight if weight else None

    def cancelled(self) -> bool:
        """Whether the calls were cancelled."""
        return self._cancelled

    def cancel(self) -> None:
        """End all calls that aren't answered, also where they run."""
        if self.done():
            return
        self._cancelled = True
        for number in self._parts:
            self._caller.cancel_part(number)
        self._wake()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for any progress; returns whether all is done. For progress displays.

        From now on all answers are held here, unless they are read batch by batch.
        """
        self._keep()
        return await self._progressed(timeout)

    async def _progressed(self, timeout: float | None = None) -> bool:
        if self.done():
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        await asyncio.wait({future}, timeout=timeout)
        return self.done()

    async def _finished(self) -> None:
        while not await self.wait():
            pass
        if self._cancelled:
            raise asyncio.CancelledError(f"{self._population.name}.{self._method} was cancelled")

    async def _results(self) -> Results:
        await self._finished()
        values: list[Any] = [None] * self.count
        errors: dict[int, AgentError] = {}
        for part in self._batches:
            for agent, value in zip(part.agents, part.values, strict=True):
                values[agent] = value
            errors.update(part.errors)
        population = self._population
        return Results(values, dict(sorted(errors.items())), population.name, population.numbers)

    def __await__(self) -> Generator[Any, None, Results]:
        if self._partial is not None:
            raise InvalidInputError("these answers were reduced; await the reduction instead")
        return self._results().__await__()

    async def batches(self) -> AsyncIterator[AnswerBatch]:
        """The answers batch by batch, as they come; a batch is let go once it was given.

        Whoever is slow to take them holds up the workers, not memory. Whoever takes them this
        way can't await them as a whole as well.
        """
        while True:
            finished = self.done()
            while self._batches:
                part = self._batches.popleft()
                try:
                    yield self._named(part)
                finally:
                    self._taken(part)
            if finished:
                return
            await self._progressed()

    def _named(self, part: AnswerBatch) -> AnswerBatch:
        """The same with the agents' own numbers, where these are a part of a population."""
        members = self._population._members
        if members is None:
            return part
        errors = {members[place]: error for place, error in part.errors.items()}
        return AnswerBatch([members[place] for place in part.agents], part.values, errors)

    def reduce(self, kind: ReduceKind = "mean", field: str | None = None) -> Reduction:
        """Have the answers summarised, where the agents live if asked at once.

        Args:
            kind: ``"mean"`` for numbers, or ``"count"`` to count equal answers as well.
            field: the part of each answer to use, if answers are dicts or objects.

        Returns:
            An awaitable that gives a ``Summary``.
        """
        if self._partial is not None:
            raise InvalidInputError("these answers are being reduced already")
        partial = Partial(kind, field)
        if not self._sent:
            if self._record is not None and field is not None:
                self._record = {**self._record, "field": field}
            self._partial = partial
        return Reduction(self, partial)


class Reduction:
    """A summary still to come; ``answers`` tells of progress meanwhile."""

    def __init__(self, answers: Answers[Any], partial: Partial) -> None:
        self.answers = answers
        self._partial = partial

    def __await__(self) -> Generator[Any, None, Summary]:
        return self._summary().__await__()

    async def _summary(self) -> Summary:
        answers = self.answers
        if answers._partial is None:  # asked for when the calls were out already
            async for part in answers.batches():
                good = [
                    v for a, v in zip(part.agents, part.values, strict=True) if a not in part.errors
                ]
                self._partial.add(good)
                for agent, error in part.errors.items():
                    self._partial.add_failure(error.kind, error.message, agent)
        else:
            await answers._finished()
        return self._partial.summary(answers.progress[2])


def _own(value: Any, here: slice) -> Any:
    return Column(value.values[here]) if isinstance(value, Column) else value


def each(values: Sequence[Any]) -> Any:
    """Marks an argument of a population call that has a value of its own per agent.

    Args:
        values: as many as there are agents, in their order.
    """
    return Column(values)
