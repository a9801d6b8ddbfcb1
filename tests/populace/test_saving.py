"""What agents, environments and scenarios hold, written down and taken up again."""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import populace
from populace import Agent, Environment, Scenario, commits, readonly
from populace._runtime.saving import _column, _columns
from populace.commits import pack_scenario, state_codec, unpack_scenario
from populace.errors import StateError
from populace.scenario import NoParams
from populace.world import World
from shared.bus import MemoryBroker
from shared.codec import Codec
from shared.messages import batch


@dataclasses.dataclass
class Card:
    suit: str
    value: int


class Holder(Agent):
    """Holds all kinds of things."""

    def __init__(self, what: Any = None) -> None:
        self.what = what
        self.friends: list[Any] = []

    def keep(self, what: Any) -> None:
        self.what = what

    def meet(self, friend: Any) -> None:
        self.friends.append(friend)

    def remember(self) -> None:
        self.memory.add_user(f"I am {self.number}")

    def tell(self) -> list[Any]:
        return [self.what, len(self.memory)]

    def grow(self) -> None:
        setattr(self, f"own_{self.number}", self.number)

    def names(self) -> list[str]:
        return sorted(vars(self))

    async def ask_friend(self) -> Any:
        return (await self.friends[0].tell())[0]

    def draw(self) -> float:
        return self.random.random()


class Careful(Agent):
    """Chooses what is kept."""

    def __init__(self) -> None:
        self.handle = object()
        self.count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.handle = object()
        self.count = state["count"]

    def add(self) -> int:
        assert self.handle is not None
        self.count += 1
        return self.count


class Slotted(Agent):
    """Keeps what it has in a slot."""

    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = 1
        self.y = 2

    def add(self) -> int:
        self.x += 1
        return self.x


class CarefulToo(Careful):
    """Inherits what is kept."""


class Shelf(Environment):
    def __init__(self) -> None:
        self.books: dict[str, int] = {}

    def put(self, name: str) -> int:
        self.books[name] = self.books.get(name, 0) + 1
        return self.books[name]

    @readonly
    def look(self) -> dict[str, int]:
        return self.books


VALUES = [
    None,
    7,
    2**80,
    1.5,
    "text",
    [1, "a", None],
    {"a": [1]},
    (1, 2),
    {3, 4},
    dt.date(2026, 1, 2),
    Card("spades", 3),
]


@pytest.mark.parametrize("workers", [1, 3])
async def test_agents_are_as_they_were(workers: int) -> None:
    broker = MemoryBroker()
    async with populace.local(broker=broker, workers=2, seed=5) as world:
        people = await world.population(Holder, populace.each(VALUES), count=len(VALUES))
        await people[3].remember()
        await people[2].meet(people[5])
        single = Holder("alone").to_dist(world)
        await single.meet(people[1])
        await world.save(1)
        kept = world.kept()
        run = world.run
    async with populace.local(broker=broker, run=run, workers=workers, seed=5) as again:
        await again.take_up(kept)
        back = again._made["holder"].population
        told = await back.tell()
        assert [what for what, _ in told] == VALUES
        assert [length for _, length in told] == [int(i == 3) for i in range(len(VALUES))]
        assert await back[2].ask_friend() == VALUES[5]
        shard = next(s for s in kept["singles"][0] if s in kept["parts"])
        one = populace.AgentProxy(again._caller, shard, 0, "single/0", Holder)
        assert await one.tell() == ["alone", 0]
        assert await one.ask_friend() == VALUES[1]


async def test_agents_that_differ_in_their_attributes() -> None:
    broker = MemoryBroker()
    async with populace.local(broker=broker, workers=2, seed=5) as world:
        people = await world.population(Holder, count=6)
        await people[4].grow()
        before = await people.names()
        await world.save(0)
        kept, run = world.kept(), world.run
    async with populace.local(broker=broker, run=run, workers=1, seed=5) as again:
        await again.take_up(kept)
        assert list(await again._made["holder"].population.names()) == list(before)


async def test_only_what_has_changed_is_written() -> None:
    broker = MemoryBroker()
    async with populace.local(broker=broker, workers=2, seed=5) as world:
        still = await world.population(Holder, 1, count=4, name="still")
        busy = await world.population(Holder, 2, count=4, name="busy")
        await world.save(0)
        before = dict(world._parts)
        await busy[0].keep(9)
        await world.save(1)
        changed = {name for name, part in world._parts.items() if part != before[name]}
        assert changed == {"busy-0"}
        assert {name for name, _ in world.replaced()} == {"busy-0"}
        kept, run = world.kept(), world.run
        assert (await still.tell()).values[0] == [1, 0]
    async with populace.local(broker=broker, run=run, workers=2, seed=5) as again:
        await again.take_up(kept)
        assert [w for w, _ in await again._made["busy"].population.tell()] == [9, 2, 2, 2]
        assert [w for w, _ in await again._made["still"].population.tell()] == [1] * 4


async def test_random_numbers_go_on_by_round() -> None:
    """A round's numbers follow from seed, agent and round, whoever was restored before it."""
    broker = MemoryBroker()
    async with populace.local(broker=broker, workers=2, seed=5) as world:
        people = await world.population(Holder, count=5)
        world._caller.round = 1
        await people.draw()
        await world.save(1)
        kept, run = world.kept(), world.run
        world._caller.round = 2
        second = list(await people.draw())
    async with populace.local(broker=broker, run=run, workers=3, seed=5) as again:
        await again.take_up(kept)
        again._caller.round = 2
        assert list(await again._made["holder"].population.draw()) == second


