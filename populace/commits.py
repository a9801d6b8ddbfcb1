"""Committed rounds: what it takes to go on with a run from the end of one of them.

At the end of a round, once its answers are stored, every worker writes down what its agents and
environments hold (``World.save``), and the owner what the scenario holds and where everything
lies. The last step is one message, the commit, that names all of it; before it the round did not
happen, after it it did. Whoever takes the run up again begins from the last commit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from populace._runtime.listening import Listener
from populace._runtime.saving import StateStore
from populace.environment import EnvironmentProxy
from populace.errors import StateError
from populace.population import Population
from populace.proxy import register_proxies
from shared.bus import Bus
from shared.code import import_path
from shared.codec import FIRST_FREE_EXTENSION, Codec, from_public, pack_plain
from shared.errors import BusError, CodecError
from shared.logs import get_logger
from shared.messages.control import SavedPart
from shared.messages.scenario import RoundRow
from shared.streams import patiently
from shared.subjects import Subjects

if TYPE_CHECKING:
    from populace.scenario import Scenario
    from populace.world import World

_log = get_logger(__name__)

_OWNER, _COMMIT, _LAST = "owner", "commit", "last"
_POPULATION, _ENVIRONMENT, _LISTENER, _RANDOM = range(
    FIRST_FREE_EXTENSION + 16, FIRST_FREE_EXTENSION + 20
)
_GIVEN = frozenset(
    {
        "world",
        "params",
        "seed",
        "rounds",
        "agents",
        "isolated",
        "groups",
        "personas",
    }
)
"""Attributes that a scenario is made with, and gets again."""
_NEVER = frozenset({"world", "_recorded", "_listeners"})


class Commit:
    """A committed round, as it was read.

    Args:
        round_number: the last round that it holds; 0: the setup.
        life: which life of the run made it.
        owner: where what the owner wrote down lies.
        content: what that was.
    """

    def __init__(
        self, round_number: int, life: int, owner: SavedPart, content: dict[str, Any]
    ) -> None:
        self.round = round_number
        self.life = life
        self.owner = owner
        self.rows = [RoundRow.model_validate(row) for row in content["rows"]]
        self.records: int = content["records"]
        self.world: dict[str, Any] = content["world"]
        self.scenario: bytes = content["scenario"]
        self.listeners: list[list[Any]] = content["listeners"]


async def last_commit(bus: Bus, subjects: Subjects, run: str) -> Commit | None:
    """The last committed round of a run, or None if there is none.

    Raises:
        BusError: it can't be read.
    """
    subject = subjects.run_state(run, _LAST, _COMMIT)
    found = await bus.last(subjects.stream_states, subject, exact=True)
    if found is None:
        return None
    told = from_public(found.data)
    store = StateStore(bus, subjects, run, 0)
    owner = SavedPart.model_validate(told["owner"])
    data = await store.read(_OWNER, owner)
    return Commit(told["round"], told["life"], owner, from_public(data))


async def drop_commits(bus: Bus, subjects: Subjects, run: str) -> None:
    """Remove all that was written down of a run; it can't be taken up again."""
    await bus.purge(subjects.stream_states, subjects.run_state(run))


