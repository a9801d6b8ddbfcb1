"""Scenarios: what happens in each round, written as plain async Python."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from populace.errors import ScenarioError
from populace.injections import changed_params
from populace.population import Population
from shared.codec import plain
from shared.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from populace._runtime.listening import Listener
    from populace.agent import Agent
    from populace.environment import Environment, EnvironmentProxy
    from populace.events import Event
    from populace.report import ReportSpec
    from populace.world import World
    from shared.messages.scenario import PlannedEvent


_TAKEN = frozenset({"round", "answers", "failed", "failures", "tokens", "seconds"})


class NoParams(BaseModel):
    """For scenarios that take no parameters."""

    model_config = ConfigDict(extra="forbid")


class Scenario:
    """Subclass it; the director calls ``setup``, then ``round`` for each round, then ``finish``.

    A class attribute ``Params`` (a pydantic model that forbids extra keys) describes what
    stands under ``params`` in the scenario file.
    """

    Params: ClassVar[type[BaseModel]] = NoParams

    def __init__(
        self,
        world: World,
        *,
        params: BaseModel,
        seed: int,
        rounds: int,
        agents: int,
        isolated: bool = False,
        groups: int | None = None,
        personas: str | None = None,
    ) -> None:
        self.world = world
        self.params: Any = params
        """The file's ``params``, validated."""
        self.seed = seed
        self.rounds = rounds
        self.agents = agents
        """Number of agents that the file asks for."""
        self.isolated = isolated
        """Whether the file asks for a process per agent."""
        self.groups = groups
        """Into how many groups the file has the agents divided; None: into none."""
        self.personas = personas
        """Where the file says that the agents' personas are."""
        self.random = random.Random(f"scenario/{seed}")  # noqa: S311 - reproducible on purpose
        """The scenario's own random numbers, from the seed."""
        self._recorded: dict[str, Any] = {}
        self._listeners: list[tuple[Listener, Callable[[Event], Any], str | None]] = []
        """Listeners, their handlers, and the names under which events are kept for them."""

    async def setup(self) -> None:
        """Make populations, before the first round."""

    async def round(self, n: int) -> None:
        """Play round n, from 1."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'round'")

    async def finish(self) -> None:
        """Tidy up or record last things, after the last round."""

    async def injected(self, event: PlannedEvent) -> None:
        """Something comes from outside, before the round ``event.round``.

        By default ``params`` sets parameters to ``event.data`` (dots lead into nested ones). A
        scenario that understands others overrides this, and calls it for what it does not know.

        Raises:
            ScenarioError: the scenario does not know what to do with it.
            InvalidInputError: there are no such parameters.
        """
        if event.name != "params":
            raise ScenarioError(
                f"{type(self).__name__} does not know the event {event.name!r}; it needs a method "
                "'injected' that does"
            )
        self.params = changed_params(self.params, event.data)

    def report(self) -> ReportSpec | None:
        """What a report shows of this scenario; follows from the file alone. Default: the usual."""
        return None

    async def population(
        self,
        cls: type[Agent],
        *args: Any,
        count: int | None = None,
        name: str | None = None,
        isolated: bool | None = None,
        personas: Any = None,
        **kwargs: Any,
    ) -> Population:
        """Make a population; default: as the scenario file asks for (``personas=""``: nobody).

        See ``World.population`` for the arguments and errors.
        """
        if personas is None:
            personas = self.personas
        return await self.world.population(
            cls,
            *args,
            count=self.agents if count is None else count,
            name=name,
            isolated=self.isolated if isolated is None else isolated,
            personas=None if isinstance(personas, str) and not personas else personas,
            **kwargs,
        )

    async def environment(
        self, cls: type[Environment], path: str, *args: Any, **kwargs: Any
    ) -> EnvironmentProxy:
        """Make an environment; see ``World.environment`` for the arguments and errors."""
        return await self.world.environment(cls, path, *args, **kwargs)

    async def listen(
        self,
        environment: EnvironmentProxy | str,
        event: str,
        handler: Callable[[Event], Any],
        *,
        when: str | None = None,
        below: bool = False,
        durable: str | None = None,
    ) -> Listener:
        """Have one of the scenario's methods called with events; see ``World.listen``."""
        listener = await self.world.listen(
            environment, event, handler, when=when, below=below, durable=durable
        )
        self._listeners.append((listener, handler, durable))
        return listener

    def record(self, **values: Any) -> None:
        """Note what this round came to; it stands in the round's row of the results.

        Raises:
            InvalidInputError: a name that the row has already.
        """
        taken = sorted(set(values) & _TAKEN)
        if taken:
            raise InvalidInputError(
                f"record({taken[0]}=...): every round's row has {taken[0]!r} already; choose "
                "another name"
            )
        self._recorded.update({name: plain(value) for name, value in values.items()})
