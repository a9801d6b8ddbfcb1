"""Where agents of other populations are: what ``self.agents`` looks in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from populace._runtime.caller import Caller
from populace.proxy import AgentProxy
from shared.subjects import ENVIRONMENT


def shard_name(population: str, index: int) -> str:
    """The name of a population's shard."""
    return f"{population}-{index}"


def shard_sizes(count: int, shards: int) -> list[int]:
    """How many agents each shard holds: as even as can be, nobody is left over."""
    base, extra = divmod(count, shards)
    return [base + (1 if i < extra else 0) for i in range(shards)]


class Directory:
    """What one process knows of its run's populations: their sizes and numbers of shards."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._known: dict[str, tuple[int, int]] = {}
        self._environments: dict[str, str] = {}

    def learn_environments(self, environments: Mapping[str, str]) -> None:
        """Take in environments: path to name of the class."""
        self._environments.update(environments)

    def environment(self, path: str) -> AgentProxy:
        """A proxy of the environment at a path.

        Raises:
            LookupError: there is none.
        """
        if path not in self._environments:
            known = ", ".join(sorted(self._environments)) or "none"
            raise LookupError(f"there is no environment at {path!r} (there are: {known[:500]})")
        return AgentProxy(self._caller, f"{ENVIRONMENT}{path}", 0, path)

    def children(self, path: str) -> dict[str, AgentProxy]:
        """The environments directly below a path, by their own names."""
        start = f"{path}."
        return {
            one[len(start) :]: self.environment(one)
            for one in sorted(self._environments)
            if one.startswith(start) and "." not in one[len(start) :]
        }

    def learn(self, known: Mapping[str, tuple[int, int]]) -> None:
        """Take in populations by name, each with its number of agents and of shards."""
        self._known.update(known)

    def proxy(self, population: str, number: int) -> AgentProxy:
        """A proxy of one agent.

        Raises:
            LookupError: there is no such population, or no such agent in it.
        """
        found = self._known.get(population)
        if found is None:
            known = ", ".join(sorted(self._known)) or "none"
            raise LookupError(
                f"there is no population named {population!r} in this run (there are: {known}); "
                "agents made one by one are reached by a proxy that is passed to them"
            )
        count, shards = found
        if not 0 <= number < count:
            raise LookupError(f"{population} has agents 0 to {count - 1}, not {number}")
        base, extra = divmod(count, shards)
        large = extra * (base + 1)  # the first shards hold one agent more
        if number < large:
            shard, index = divmod(number, base + 1)
        else:
            shard, index = divmod(number - large, base)
            shard += extra
        name = shard_name(population, shard)
        return AgentProxy(self._caller, name, index, f"{population}/{number}")

    def size(self, population: str) -> int:
        """Number of agents of a population; 0 if it isn't known."""
        return self._known.get(population, (0, 0))[0]


class Agents:
    """All agents of a run, as one of them sees them; ``self.agents`` is one."""

    __slots__ = ("_directory", "_population")

    def __init__(self, directory: Directory, population: str) -> None:
        self._directory = directory
        self._population = population

    def __getitem__(self, name: str | int) -> Any:
        """A proxy: of agent ``"voter/17"``, or of number 17 of one's own population.

        Raises:
            LookupError: there is no such agent.
        """
        if isinstance(name, int):
            return self._directory.proxy(self._population, name)
        population, slash, number = name.rpartition("/")
        if not slash or not number.isdecimal():
            raise LookupError(
                f"an agent is named by its population and number, as in 'voter/17', not {name!r}"
            )
        return self._directory.proxy(population, int(number))

    def __len__(self) -> int:
        """Number of agents in one's own population."""
        return self._directory.size(self._population)
