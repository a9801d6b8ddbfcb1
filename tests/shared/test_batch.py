"""Columns of the data plane: what goes in comes out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec import Codec
from shared.errors import CodecError
from shared.messages import batch


@given(st.lists(st.integers(0, 1 << 40), max_size=50))
def test_columns_of_numbers(numbers: list[int]) -> None:
    assert list(batch.numbers(batch.column(numbers))) == numbers


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_runs_of_numbers_are_two(start: int, length: int) -> None:
    numbers = list(range(start, start + length))
    packed = batch.column(numbers)
    assert list(batch.numbers(packed)) == numbers
    if length:
        assert packed == [start, start + length]


values = st.one_of(st.text(max_size=5), st.sampled_from(["a", "b"]), st.integers(), st.none())


@given(st.lists(values, max_size=200))
def test_columns_of_values(listed: list[Any]) -> None:
    codec = Codec()
    packed = codec.unpack(codec.pack(batch.pack_values(listed)))
    column, found = batch.unpack_argument(packed, lambda text: text)
    assert column
    assert found == listed


def test_repeated_texts_travel_once() -> None:
    texts = [f"persona {i % 3}" * 50 for i in range(1000)]
    packed = batch.pack_values(texts)
    assert packed[0] == batch.REPEATED
    assert len(packed[1]) == 3
    held: dict[str, str] = {}
    _, found = batch.unpack_argument(packed, lambda text: held.setdefault(text, text))
    assert found == texts
    assert len({id(text) for text in found}) == 3
    assert batch.pack_values([f"{i}" for i in range(1000)])[0] == batch.COLUMN
    many = [f"{i % 70_000}" for i in range(140_000)]  # more than 16 bits can number
    assert batch.pack_values(many)[0] == batch.COLUMN


@pytest.mark.parametrize("packed", [[], [3, 1], [batch.REPEATED, ["a"], b"\1\0"], 7, None])
def test_arguments_of_another_shape(packed: Any) -> None:
    with pytest.raises(CodecError):
        batch.unpack_argument(packed, lambda text: text)
