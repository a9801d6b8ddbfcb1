"""The ready-made environments: what each promises."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import populace
from populace import AgentError, Event, InvalidInputError
from populace.environments import (
    AttributeStore,
    Auction,
    ChatRoom,
    Group,
    Map,
    SocialGraph,
    Timeline,
)
from populace.world import World
from tests.conftest import wait_until


@pytest.fixture
async def world() -> Any:
    async with populace.local(seed=4) as made:
        yield made


async def events_of(world: World, environment: Any) -> list[tuple[str, dict[str, Any]]]:
    told: list[tuple[str, dict[str, Any]]] = []

    def take(event: Event) -> None:
        told.append((event.name, event.arguments))

    await world.listen(environment, "*", take)
    return told


async def fails(call: Any, reason: str) -> None:
    with pytest.raises(AgentError, match=reason):
        await call


async def test_attribute_store(world: World) -> None:
    store = await world.environment(AttributeStore, "prices", {"bread": 2.0})
    told = await events_of(world, store)
    await store.set("milk", 1.5)
    await store.set("milk", 1.5)  # no change, no event
    assert await store.increment("bread", 0.5) == 2.5
    assert await store.increment("eggs") == 1
    assert await store.compare_and_set("milk", 1.0, 9.0) is False
    assert await store.compare_and_set("milk", 1.5, 1.6) is True
    await store.update({"bread": 3.0, "tea": 4.0})
    assert await store.remove("eggs") is True
    assert await store.remove("eggs") is False
    assert await store.get("nothing") is None
    assert await store.get("nothing", 7) == 7
    assert await store.all() == {"bread": 3.0, "milk": 1.6, "tea": 4.0}
    await fails(store.increment("bread", "much"), "unsupported operand")
    await store.set("name", "x")
    await fails(store.increment("name"), "is 'x', not a number")
    fixed = await world.environment(AttributeStore, "fixed", {"a": 1}, fixed=True)
    await fails(fixed.set("b", 1), r"no attribute 'b' \(it has: a\)")
    await fails(fixed.update({"a": 2, "b": 1}), "no attribute 'b'")
    assert await fixed.get("a") == 1
    await wait_until(lambda: len(told) == 8)
    assert told[0] == ("changed", {"name": "milk", "old": None, "new": 1.5})
    assert told[-1] == ("changed", {"name": "name", "old": None, "new": "x"})


async def test_chat_room(world: World) -> None:
    room = await world.environment(ChatRoom, "room", "trains", keep=3, longest=50)
    told = await events_of(world, room)
    for name in ("ann", "bob", "cy"):
        assert await room.join(name) == name
    assert await room.post("hello @bob and @bob and @nobody", "ann") == 1
    await fails(room.post("hi", "dan"), "dan is not in room; join first")
    await fails(room.post("  ", "ann"), "an empty message")
    await fails(room.post("x" * 51, "ann"), "may have 50 characters, not 51")
    await fails(room.join("a b"), "can't be mentioned")
    assert [m["text"] for m in await room.read("bob")] == ["hello @bob and @bob and @nobody"]
    assert await room.read("bob") == []
    assert await room.readers(1) == ["ann", "bob"]
    for i in range(4):
        await room.post(f"message {i}", "cy")
    assert [m["number"] for m in await room.history()] == [3, 4, 5]
    assert [m["text"] for m in await room.history(1)] == ["message 3"]
    assert [m["number"] for m in await room.read("bob")] == [3, 4, 5]
    await room.leave("cy")
    assert await room.present() == ["ann", "bob"]
    await wait_until(lambda: told and told[-1][0] == "left")
    mentions = [arguments for name, arguments in told if name == "mentioned"]
    assert [(m["name"], m["author"], m["number"]) for m in mentions] == [("bob", "ann", 1)]


async def test_map(world: World) -> None:
    town = await world.environment(Map, "town", 100, 50)
    told = await events_of(world, town)
    await town.zone("market", 40, 10, 60, 30)
    await town.place(10, 10, "ann")
    await town.place(13, 14, "bob")
    await town.place(50, 20, "stall")
    assert await town.within(10, 10, 5) == [["ann", 0.0], ["bob", 5.0]]
    assert await town.near("ann", 4.9) == []
    assert await town.near("ann", 5) == [["bob", 5.0]]
    assert await town.nearest(49, 20, 1) == [["stall", 1.0]]
    assert await town.move(35, 10, "ann") == [45, 20]
    assert await town.move(0, 1000, "ann") == [45, 50]
    assert await town.in_zone("market") == ["stall"]
    assert await town.where("ann") == [45, 50]
    await fails(town.place(101, 0, "ann"), r"\(101, 0\) is outside of town, which is 100 by 50")
    await fails(town.where("dan"), "'dan' is not on town")
    await fails(town.in_zone("park"), "no zone 'park'")
    await town.remove("stall")
    assert await town.nearest(49, 20, 1) == [["ann", 30.265491900843113]]
    await wait_until(lambda: told and told[-1] == ("left", {"zone": "market", "name": "stall"}))
    crossings = [(n, a["name"]) for n, a in told if n in ("entered", "left")]
    assert crossings == [
        ("entered", "stall"),
        ("entered", "ann"),
        ("left", "ann"),
        ("left", "stall"),
    ]
    with pytest.raises(AgentError, match="a map needs an area"):
        await world.environment(Map, "line", 10, 0)


async def test_map_finds_what_a_search_through_all_finds(world: World) -> None:
    import math
    import random

    town = await world.environment(Map, "town", 1.0, 1.0)
    source = random.Random(1)
    places = {f"p{i}": (source.random(), source.random()) for i in range(300)}
    await asyncio.gather(*(town.place(x, y, name) for name, (x, y) in places.items()))
    for name in list(places)[:50]:
        places[name] = (source.random(), source.random())
        await town.place(*places[name], name)
    for _ in range(20):
        x, y, radius = source.random(), source.random(), source.random() / 4
        expected = {n for n, p in places.items() if math.dist(p, (x, y)) <= radius}
        assert {n for n, _ in await town.within(x, y, radius)} == expected


async def test_timeline(world: World) -> None:
    clock = await world.environment(Timeline, "clock")
    told = await events_of(world, clock)
    bell = await clock.plan("bell", 1.0, {"rings": 1}, every=2.0)
    await clock.plan("noon", 3.0)
    late = await clock.plan_in("late", 10.0)
    assert [row[:3] for row in await clock.upcoming()] == [
        [1.0, bell, "bell"],
        [3.0, bell + 1, "noon"],
        [10.0, late, "late"],
    ]
    assert await clock.advance(4.0) == 3
    assert await clock.call_off(bell) is True
    assert await clock.call_off(bell) is False
    assert await clock.next() == 1
    assert await clock.get("now") == 10.0
    assert await clock.next() == 0
    assert await clock.advance_by(2.5) == 0
    await fails(clock.advance(1.0), "can't go back from 12.5 to 1")
    await fails(clock.plan("past", 1.0), "it is 12.5 already")
    await fails(clock.plan("x", 20.0, every=0.0), "interval must be above 0")
    await wait_until(lambda: len(told) == 7)
    due = [(a["name"], a["at"]) for n, a in told if n == "due"]
    assert due == [("bell", 1.0), ("bell", 3.0), ("noon", 3.0), ("late", 10.0)]


async def test_open_auction(world: World) -> None:
    auction = await world.environment(Auction, "auction", step=5.0)
    told = await events_of(world, auction)
    await fails(auction.bid(1.0, "ann"), "nothing is for sale")
    await auction.opened("vase", 10.0)
    await fails(auction.opened("cup"), "'vase' is still for sale")
    low = await auction.bid(9.0, "ann")
    assert low == {"accepted": False, "reason": "9 does not reach 10", "needed": 10.0}
    assert (await auction.bid(10.0, "ann"))["accepted"]
    assert not (await auction.bid(14.0, "bob"))["accepted"]
    assert (await auction.bid(15.0, "bob"))["needed"] == 20.0
    await fails(auction.bid(30.0), "say who bids")
    assert await auction.standing() == {
        "item": "vase",
        "bids": 2,
        "leader": "bob",
        "price": 15.0,
        "needed": 20.0,
    }
    assert await auction.close() == {"item": "vase", "winner": "bob", "price": 15.0, "bids": 2}
    await auction.opened("cup", 100.0)
    assert (await auction.close())["winner"] is None
    await wait_until(lambda: len(told) == 6)
    assert [name for name, _ in told] == ["opened", "raised", "raised", "sold", "opened", "unsold"]


@pytest.mark.parametrize(("kind", "price"), [("sealed", 40.0), ("second_price", 25.0)])
async def test_sealed_bids(world: World, kind: str, price: float) -> None:
    auction = await world.environment(Auction, "auction", kind)
    await auction.opened("vase", 5.0)
    for bidder, amount in (("ann", 50.0), ("bob", 40.0), ("cy", 25.0), ("dan", 1.0), ("ann", 2.0)):
        assert await auction.bid(amount, bidder) == {"accepted": True, "reason": ""}
    assert await auction.standing() == {"item": "vase", "bids": 4}
    result = await auction.close()
    assert (result["winner"], result["price"]) == ("bob", price)
    await auction.opened("jug", 5.0)
    for bidder in ("cy", "ann"):
        await auction.bid(9.0, bidder)
    assert (await auction.close())["winner"] == "cy"  # of equal bids the earlier
    await auction.opened("cup", 5.0)
    await auction.bid(8.0, "ann")
    assert (await auction.close())["price"] == (5.0 if kind == "second_price" else 8.0)
    with pytest.raises(AgentError, match="no auction of kind 'dutch'"):
        await world.environment(Auction, "other", "dutch")


async def test_social_graph(world: World) -> None:
    net = await world.environment(SocialGraph, "net", keep=3)
    for name in ("ann", "bob", "cy"):
        await net.join(name)
    await net.follow("bob", "ann")
    await net.follow("cy", "ann")
    await net.follow("ann", "bob")
    await fails(net.follow("dan", "ann"), "'dan' is no member of net; join first")
    await fails(net.follow("ann", "ann"), "can't follow itself")
    first = await net.post("one", "bob")
    await net.post("two", "cy")
    assert await net.like(first, "ann") == 1
    assert await net.like(first, "ann") == 1
    assert [p["text"] for p in await net.feed(name="ann")] == ["two", "one"]
    assert [p["text"] for p in await net.feed(ranking="popular", name="ann")] == ["one", "two"]
    assert [p["text"] for p in await net.feed(ranking="mixed", name="ann")] == ["one", "two"]
    assert await net.feed(name="cy") == []
    assert await net.followers("ann") == ["bob"]
    assert await net.following("ann") == ["bob", "cy"]
    assert await net.unfollow("cy", "ann") is True
    assert await net.unfollow("cy", "ann") is False
    for i in range(3):
        await net.post(f"more {i}", "bob")
    await fails(net.like(first, "ann"), "no post 1")
    await fails(net.feed(ranking="best", name="ann"), "no ranking 'best'")
    members = [f"m{i}" for i in range(40)]
    assert await net.connect(members, "watts_strogatz", 4) == 160 + 2
    measures = await net.measures()
    assert (measures["members"], measures["links"], measures["posts"]) == (43, 162, 5)
    await fails(net.connect(["a"], "watts_strogatz"), "can't have 6 neighbours")
    await fails(net.connect(members, "random"), "no graph of kind 'random'")


async def test_groups(world: World) -> None:
    top = await world.environment(Group, "all", 2)
    groups = [await top.child(Group, f"g{i}", 3) for i in range(2)]
    told = await events_of(world, groups[0])
    arriving = [groups[0].arrive(v) for v in (1.0, None)]
    waiting = groups[0].summary(1)
    await asyncio.sleep(0.05)
    assert not any(call.done() for call in (*arriving, waiting))
    # Groups go on by themselves.
    assert await asyncio.gather(*(groups[1].arrive(v) for v in (4.0, 5.0, 6.0))) == [5.0] * 3
    assert await groups[1].report(7.0) == 2
    assert await groups[0].arrive(3.0) == 2.0
    assert await asyncio.gather(*arriving) == [2.0, 2.0]
    assert await waiting == {"path": "all.g0", "step": 1, "mean": 2.0, "count": 2}
    assert await groups[1].summary() == {"path": "all.g1", "step": 1, "mean": 5.0, "count": 3}
    assert await top.announce({"means": [2.0, 5.0]}) == 3
    assert await groups[1].latest() == {"means": [2.0, 5.0]}
    await wait_until(lambda: len(told) == 2)
    assert told == [
        ("complete", {"step": 1, "mean": 2.0, "count": 2}),
        ("announced", {"news": {"means": [2.0, 5.0]}}),
    ]
    with pytest.raises(AgentError, match="at least 1 member"):
        await top.child(Group, "none", 0)


@pytest.mark.parametrize("missing", ["rtree", "networkx"])
async def test_a_library_that_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        InvalidInputError, match=rf"needs {missing}: pip install 'populace\[worlds\]'"
    ):
        Map(1, 1) if missing == "rtree" else SocialGraph()


async def test_snapshots_and_back(world: World) -> None:
    from shared.codec import Codec

    codec = Codec()
    town, net = Map(10, 10), SocialGraph()
    town.place(1, 2, "a")
    net.join("a")
    net.join("b")
    net.follow("b", "a")
    for one, other in ((town, Map(1, 1)), (net, SocialGraph())):
        state = {k: v for k, v in one.snapshot().items() if not k.startswith("_")}
        other.restore(codec.unpack(codec.pack(state)))
    assert isinstance(other, SocialGraph)
    assert other.following("a") == ["b"]
