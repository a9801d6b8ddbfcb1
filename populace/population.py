"""Populations: many agents handled as one."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from populace.answers import MOST_PER_MESSAGE, Answers
from populace.personas.people import find_matching
from populace.proxy import AgentProxy
from shared.errors import InvalidInputError
from shared.messages.control import PlacedShard

if TYPE_CHECKING:
    from populace.agent import Agent
    from populace.world import World


@dataclass(frozen=True)
class Made:
    """A population, and how it was made."""

    population: Population
    class_path: str
    folder: str | None
    people: str | None
    isolated: bool

    def plain(self) -> dict[str, Any]:
        """What is needed to make it again."""
        return {
            "name": self.population.name,
            "class_path": self.class_path,
            "folder": self.folder,
            "people": self.people,
            "isolated": self.isolated,
            "sizes": [shard.size for shard in self.population._shards],
        }


class Population:
    """A set of agents of one class; calling a method calls it on every one of them.

    ``voters.vote(question)`` returns ``Answers`` at once. ``voters[7]`` is a proxy of agent
    7; ``len(voters)`` is their number; ``voters.only([3, 7])`` is a part of it.
    """

    def __init__(
        self,
        world: World,
        cls: type[Agent],
        name: str,
        shards: list[PlacedShard],
        members: Sequence[int] | None = None,
    ) -> None:
        self._world = world
        self._caller = world._caller
        self._cls = cls
        self._shards = shards
        self._timeout: float | None = None
        self._record: bool | None = None
        self.name = name
        """Unique within the run."""
        self._whole = sum(shard.size for shard in shards)
        self._members = members
        """Numbers of the agents that it is restricted to, in order; None: all."""
        self.count = self._whole if members is None else len(members)
        """Number of agents."""

    def __len__(self) -> int:
        return self.count

    def options(self, *, timeout: float | None = None, record: bool | None = None) -> Population:
        """The same population, whose calls are made differently.

        Args:
            timeout: seconds without any progress after which calls fail.
            record: whether answers go into the run's results; default: in a scenario's
                rounds they do.
        """
        twin = Population(self._world, self._cls, self.name, self._shards, self._members)
        twin._timeout = self._timeout if timeout is None else timeout
        twin._record = self._record if record is None else record
        return twin

    @property
    def numbers(self) -> Sequence[int]:
        """The agents' numbers, in order."""
        return range(self._whole) if self._members is None else self._members

    def only(self, numbers: Iterable[int]) -> Population:
        """A part of the population, by the agents' numbers.

        What is called on it reaches these agents alone; answers stand in the order of their
        numbers, whatever the order here, and ``part[0]`` is the first of them.

        Raises:
            InvalidInputError: a number that is not among this population's.
        """
        wanted = sorted(set(numbers))
        known = set(self._members) if self._members is not None else range(self._whole)
        for number in wanted:
            if number not in known:
                raise InvalidInputError(f"{self.name} has no agent {number} (any more)")
        return self._part(wanted)

    def without(self, numbers: Iterable[int]) -> Population:
        """The population less some of its agents: those that have left, say.

        They live on, and can be called by whoever has the whole, but not by this part.
        """
        gone = set(numbers)
        return self._part([number for number in self.numbers if number not in gone])

    def where(self, condition: str) -> Population:
        """The agents whose persona fulfils a condition: ``people.where("age < 25")``.

        Args:
            condition: an expression over attributes of the personas, as population files use
                them; a missing value is no number, and the empty text.

        Raises:
            InvalidInputError: its agents have no personas, the condition can't be read, or it
                holds of none of them.
        """
        made = self._world._made.get(self.name)
        if made is None or made.people is None:
            raise InvalidInputError(f"the agents of {self.name} have no personas to choose by")
        found = find_matching(made.people, self._whole, condition)
        if self._members is not None:
            found = sorted(set(found).intersection(self._members))
        if not found:
            raise InvalidInputError(f"of nobody in {self.name} it holds that {condition}")
        return self._part(found)

    def sample(self, size: int, random: Random) -> Population:
        """So many of its agents, drawn at random.

        Args:
            size: how many; all, if there are no more.
            random: what draws, such as a scenario's ``self.random``.
        """
        numbers = self.numbers
        return self._part(sorted(random.sample(numbers, min(size, len(numbers)))))

    def _part(self, members: list[int]) -> Population:
        part = Population(self._world, self._cls, self.name, self._shards, members)
        part._timeout, part._record = self._timeout, self._record
        return part

    def _slices(self, most: int | None) -> Iterator[tuple[PlacedShard, Sequence[int], int]]:
        """(shard, the agents' places in it, the place of the first of them here) of each message.

        Args:
            most: agents in one message, where each has something of its own to be told.
        """
        first = 0
        for shard in self._shards:
            if self._members is None:
                places: Sequence[int] = range(shard.size)
                size = most or max(1, shard.size)
            else:
                stop = bisect_left(self._members, shard.offset + shard.size, first)
                places = [number - shard.offset for number in self._members[first:stop]]
                size = most or MOST_PER_MESSAGE
            for start in range(0, len(places), size):
                yield shard, places[start : start + size], first + start
            first += len(places)

    def __getattr__(self, name: str) -> Callable[..., Answers[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        if not inspect.isfunction(getattr(self._cls, name, None)):
            raise AttributeError(f"{self._cls.__name__} has no method {name!r}")

        def method(*args: Any, **kwargs: Any) -> Answers[Any]:
            return self._call(name, args, kwargs)

        method.__name__ = name
        return method

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answers[Any]:
        recorded = self._world._records if self._record is None else self._record
        record = {"call": self._world._next_recorded()} if recorded else None
        answers: Answers[Any] = Answers(
            self, method, args, kwargs, timeout=self._timeout, record=record
        )
        if self._world._records and recorded:
            self._world._recorded.append(answers)
        return answers

    def _label(self, place: int) -> str:
        return f"{self.name}/{self.numbers[place]}"

    def _shard_of(self, number: int) -> PlacedShard:
        for shard in self._shards:
            if shard.offset <= number < shard.offset + shard.size:
                return shard
        raise IndexError(f"{self.name} has agents 0 to {self.count - 1}, not {number}")

    def __getitem__(self, number: int) -> AgentProxy:
        if not isinstance(number, int):
            raise InvalidInputError("a population takes one agent's number in brackets")
        if number < 0:
            number += self.count
        if self._members is not None:
            if not 0 <= number < self.count:
                raise IndexError(f"this part of {self.name} has {self.count} agents")
            number = self._members[number]
        shard = self._shard_of(number)
        return AgentProxy(
            self._caller, shard.shard, number - shard.offset, f"{self.name}/{number}", self._cls
        )

    def __repr__(self) -> str:
        return f"<Population {self.name}: {self.count} {self._cls.__name__}>"