class Commits:
    """Commits a run's rounds.

    Args:
        world: the run's.
        scenario: what is played in it; as it was made, before its setup.
        check: raises if the run is played by another by now; asked right before each commit.
    """

    def __init__(
        self, world: World, scenario: Scenario, check: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._check = check
        self._given = given(scenario)
        self._world = world
        self._scenario = scenario
        self._codec = state_codec(world, scenario)
        self._store = StateStore(world._bus, world._subjects, world.run, world.life)
        self._owner: SavedPart | None = None
        self._earlier = range(1, world.life)
        """Lives that may have written down the next round, and did not come to commit it."""
        self._remains: list[str] = []
        """Subjects of what those left."""
        self._cleaning: asyncio.Task[None] | None = None

    async def commit(self, round_number: int, rows: list[RoundRow], records: int) -> None:
        """Commit a round.

        Raises:
            StateError: something can't be written down; it is named.
            BusError: a worker does not answer, or the broker does not take it.
        """
        world = self._world
        await world.save(round_number)
        content = {
            "rows": [row.model_dump() for row in rows],
            "records": records,
            "world": world.kept(),
            "scenario": pack_scenario(self._scenario, self._codec, self._given),
            "listeners": _listeners_of(self._scenario),
        }
        before = self._owner
        self._owner = await self._store.write(round_number, _OWNER, pack_plain(content))
        subject = world._subjects.run_state(world.run, _LAST, _COMMIT)
        told = {"round": round_number, "life": world.life, "owner": self._owner.model_dump()}
        name = f"{world._bus.process}/commit/{round_number}"

        async def append() -> int:
            if self._check is not None:
                await self._check()
            return await world._bus.append(subject, pack_plain(told), message_id=name, timeout=3.0)

        sequence = await patiently(append, "committing a round")
        # From here on the round has happened; what it replaces can go, while the next one begins.
        await self.close()
        # Only with the next commit: a life that merely stood still may commit this round, too.
        remains, self._remains = self._remains, self._left_of(round_number)
        self._cleaning = asyncio.ensure_future(
            self._clean(round_number, sequence, before, world.replaced(), remains)
        )

    def _left_of(self, round_number: int) -> list[str]:
        """Subjects of what earlier lives left of a round, which this one has just committed."""
        lives, self._earlier = self._earlier, range(0)
        world = self._world
        return [world._subjects.run_state(world.run, round_number, f"{n}.>") for n in lives]

    async def _clean(
        self,
        round_number: int,
        sequence: int,
        owner: SavedPart | None,
        replaced: list[tuple[str, SavedPart]],
        remains: list[str],
    ) -> None:
        """Remove what a commit has replaced."""
        world = self._world
        states, subjects = world._subjects.stream_states, world._subjects
        try:
            commits = subjects.run_state(world.run, _LAST, _COMMIT)
            await world._bus.purge(states, commits, before=sequence)
            if owner is not None:
                await self._store.drop(_OWNER, owner)
            for name, part in replaced:
                await self._store.drop(name, part)
            for subject in remains:
                await world._bus.purge(states, subject)
            # What was finished within a round that is committed is part of its state.
            await world._bus.purge(states, subjects.run_finished(world.run, round_number))
        except BusError as error:  # it takes up room, and does no harm
            _log.warning("an earlier round's state was not removed", error=str(error))

    async def close(self) -> None:
        """Wait until what the last commit has replaced is removed."""
        if self._cleaning is not None:
            await self._cleaning

    async def take_up(self, commit: Commit) -> None:
        """Make world and scenario as they were.

        Raises:
            PopulaceError: that is not possible.
        """
        self._owner = commit.owner
        self._earlier = range(commit.life, self._world.life)
        await self._world.take_up(commit.world)
        scenario = self._scenario
        self._world._takes_up = True
        for path, event, method, when, below, durable in commit.listeners:
            await scenario.listen(
                path, event, getattr(scenario, method), when=when, below=below, durable=durable
            )
        self._world._takes_up = False
        unpack_scenario(scenario, self._codec, commit.scenario)


def state_codec(world: World, scenario: Scenario) -> Codec:
    """A codec for what scenarios hold: values, and what stands for parts of the world."""
    codec = Codec(world._loader)
    register_proxies(codec, world._caller)

    def population(parts: list[Any]) -> Population:
        name, timeout, record, members = parts
        made = world._made.get(name)
        if made is None:
            raise CodecError(f"the run has no population named {name!r}")
        whole = made.population.options(timeout=timeout, record=record)
        return whole if members is None else whole.only(members)

    def environment(parts: list[Any]) -> EnvironmentProxy:
        path, class_path, folder = parts
        cls = None if class_path is None else world._loader.load(class_path, object, folder)
        return EnvironmentProxy(world._caller, path, cls, world._keeping.make)

    def number_of(listener: Listener) -> int:
        there = [held for held, _, _ in scenario._listeners if not held.removed]
        if listener.removed or listener not in there:
            raise CodecError(
                "a listener that was removed, or made by the world rather than by the scenario "
                "(self.listen), can't be kept"
            )
        return there.index(listener)

    def make_random(parts: list[Any]) -> random.Random:
        made = random.Random()  # noqa: S311 - it continues one that is reproducible on purpose
        made.setstate((parts[0], tuple(parts[1]), parts[2]))
        return made

    codec.register(
        _POPULATION,
        Population,
        lambda p: [p.name, p._timeout, p._record, None if p._members is None else list(p._members)],
        population,
    )
    codec.register(
        _ENVIRONMENT,
        EnvironmentProxy,
        lambda p: [p.path, *((None, None) if p._cls is None else _path_of(world, p._cls))],
        environment,
    )
    codec.register(
        _LISTENER,
        Listener,
        number_of,
        lambda number: scenario._listeners[number][0],
    )
    codec.register(_RANDOM, random.Random, lambda r: list(r.getstate()), make_random)
    return codec


def _path_of(world: World, cls: type) -> tuple[str, str | None]:
    path = world._loader.path_of(cls)
    if world._loader.is_installed(path):
        return path, None
    folder = import_path(cls)[1]
    return path, None if folder is None else str(folder)


def given(scenario: Scenario) -> dict[str, Any]:
    """What a scenario was made with, by attribute; it need not be kept while it is the same."""
    return {name: getattr(scenario, name) for name in _GIVEN}


def pack_scenario(scenario: Scenario, codec: Codec, was_given: dict[str, Any]) -> bytes:
    """What a scenario holds besides what it was made with.

    Raises:
        StateError: an attribute can't be written down; it is named.
    """
    state: Any = scenario.__getstate__()
    if not isinstance(state, dict):
        raise StateError(f"{type(scenario).__name__}.__getstate__ must give a dict")
    packed: dict[str, bytes] = {}
    for name, value in state.items():
        if name in _NEVER or (name in _GIVEN and value is was_given[name]):
            continue
        try:
            packed[name] = codec.pack(value)
        except CodecError as error:
            raise StateError(
                f"{type(scenario).__name__}.{name}: {error} (or leave it out by __getstate__)"
            ) from None
    return pack_plain(packed)


def unpack_scenario(scenario: Scenario, codec: Codec, data: bytes) -> None:
    """Give a new scenario what another held.

    Raises:
        CodecError: it can't be read.
    """
    state = {name: codec.unpack(value) for name, value in from_public(data).items()}
    restore = getattr(scenario, "__setstate__", None)
    if restore is not None:
        restore(state)
    else:
        vars(scenario).update(state)


def _listeners_of(scenario: Scenario) -> list[list[Any]]:
    """What the scenario listens to, with the names of its methods.

    Raises:
        StateError: a handler is none of its methods.
    """
    found = []
    for listener, handler, durable in scenario._listeners:
        if listener.removed:
            continue
        name = getattr(handler, "__name__", "")
        if getattr(handler, "__self__", None) is not scenario or not hasattr(scenario, name):
            raise StateError(
                f"{type(scenario).__name__} listens to {listener.event!r} with a function that is "
                "none of its methods, so that it could not be told of events after a crash"
            )
        found.append([listener.path, listener.event, name, listener.when, listener.below, durable])
    return found
