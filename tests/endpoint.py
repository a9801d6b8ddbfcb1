"""An OpenAI-compatible endpoint of the tests' own, whose answers a test decides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web


class Endpoint:
    """Counts and keeps what it is asked."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.replies: list[Callable[[], web.StreamResponse]] = []
        """Taken one by one; then ``respond`` answers."""
        self.respond: Callable[[dict[str, Any]], web.StreamResponse] = lambda _: answer("hello")
        self.url = ""
        self.delay = 0.0
        self.under_way = self.most = 0
        """Requests under way at once: now, and at most so far."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.under_way -= 1
        if self.replies:
            return self.replies.pop(0)()
        return self.respond(body)


def answer(text: str, finish: str = "stop") -> web.Response:
    return web.json_response(
        {
            "choices": [{"message": {"content": text}, "finish_reason": finish}],
            "usage": {"prompt_tokens": 11, "completion_tokens": 3},
        }
    )


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Endpoint]:
    """An endpoint on a port of its own."""
    made = Endpoint()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()
