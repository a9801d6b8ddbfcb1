"""What processes that are forked by a nursery have in common."""

from __future__ import annotations

import os

import pytest

from populace.workers.forking import HASH_SEED, Nursery
from tests.conftest import ROOT


async def hashed(environment: dict[str, str] | None) -> int:
    """What the hash of a text is to a child of a new nursery."""
    nursery = Nursery("tests.populace.hashing", environment)
    try:
        child = await nursery.fork("child", "some text")
        said = int(await child.ready)
        assert await child.wait() == 0
        return said
    finally:
        await nursery.stop()


async def test_a_text_has_the_same_hash_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever nursery they are of; unless the user wants another."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(HASH_SEED, raising=False)
    first = await hashed(None)
    assert await hashed(None) == first
    assert await hashed(dict(os.environ)) == first
    monkeypatch.setenv(HASH_SEED, "17")
    assert await hashed(None) != first
