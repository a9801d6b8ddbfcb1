"""Every request that leaves for an endpoint is metered; endpoints that are away are waited for."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

import populace
from populace import Agent
from populace.models.backends import openai
from populace.models.backends.openai import OpenAIBackend
from populace.models.backends.scripted import ScriptedBackend
from populace.models.limits import OwnPace, RateLimiter
from populace.models.serving import NotWantedError, OwnCache, Serving
from populace.models.structured import fit
from shared.messages.model import ModelRequest, ModelResponse, Terms
from shared.messages.scenario import Limits, MemorySpec, ModelSpec
from tests.endpoint import Endpoint, answer


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_PAUSE", 0.01)


def prompt(text: str = "hi", **more: Any) -> ModelRequest:
    return ModelRequest(1, (7, "p", 3, 1, 0), [{"role": "user", "content": text}], **more)


async def serving_of(endpoint: Endpoint, per_minute: float) -> Serving:
    spec = ModelSpec(
        backend="openai",
        base_url=endpoint.url,
        model="m",
        limits=Limits(requests_per_minute=per_minute),
    )
    backend = OpenAIBackend(endpoint.url, "m")
    await backend.start()

    async def no_budget(run: str, budget: dict[str, Any]) -> Any:
        raise AssertionError

    assert spec.limits is not None
    return Serving(backend, spec, RateLimiter(spec.limits, OwnPace()), OwnCache(), no_budget)


async def test_retries_and_repairs_wait_for_their_turns(endpoint: Endpoint) -> None:
    times: list[float] = []

    def respond(body: dict[str, Any]) -> web.Response:
        times.append(time.monotonic())
        if len(times) in (1, 2):
            return web.Response(status=500)
        return answer("no JSON" if len(times) == 3 else "{}")

    endpoint.respond = respond
    one = await serving_of(endpoint, 300)
    began = time.monotonic()
    response = await one.serve(prompt(schema={"type": "object"}), "r", Terms())
    assert response.data == {}
    assert response.details["attempts"] == 4
    assert times[3] - began > 3 * 0.2 * 0.95
    await one.backend.close()


async def test_what_is_not_wanted_any_more_is_not_tried_again(endpoint: Endpoint) -> None:
    one = await serving_of(endpoint, 6000)
    endpoint.respond = lambda _: web.Response(status=500)
    with pytest.raises(NotWantedError):
        await one.serve(prompt(), "r", Terms(), lambda paid: len(endpoint.requests) < 2)
    assert len(endpoint.requests) == 2
    await one.backend.close()


@pytest.mark.parametrize(
    "status", [503, *(pytest.param(s, marks=pytest.mark.slow) for s in (502, 504))]
)
async def test_a_gateway_without_a_server_is_waited_for(endpoint: Endpoint, status: int) -> None:
    """As an endpoint that can't be reached is: a server that loads a model takes its time."""
    backend = OpenAIBackend(endpoint.url, "m", patience=30)
    await backend.start()
    until = time.monotonic() + 1.5

    def respond(_: Any) -> web.Response:
        return web.Response(status=status) if time.monotonic() < until else answer("there")

    endpoint.respond = respond
    responses = await asyncio.gather(*(backend.answer(prompt(str(i))) for i in range(40)))
    assert {r.text for r in responses} == {"there"}
    assert backend.endpoints[0].down_for == 0
    await backend.close()


async def test_who_asks_for_less_is_there(endpoint: Endpoint) -> None:
    backend = OpenAIBackend(endpoint.url, "m")
    await backend.start()
    endpoint.replies = [lambda: web.Response(status=429)]
    assert (await backend.check())["answering"] == 1
    await backend.close()


async def test_content_in_parts(endpoint: Endpoint) -> None:
    backend = OpenAIBackend(endpoint.url, "m")
    await backend.start()
    parts = [{"type": "text", "text": "one "}, {"type": "image"}, {"type": "text", "text": "two"}]
    choice = {"message": {"content": parts}, "finish_reason": "stop"}
    endpoint.replies = [lambda: web.json_response({"choices": [choice]})]
    assert (await backend.answer(prompt())).text == "one two"
    await backend.close()


SCHEMAS: list[dict[str, Any]] = [
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"type": "number", "minimum": 500},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    {"type": "number", "maximum": -7},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "string"}}}], "required": ["a"]},
    {
        "type": "object",
        "properties": {"who": {"$ref": "#/$defs/Who"}, "all": {"type": "array", "items": {}}},
        "required": ["who", "all"],
        "$defs": {
            "Who": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name", "age"],
            }
        },
    },
]


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_scripts_fill_what_pydantic_writes(schema: dict[str, Any]) -> None:
    backend = ScriptedBackend(ModelSpec(backend="scripted"))
    found = fit(await backend.answer(prompt(schema=schema)), schema)
    assert found.error_kind == "", (found.error, found.text)


class Talker(Agent):
    async def talk(self, times: int) -> int:
        """Turns that overlap, all remembered; gives how long the memory is then."""
        await asyncio.gather(*(self.turn(i) for i in range(times)))
        return len(self.memory)

    async def turn(self, number: int) -> None:
        await self.model.ask(f"Turn {number}: " + "tell me more. " * 20, remember=True)


async def test_what_is_remembered_while_a_memory_is_summed_up_stays(endpoint: Endpoint) -> None:
    endpoint.delay = 0.02
    endpoint.respond = lambda body: answer(
        "a summary" if "Sum up" in body["messages"][-1]["content"] else "so it goes. " * 20
    )
    spec = ModelSpec(
        backend="openai",
        base_url=endpoint.url,
        model="m",
        memory=MemorySpec(policy="summary", tokens=200),
    )
    async with populace.local(models={"default": spec}) as world:
        talker = Talker().to_dist(world)
        assert await talker.talk(6) == 12
        await talker.talk(6)
        told = [b["messages"][-1]["content"] for b in endpoint.requests]
        summed = [t for t in told if t.startswith("Sum up")]
        assert summed
        assert all("Turn" in t for t in summed)  # never of nothing
        memory = await talker.talk(0)
    assert memory >= 12  # the second six turns at least, whoever summed up meanwhile


async def test_a_kept_answer_is_the_askers_own() -> None:
    cache = OwnCache()
    await cache.put("k", ModelResponse(1, data={"a": [1]}))
    first = await cache.get("k")
    assert first is not None
    first.data["a"].append(2)
    again = await cache.get("k")
    assert again is not None
    assert again.data == {"a": [1]}
