"""A connection that breaks while a stream is read: nothing is left out, nothing comes twice."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus import NatsBus, StreamSpec
from tests.conftest import Broker, unique
from tests.shared.cutting import cutting

_SIZE, _COUNT = 20_000, 200


@pytest.mark.parametrize("cut", [500_000, 1_234_567, 2_600_000])
async def test_nothing_is_left_out(broker: Broker, cut: int) -> None:
    direct = await NatsBus.connect(broker.settings(), broker.url)
    name = unique("st")
    await direct.ensure_stream(StreamSpec(name, (f"{name}.>",)))
    for number in range(_COUNT):
        await direct.append(f"{name}.a", str(number).encode().ljust(_SIZE))
    async with cutting(broker.url) as between:
        bus = await NatsBus.connect(broker.settings(), between.url)
        between.left = cut
        read = [int(m.data) async for m in bus.read(name, (f"{name}.a",))]
        assert (between.cuts, read) == (1, list(range(_COUNT)))
        between.left = cut
        followed: list[int] = []
        async with asyncio.timeout(30):
            async for message in bus.replay(name, (f"{name}.a",), idle=0.1):
                if message is not None:
                    followed.append(int(message.data))
                if len(followed) >= _COUNT:
                    break
        assert (between.cuts, followed) == (2, list(range(_COUNT)))
        await bus.drain()
    await direct.drain()
