"""A model for benchmarks that kill things: answers from the prompt alone, notes each request."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web


@dataclass
class Asked:
    """One request: what was asked, when it came, and when it was answered."""

    prompt: str
    began: float
    ended: float = float("inf")


class CountingModel:
    """An OpenAI-compatible endpoint.

    Args:
        delay: seconds until each answer.
    """

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.requests: list[Asked] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one prompt."""
        body = await request.json()
        prompt = json.dumps([body["messages"], body["seed"]])
        asked = Asked(prompt, time.monotonic())
        self.requests.append(asked)
        try:
            await asyncio.sleep(self.delay)
        finally:
            asked.ended = time.monotonic()
        text = hashlib.blake2b(prompt.encode(), digest_size=4).hexdigest()
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": 3}
        return web.json_response({"choices": [choice], "usage": usage})


@contextlib.asynccontextmanager
async def counting_model(delay: float) -> AsyncIterator[CountingModel]:
    """Serve one on a port of its own."""
    made = CountingModel(delay)
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
