"""Populations: many agents handled as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from populace.answers import Answers
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
    7; ``len(voters)`` is their number.
    """

    def __init__(
        self, world: World, cls: type[Agent], name: str, shards: list[PlacedShard]
    ) -> None:
        self._world = world
        self._caller = world._caller
        self._cls = cls
        self._shards = shards
        self._timeout: float | None = None
        self._record: bool | None = None
        self.name = name
        """Unique within the run."""
        self.count = sum(shard.size for shard in shards)
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
        twin = Population(self._world, self._cls, self.name, self._shards)
        twin._timeout = self._timeout if timeout is None else timeout
        twin._record = self._record if record is None else record
        return twin

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

    def _label(self, number: int) -> str:
        return f"{self.name}/{number}"

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
        shard = self._shard_of(number)
        return AgentProxy(
            self._caller, shard.shard, number - shard.offset, self._label(number), self._cls
        )

    def __repr__(self) -> str:
        return f"<Population {self.name}: {self.count} {self._cls.__name__}>"
