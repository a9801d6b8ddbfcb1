"""The codec: what goes in comes out, and what must not come in stays out."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import enum
import math
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from shared.code import CodeLoader, LocalLoader
from shared.codec import Codec, from_public, is_json, pack_plain, plain, to_json
from shared.errors import CodecError


class Colour(enum.Enum):
    RED = "red"


class Point(BaseModel):
    x: float
    tags: list[str] = []


@dataclasses.dataclass
class Pair:
    left: int
    right: tuple[int, ...]


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.datetimes(timezones=st.just(dt.UTC))
    | st.dates()
    | st.timedeltas()
)
hashable = st.integers() | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**63), inner)
        | st.sets(hashable)
        | st.frozensets(hashable)
    ),
    max_leaves=20,
)


@given(values)
def test_what_goes_in_comes_out(value: object) -> None:
    codec = Codec()
    back = codec.unpack(codec.pack(value))
    assert back == value
    assert type(back) is type(value)


def test_equal_sets_are_equal_bytes() -> None:
    """Though they are gone through in another order, as those are whose elements collide."""
    codec = Codec()
    one: set[Any] = {0}
    other: set[Any] = {8}
    one.add(8)
    other.add(0)
    assert one == other
    assert list(one) != list(other)
    for value in ("x", b"y", (1, 2)):  # of whatever kinds
        one.add(value)
        other.add(value)
    assert codec.pack(one) == codec.pack(other)
    assert codec.pack(frozenset(one)) == codec.pack(frozenset(other))
    assert codec.unpack(codec.pack(one)) == one


def test_nan_and_infinities_travel() -> None:
    codec = Codec()
    back = codec.unpack(codec.pack([math.nan, math.inf, -math.inf]))
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "value", [Colour.RED, Point(x=1.5, tags=["a"]), Pair(1, (2, 3)), [Point(x=2), (Colour.RED,)]]
)
def test_objects_travel_by_import_path(value: object) -> None:
    codec = Codec(LocalLoader())
    assert codec.unpack(codec.pack(value)) == value


def test_objects_of_forbidden_modules_are_refused() -> None:
    packed = Codec(LocalLoader()).pack(Point(x=1))
    strict = Codec(CodeLoader(("populace",), ()))
    with pytest.raises(CodecError, match="may not be loaded"):
        strict.unpack(packed)


def test_a_path_to_something_else_is_refused() -> None:
    codec = Codec(CodeLoader(("os",), ()))
    import msgpack

    packed = msgpack.packb(
        msgpack.ExtType(7, msgpack.packb(["os:system", {"command": "touch /tmp/pwned"}]))
    )
    with pytest.raises(CodecError, match="not a pydantic model"):
        codec.unpack(packed)


@pytest.mark.parametrize("value", [object(), lambda: 1, os, {1: object()}])
def test_what_cannot_travel_is_named(value: object) -> None:
    with pytest.raises(CodecError, match="can't be sent"):
        Codec().pack(value)


def test_a_class_in_a_function_cannot_travel_between_processes() -> None:
    class Inner(BaseModel):
        x: int

    with pytest.raises(CodecError, match="inside a function"):
        Codec(CodeLoader((), ())).pack(Inner(x=1))


def test_endless_nesting_is_an_error() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CodecError):
        Codec().pack(loop)


@given(st.binary(max_size=64))
def test_noise_never_raises_anything_else(data: bytes) -> None:
    with contextlib.suppress(CodecError):
        Codec().unpack(data)


def test_registered_types() -> None:
    class Thing:
        def __init__(self, n: int) -> None:
            self.n = n

    codec = Codec()
    codec.register(40, Thing, lambda t: t.n, Thing)
    (back,) = codec.unpack(codec.pack([Thing(3)]))
    assert back.n == 3
    with pytest.raises(ValueError, match="taken"):
        codec.register(40, Colour, str, str)


def test_public_messages_are_json_or_msgpack() -> None:
    value = {"a": [1, 2.5, None, "x"]}
    assert from_public(to_json(value)) == value
    assert from_public(pack_plain(value)) == value
    assert from_public(to_json(value), "application/json; charset=utf-8") == value
    assert is_json(b'  {"a": 1}')
    assert not is_json(pack_plain(value))
    with pytest.raises(CodecError, match="JSON"):
        from_public(b"{broken")


def test_json_has_no_nan() -> None:
    assert to_json({"x": [math.nan, 1.0]}) == b'{"x":[null,1.0]}'


def test_plain_is_what_json_knows() -> None:
    value = {1: (Point(x=1), {3, 1}), "d": Pair(1, (2,)), "e": Colour.RED, "b": b"x"}
    assert plain(value) == {
        "1": [{"x": 1.0, "tags": []}, [1, 3]],
        "d": {"left": 1, "right": [2]},
        "e": "red",
        "b": "x",
    }
