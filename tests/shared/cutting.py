"""A way to the broker that breaks when so many bytes have come through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

_STEP = 16 << 10


@dataclass
class Cutting:
    """What stands between a broker and its clients.

    Args:
        url: where clients find it.
    """

    url: str = ""
    left: float = float("inf")
    """Bytes from the broker after which the connection is cut, once."""
    cuts: int = 0

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_STEP):
            writer.write(data)
            await writer.drain()
            self.left -= len(data)
            if self.left <= 0:
                self.left = float("inf")
                self.cuts += 1
                return

    @staticmethod
    async def _up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_STEP):
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def cutting(broker: str) -> AsyncIterator[Cutting]:
    """Stand between a broker and its clients.

    Args:
        broker: its address.
    """
    host, _, port = broker.removeprefix("nats://").partition(":")
    between = Cutting()

    taken: set[asyncio.Task[None]] = set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            taken.add(task)
        there, here = await asyncio.open_connection(host, int(port))
        ways = [
            asyncio.ensure_future(between._down(there, writer)),
            asyncio.ensure_future(between._up(reader, here)),
        ]
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, here):
                end.transport.abort()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    between.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield between
    finally:
        server.close()
        for task in taken:
            task.cancel()
        await asyncio.wait(taken, timeout=5)
        await asyncio.sleep(0)  # what was aborted is closed by now
