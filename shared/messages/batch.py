"""The data plane's messages: batches of calls and answers in columns.

Each message is a msgpack array whose first item is its kind. Columns: ``positions`` and
``indexes`` are either ``[start, stop]`` with ``step`` understood as 1, or ``[[i, j, ...]]``
(one list); so a run of a million agents costs two integers.

=========  =================================================================================
kind       fields
=========  =================================================================================
CALLS      caller's inbox, rows ``[call, method, args, kwargs, indexes, options]``, costs,
           when it was sent
CANCEL     caller's inbox, call, positions (None: all)
FETCH      asker's inbox, ``[[asker's number, [caller's inbox, call, position], kept], ...]``
RECAP      caller's inbox, ``[[call, batches of it that came, bytes of it taken], ...]``
ANSWERS    shard, charge, rows ``[call, sequence, positions, values, errors, tokens]``
           (errors ``[[place, error], ...]``), when it was sent
DONE       groups ``[call, sequence, positions]``: done, kept where it was made
SUMMARY    groups ``[call, done, failed, tokens, mean so far, partial]`` (partial at the
           end), when it was sent
FETCHED    ``[[asker's number, outcome, packed value or error], ...]``
UNKNOWN    calls of a RECAP that never arrived
REFUSED    groups ``[call, error]``: nothing more will come of it
PROBE      see ``populace._runtime.cycles``
CREDIT     shard, cost of all this caller's calls that the shard has begun so far
TAKEN      caller's inbox, ``[[call or 0, bytes of its answers taken so far], ...]``
MEMBERS    shard, call, step (which population call), how many of its agents have finished it;
           to environments that apply their members' calls in agent order
PIECE      name of the whole, number of this piece, number of pieces, bytes
=========  =================================================================================

``args`` is ``[[form, value], ...]``: ``SHARED`` is one value for all, ``COLUMN`` has a value per
index, ``REPEATED`` is a column of texts of which many are equal: the different ones, and for
each index the number of its own, as bytes (16 bits each, little-endian). Options say what
becomes of the answers: kept, summarised, recorded. The rows of CALLS and ANSWERS are packed
each by itself, so that both sides know their sizes, which are what flow control counts (see
``populace._runtime.flow``), and one that can't be read harms no other. ``charge`` is the size of
those rows that answer single calls. Times are Unix time, for the profile.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from shared.errors import CodecError

(
    CALLS,
    CANCEL,
    FETCH,
    RECAP,
    ANSWERS,
    DONE,
    SUMMARY,
    FETCHED,
    UNKNOWN,
    PROBE,
    REFUSED,
    CREDIT,
    TAKEN,
    PIECE,
    MEMBERS,
) = range(1, 16)

SHARED, COLUMN, REPEATED = range(3)
"""Forms of an argument."""

OK, FAILED, GONE, ASK_CALLER = range(4)
"""Outcomes of a FETCH."""

_LENGTHS = {
    CALLS: 5,
    CANCEL: 4,
    FETCH: 3,
    RECAP: 3,
    ANSWERS: 5,
    DONE: 2,
    SUMMARY: 3,
    FETCHED: 2,
    UNKNOWN: 2,
    PROBE: 3,
    REFUSED: 2,
    CREDIT: 3,
    TAKEN: 3,
    PIECE: 5,
    MEMBERS: 5,
}


def check(message: Any) -> list[Any]:
    """The message, if it has the shape of one of ours.

    Raises:
        CodecError: it hasn't.
    """
    if (
        not isinstance(message, list)
        or not message
        or len(message) != _LENGTHS.get(message[0] if isinstance(message[0], int) else -1)
    ):
        raise CodecError("a message on the data plane has the wrong shape")
    return message


def span(start: int, stop: int) -> list[Any]:
    """The column of all whole numbers from start up to, and without, stop."""
    return [start, stop]


def column(numbers: Sequence[int]) -> list[Any]:
    """A column of whole numbers, as two of them when they are a run."""
    if isinstance(numbers, range) and numbers.step == 1:
        return [numbers.start, numbers.stop]
    count = len(numbers)
    if count and numbers[-1] - numbers[0] == count - 1:
        first = numbers[0]
        if list(numbers) == list(range(first, first + count)):
            return [first, first + count]
    return [list(numbers)]


def numbers(packed: Any) -> Sequence[int]:
    """The whole numbers of a column.

    Raises:
        CodecError: it isn't one.
    """
    if isinstance(packed, list):
        if len(packed) == 2 and type(packed[0]) is int and type(packed[1]) is int:
            return range(packed[0], packed[1])
        if len(packed) == 1 and isinstance(packed[0], list):
            return packed[0]
    raise CodecError("a column of numbers has the wrong shape")


def pack_values(values: Sequence[Any]) -> list[Any]:
    """An argument that has a value per index; texts that repeat travel once."""
    listed = list(values)
    if len(listed) > 1 and set(map(type, listed)) == {str}:
        places = {text: i for i, text in enumerate(dict.fromkeys(listed))}
        if len(places) <= min(len(listed) // 2, 1 << 16):
            codes = array("H", [places[text] for text in listed])
            if sys.byteorder == "big":
                codes.byteswap()
            return [REPEATED, list(places), codes.tobytes()]
    return [COLUMN, listed]


def unpack_argument(packed: Any, intern: Callable[[str], str]) -> tuple[bool, Any]:
    """Whether an argument has a value per index, and the value or values.

    Args:
        packed: one of ``args``.
        intern: gives the one copy of a repeated text that this process keeps.

    Raises:
        CodecError: it has another shape.
    """
    try:
        form = packed[0]
        if form == SHARED:
            return False, packed[1]
        if form == COLUMN:
            return True, packed[1]
        if form == REPEATED:
            texts = [intern(text) for text in packed[1]]
            codes = array("H", packed[2])
            if sys.byteorder == "big":
                codes.byteswap()
            return True, [texts[code] for code in codes]
    except (TypeError, ValueError, IndexError) as error:
        raise CodecError(f"an argument has the wrong shape: {error}") from None
    raise CodecError(f"an argument has the unknown form {form!r}")
