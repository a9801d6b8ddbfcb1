"""Agents that find others by name, on whatever worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import populace
from populace import AgentError
from populace.directory import Directory, shard_sizes
from tests.populace.sample import Friend, Voter


@given(st.integers(1, 500), st.integers(1, 40))
def test_every_agent_is_found_in_its_shard(count: int, shards: int) -> None:
    shards = min(shards, count)
    sizes = shard_sizes(count, shards)
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    directory = Directory(None)  # type: ignore[arg-type]
    directory.learn({"p": (count, shards)})
    found = [directory.proxy("p", number) for number in range(count)]
    expected = [(f"p-{s}", i) for s, size in enumerate(sizes) for i in range(size)]
    assert [(p._shard, p._index) for p in found] == expected


async def test_agents_call_agents_by_name(world: populace.World) -> None:
    friends = await world.population(Friend, count=7)
    assert list(await friends.greet()) == [f"friend/{(i + 1) % 7}" for i in range(7)]
    others = await world.population(Friend, step=2, count=3, name="others")
    assert list(await others.greet()) == ["others/2", "others/0", "others/1"]
    names = [f"friend/{i}" for i in range(7)] + ["others/2"]
    # Those that were there first know the later ones too, and agents know themselves.
    assert await friends[3].visit(names) == names
    assert await others[2].visit(names) == names
    assert await friends[0].hop(9) == [f"friend/{i % 7}" for i in range(10)]


async def test_names_that_lead_nowhere(world: populace.World) -> None:
    friends = await world.population(Friend, count=4)
    await world.population(Voter, count=2)
    for name, reason in (
        ("friend/4", "friend has agents 0 to 3, not 4"),
        ("nobody/1", r"no population named 'nobody' in this run \(there are: friend, voter\)"),
        ("single/0", "reached by a proxy that is passed to them"),
        ("friend", "named by its population and number, as in 'voter/17', not 'friend'"),
    ):
        with pytest.raises(AgentError, match=reason) as caught:
            await friends[1].visit([name])
        assert caught.value.kind == "LookupError"


async def test_isolated_agents_find_others(distributed: populace.World) -> None:
    await distributed.population(Friend, count=5)
    alone = await distributed.population(Friend, count=3, name="alone", isolated=True)
    assert list(await alone.greet()) == ["alone/1", "alone/2", "alone/0"]
    assert await alone[1].visit(["friend/4", "alone/1", "alone/2"]) == [
        "friend/4",
        "alone/1",
        "alone/2",
    ]
