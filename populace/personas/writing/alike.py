"""Texts that are nearly the same, found by MinHash and locality-sensitive hashing (datasketch).

Similarity is that of Jaccard between sets of shingles: three words in a row, or five characters
where a language writes no spaces (Broder, "On the resemblance and containment of documents", 1997).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORDS, _CHARACTERS = 3, 5
_PERMUTATIONS = 64
_SUREST = 0.9  # above it, too few bands are left to find anything
_SPACED = re.compile(r"[^\W_]+", re.UNICODE)
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")


def shingles(text: str) -> set[bytes]:
    """The pieces of which a text consists."""
    low = text.lower()
    if len(_UNSPACED.findall(low)) > len(low) // 3:
        joined = "".join(_SPACED.findall(low))
        last = max(1, len(joined) - _CHARACTERS + 1)
        return {joined[i : i + _CHARACTERS].encode() for i in range(last)}
    words = _SPACED.findall(low)
    last = max(1, len(words) - _WORDS + 1)
    return {" ".join(words[i : i + _WORDS]).encode() for i in range(last)}


def similarity(one: str, other: str) -> float:
    """Jaccard similarity of two texts, 0 to 1."""
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def alike(texts: Iterable[tuple[int, str]], threshold: float) -> dict[int, int]:
    """Which texts are nearly the same as an earlier one.

    Args:
        texts: number and text of each.
        threshold: similarity, 0 to 1, from which two count as nearly the same. Candidates come
            from MinHash; each is then compared exactly, so none below the threshold is reported,
            while a pair just above it may be missed.

    Returns:
        The number of each such text, to the number of the earlier one.
    """
    from datasketch import MinHash, MinHashLSH

    listed = list(texts)
    pieces = [shingles(text) for _, text in listed]
    index = MinHashLSH(threshold=min(threshold, _SUREST), num_perm=_PERMUTATIONS)
    found: dict[int, int] = {}
    hashes = MinHash.generator(pieces, num_perm=_PERMUTATIONS)
    for place, sketch in enumerate(hashes):
        for other in sorted(index.query(sketch)):
            shared = len(pieces[place] & pieces[other])
            if shared / len(pieces[place] | pieces[other]) >= threshold:
                found[listed[place][0]] = listed[other][0]
                break
        else:
            index.insert(place, sketch)
    return found