@pytest.mark.parametrize("cls", [Careful, CarefulToo, Slotted])
async def test_hooks_and_slots(cls: type[Any]) -> None:
    broker = MemoryBroker()
    async with populace.local(broker=broker, workers=1, seed=5) as world:
        people = await world.population(cls, count=3, name="people")
        first = list(await people.add())
        await world.save(0)
        kept, run = world.kept(), world.run
    async with populace.local(broker=broker, run=run, workers=1, seed=5) as again:
        await again.take_up(kept)
        back = again._made["people"].population
        assert list(await back.add()) == [number + 1 for number in first]


async def test_what_cannot_be_kept_is_named() -> None:
    async with populace.local(workers=1, seed=5) as world:
        await world.population(Holder, count=3)
        await world.save(0)
        shard = world._local[0]._shards["holder-0"]
        shard.agents[1].what = object()
        shard.changed = True
        with pytest.raises(StateError, match=r"Holder\.what of holder/1: a value of type .*object"):
            await world.save(1)


async def test_environments_are_as_they_were() -> None:
    broker = MemoryBroker()
    async with populace.local(broker=broker, workers=1, seed=5) as world:
        shelf = await world.environment(Shelf, "hall")
        inner = await shelf.child(Shelf, "shelf")
        assert await inner.put("a") == 1
        await shelf.put("x")
        await world.save(0)
        kept, run = world.kept(), world.run
        await shelf.put("later")
    async with populace.local(broker=broker, run=run, workers=1, seed=5) as again:
        await again.take_up(kept)
        proxies = again._local[0].directory
        assert await proxies.environment("hall").look() == {"x": 1}
        assert await proxies.environment("hall.shelf").put("a") == 2
        with pytest.raises(populace.InvalidInputError, match="is an environment at 'hall' already"):
            await again.environment(Shelf, "hall")


class Play(Scenario):
    async def setup(self) -> None:
        self.people = await self.population(Holder, count=4)
        self.shelf = await self.environment(Shelf, "hall")
        self.history = [1, (2, 3)]
        self.groups = 3  # given by the file, and changed
        removed = await self.listen(self.shelf, "*", self.hear)
        await removed.remove()
        self.dice = random.Random(4)
        self.heard: list[int] = []
        self.listener = await self.listen(self.shelf, "*", self.hear)

    def hear(self, event: Any) -> None:
        self.heard.append(event.number)

    async def round(self, n: int) -> None:
        pass


def made(world: World) -> Play:
    return Play(world, params=NoParams(), seed=5, rounds=2, agents=4)


async def test_scenarios_are_as_they_were() -> None:
    broker = MemoryBroker()
    async with populace.local(broker=broker, workers=2, seed=5) as world:
        play = made(world)
        before = commits.given(play)
        await play.setup()
        play.random.random()
        play.dice.random()
        await world.save(0)
        data = pack_scenario(play, state_codec(world, play), before)
        expected = play.random.random(), play.dice.random()
        kept, run = world.kept(), world.run
    async with populace.local(broker=broker, run=run, workers=1, seed=5) as again:
        await again.take_up(kept)
        other = made(again)
        await other.listen("hall", "*", other.hear)
        unpack_scenario(other, state_codec(again, other), data)
        assert (other.random.random(), other.dice.random()) == expected
        assert other.history == [1, (2, 3)]
        assert (other.groups, other.rounds) == (3, 2)
        assert other.people.count == 4
        assert [w for w, _ in await other.people.tell()] == [None] * 4
        assert await other.shelf.put("b") == 1
        assert other.listener is other._listeners[0][0]


async def test_a_scenario_that_holds_what_cannot_be_kept() -> None:
    async with populace.local(workers=1, seed=5) as world:
        play = made(world)
        before = commits.given(play)
        await play.setup()
        play.file = object()  # type: ignore[attr-defined]
        with pytest.raises(StateError, match=r"Play\.file: a value of type builtins\.object"):
            pack_scenario(play, state_codec(world, play), before)


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.integers(0, 5), max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(plain, min_size=1, max_size=20))
def test_columns_keep_values_and_their_types(values: list[Any]) -> None:
    codec = Codec()
    by_agent, found = batch.unpack_argument(codec.unpack(codec.pack(_column(values))), str)
    found = found if by_agent else [found] * len(values)
    assert found == values
    assert list(map(type, found)) == list(map(type, values))


def test_columns_are_for_agents_that_are_alike() -> None:
    one, two = Holder(1), Holder(2)
    assert _columns([one, two]) is not None
    two.more = 1  # type: ignore[attr-defined]
    assert _columns([one, two]) is None
    assert _columns([one, Careful()]) is None
    assert _columns([one, None]) is None
    assert _columns([]) is None


async def test_a_listener_that_the_world_made_is_named() -> None:
    async with populace.local(workers=1, seed=5) as world:
        play = made(world)
        before = commits.given(play)
        await play.setup()
        play.other = await world.listen("hall", "*", print)  # type: ignore[attr-defined]
        with pytest.raises(StateError, match=r"Play\.other: a listener that was removed, or made"):
            pack_scenario(play, state_codec(world, play), before)
