"""An HTTP server that answers every chat request with the same words, after a fixed time.

python -m benchmarks.null_server [SECONDS]   (prints its port)
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

_BODY = json.dumps(
    {
        "choices": [{"message": {"content": "My number is 33."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 60, "completion_tokens": 6},
    }
).encode()
_ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_BODY)
) + _BODY


LATENCY = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0


class Null(asyncio.Protocol):
    """Reads whole requests by their Content-Length, and answers each."""

    def __init__(self) -> None:
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Someone has come."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Something was said."""
        self._read += data
        while True:
            end = self._read.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._read[:end].lower()
            place = head.find(b"content-length:")
            length = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            if len(self._read) < end + 4 + length:
                return
            self._read = self._read[end + 4 + length :]
            if LATENCY:
                asyncio.get_running_loop().call_later(LATENCY, self._answer)
            else:
                self._answer()

    def _answer(self) -> None:
        self._transport.write(_ANSWER)  # type: ignore[attr-defined]


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Null, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until the parent is gone


if __name__ == "__main__":
    uvloop.run(main())
