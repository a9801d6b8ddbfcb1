"""What is told of agents and environments to those who look, and what stored ones held."""

from __future__ import annotations

from typing import Any

import pytest

from populace import Environment
from populace._runtime.looking import shown_attributes, shown_memory, shown_view
from populace.environments import ChatRoom, Map
from shared.codec import Codec, readable
from shared.errors import CodecError


def viewed(view: Any) -> dict[str, Any]:
    class Shown(Environment):
        def view(self) -> Any:
            if isinstance(view, Exception):
                raise view
            return view

    return shown_view(Shown())


@pytest.mark.parametrize(
    ("view", "more"),
    [
        ({"kind": "none"}, {"why": ""}),
        ({"kind": "chat", "messages": [{"author": "a", "text": "b"}]}, {"left_out": 0}),
        ({"kind": "map", "width": 2, "height": 1, "places": {"a": [0, 1]}}, {"zones": {}}),
        ({"kind": "graph", "nodes": [["a", 1]], "edges": [["a", "a"]]}, {"posts": []}),
        ({"kind": "table", "columns": ["a"], "rows": [[1]]}, {}),
    ],
)
def test_views_as_they_are_documented(view: dict[str, Any], more: dict[str, Any]) -> None:
    found = viewed(view)
    assert found["kind"] == view["kind"]
    assert more.items() <= found.items()


@pytest.mark.parametrize(
    "view",
    [
        {"title": "x"},
        {"kind": "film"},
        {"kind": "chat", "left_out": "many"},
        {"kind": "map", "width": 0, "height": 1},
        {"kind": "graph", "nodes": ["a"]},
        {"kind": "table", "rows": [["x" * 3_000_000]]},
        KeyError("a"),
        None,
    ],
)
def test_views_that_cannot_be_shown(view: Any) -> None:
    found = viewed(view)
    assert found["kind"] == "none"
    assert found["why"]


def test_ready_made_views() -> None:
    room = ChatRoom("x")
    room.messages = [{"number": 1, "author": "a", "text": "y" * 5000, "round": 2}]
    room.count = 7
    found = shown_view(room)
    assert (found["kind"], found["left_out"]) == ("chat", 6)
    assert len(found["messages"][0]["text"]) == 2000
    town = Map(10, 5)
    town.places = {"a": [1.0, 2.0]}
    assert shown_view(town)["places"] == {"a": [1.0, 2.0]}


def test_long_values_are_cut() -> None:
    held = {
        "text": "x" * 10_000_000,
        "many": dict.fromkeys(map(str, range(100_000)), [0] * 1000),
        "_own": 1,
        "odd": object(),
        **{f"a{n}": n for n in range(300)},
    }
    found = shown_attributes(held)
    assert len(found) == 200
    by_name = {one.name: one for one in found}
    assert "_own" not in by_name
    assert all(len(one.text) <= 4000 for one in found)
    assert by_name["many"].type == "dict of 100,000"
    assert by_name["many"].cut > 0
    assert by_name["odd"].text.startswith("<object")
    assert shown_attributes(7)[0].text == "7"


def test_a_long_memory_is_cut() -> None:
    found = shown_memory([{"role": "user", "content": str(n)} for n in range(150)])
    assert found["memory_left_out"] == 50
    assert found["memory"][0]["content"] == "50"


def test_stored_values_are_read_without_their_classes() -> None:
    codec = Codec()
    value = {(1, 2): "x", "set": {1}, 3: [1 << 70], "nested": {frozenset({1}): (1, 2)}}
    assert readable(codec.pack(value)) == {
        "[1, 2]": "x",
        "set": [1],
        3: [str(1 << 70)],
        "nested": {"[1]": [1, 2]},
    }
    with pytest.raises(CodecError):
        readable(b"\xc1")
