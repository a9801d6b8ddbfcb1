"""Models: prompts in, answers or typed failures out; against a real HTTP server of the test's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from pydantic import BaseModel

import populace
from populace import Agent, InvalidInputError, ModelFailure, ModelSpec, ScriptSpec
from populace.models.backends import make_backend, openai
from populace.models.backends.openai import OpenAIBackend, api_key
from populace.models.structured import fit
from shared.errors import PopulaceError
from shared.messages.model import ModelRequest, ModelResponse, pool_name
from shared.settings import Settings
from tests.endpoint import Endpoint, answer

SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "number"}},
    "required": ["number"],
}


@pytest.fixture
async def backend(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OpenAIBackend]:
    monkeypatch.setattr(openai, "_PAUSE", 0.01)
    made = OpenAIBackend(endpoint.url, "m", key="s3cret", timeout=2)
    await made.start()
    yield made
    await made.close()


def prompt(**more: Any) -> ModelRequest:
    return ModelRequest(1, (7, "p", 3, 1, 0), [{"role": "user", "content": "hi"}], **more)


async def test_what_is_sent_and_what_comes_back(endpoint: Endpoint, backend: OpenAIBackend) -> None:
    response = await backend.answer(prompt(temperature=0.5, max_tokens=9, schema=SCHEMA))
    sent = endpoint.requests[0]
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("m", 0.5, 9)
    assert sent["messages"] == [{"role": "user", "content": "hi"}]
    assert sent["response_format"]["json_schema"]["schema"] == SCHEMA
    assert sent["seed"] == prompt().draw
    assert endpoint.headers[0]["Authorization"] == "Bearer s3cret"
    assert response.text == "hello"
    assert (response.tokens_in, response.tokens_out, response.backend) == (11, 3, "openai:m")


async def test_passing_faults_are_tried_again(endpoint: Endpoint, backend: OpenAIBackend) -> None:
    endpoint.replies = [
        lambda: web.Response(status=429, headers={"Retry-After": "0.01"}),
        lambda: web.Response(status=503),
        lambda: answer("at last"),
    ]
    response = await backend.answer(prompt())
    assert response.text == "at last"
    assert response.details == {"attempts": 3}
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize(
    ("reply", "kind", "text", "tries"),
    [
        (lambda: web.Response(status=400, text="bad prompt"), "refused", "400 .*bad prompt", 1),
        (lambda: web.Response(status=401, text="key s3cret?"), "refused", r"key \*\*\*\?", 1),
        (lambda: web.Response(status=500, text="oops"), "unreachable", "500 .*oops", 5),
        (lambda: web.Response(status=429, text="slow"), "rate_limit", "429 .*slow", 10),
        (lambda: web.Response(text="no json"), "refused", "something else than JSON", 5),
        (lambda: web.json_response({"x": 1}), "refused", "without a choice", 5),
        (
            lambda: web.Response(status=400, text="maximum context length is 512 tokens"),
            "context",
            "512 tokens",
            1,
        ),
    ],
)
async def test_refusals(  # type: ignore[no-untyped-def]
    endpoint: Endpoint, backend: OpenAIBackend, reply, kind: str, text: str, tries: int
) -> None:
    endpoint.replies = [reply] * 12
    response = await backend.answer(prompt())
    assert response.error_kind == kind
    assert pytest.importorskip("re").search(text, response.error)
    assert "s3cret" not in response.error
    assert len(endpoint.requests) == tries


async def test_a_dead_endpoint() -> None:
    backend = OpenAIBackend("http://127.0.0.1:9", "m", timeout=2, patience=0.5)
    await backend.start()
    with pytest.raises(PopulaceError, match=r"http://127\.0\.0\.1:9 can't be reached"):
        await backend.check()
    response = await backend.answer(prompt())
    assert response.error_kind == "unreachable"
    began = asyncio.get_running_loop().time()
    responses = await asyncio.gather(*(backend.answer(prompt()) for _ in range(500)))
    assert {r.error_kind for r in responses} == {"unreachable"}
    assert asyncio.get_running_loop().time() - began < 6  # one probe at most; the rest at once
    await backend.close()


async def test_an_endpoint_that_comes_back(endpoint: Endpoint, backend: OpenAIBackend) -> None:
    down = OpenAIBackend("http://127.0.0.1:9", "m", timeout=2, patience=30)
    await down.start()
    waiting = asyncio.ensure_future(down.answer(prompt()))
    await asyncio.sleep(0)
    down.endpoints[0]._chat = backend.endpoints[0]._chat
    assert (await waiting).text == "hello"
    assert down.endpoints[0].down_for == 0
    await down.close()


async def test_a_slow_endpoint(endpoint: Endpoint) -> None:
    backend = OpenAIBackend(endpoint.url, "m", timeout=0.1)
    await backend.start()
    endpoint.delay = 1.0
    response = await backend.answer(prompt(max_tokens=5))
    assert response.error_kind == "timeout"
    assert len(endpoint.requests) == 2
    assert "did not answer within 0.1 s" in response.error
    await backend.close()


def test_keys_come_from_allowed_variables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    monkeypatch.setenv("OTHER_API_KEY", "k")
    monkeypatch.setenv("HOME_SECRET", "k")
    assert api_key(None, settings) is None
    assert api_key("OTHER_API_KEY", settings) == "k"
    for secret in ("HOME_SECRET", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(secret, "k")
        with pytest.raises(InvalidInputError, match="may not read"):
            api_key(secret, settings)
    named = Settings(api_key_env_allow="*_KEY, AWS_SECRET_ACCESS_KEY")
    assert api_key("AWS_SECRET_ACCESS_KEY", named) == "k"
    with pytest.raises(InvalidInputError, match="not set where the model service runs"):
        api_key("MISSING_API_KEY", settings)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"number": 3}', ""),
        ('{"number": "three"}', "schema"),
        ("{}", "schema"),
        ("three", "schema"),
        ('{"number": 3', "schema"),
    ],
)
def test_answers_are_fitted_to_their_schema(text: str, kind: str) -> None:
    response = fit(ModelResponse(1, text=text), SCHEMA)
    assert response.error_kind == kind
    assert (response.data == {"number": 3}) == (kind == "")
    assert response.text == text


def test_an_answer_that_was_cut_says_so() -> None:
    response = fit(ModelResponse(1, text='{"number"', finish="length"), SCHEMA)
    assert "cut by the token limit" in response.error


async def test_scripted_answers_follow_from_the_key_alone() -> None:
    spec = ModelSpec(backend="scripted", script=ScriptSpec(low=5, high=6, text="n={number}"))
    backend = make_backend(spec, Settings())
    first, again = await backend.answer(prompt()), await backend.answer(prompt())
    assert first.text == again.text
    assert 5 <= float(first.text[2:]) <= 6
    other = prompt()
    other.key = (7, "p", 4, 1, 0)
    assert (await backend.answer(other)).text != first.text
    assert first.backend == "scripted"


async def test_scripted_answers_fit_schemas() -> None:
    schema = {
        "type": "object",
        "properties": {
            "number": {"type": "integer", "minimum": 3, "maximum": 4},
            "word": {"type": "string", "maxLength": 5},
            "choice": {"enum": ["a", "b"]},
            "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
            "inner": {"type": "object", "properties": {"x": {"const": 1}}},
            "maybe": {"type": ["number", "null"]},
        },
        "required": ["number", "word", "choice", "list", "inner"],
    }
    backend = make_backend(ModelSpec(backend="scripted"), Settings())
    for agent in range(20):
        request = prompt(schema=schema)
        request.key = (7, "p", agent, 1, 0)
        assert (await backend.answer(request)).error_kind == ""


async def test_scripted_failures() -> None:
    spec = ModelSpec(backend="scripted", script=ScriptSpec(failures=0.5))
    backend = make_backend(spec, Settings())
    kinds = []
    for agent in range(200):
        request = prompt()
        request.key = (7, "p", agent, 1, 0)
        kinds.append((await backend.answer(request)).error_kind)
    assert 60 < kinds.count("refused") < 140


def test_requests_and_responses_travel() -> None:
    request = prompt(schema=SCHEMA)
    assert ModelRequest.from_columns(json.loads(json.dumps(request.columns()))) == request
    response = ModelResponse(3, text="x", data={"a": 1}, error_kind="schema", error="e")
    assert ModelResponse.from_columns(json.loads(json.dumps(response.columns()))) == response


def test_equal_endpoints_share_a_pool() -> None:
    a = ModelSpec(backend="openai", base_url="http://x/v1", model="m", temperature=0.1)
    b = ModelSpec(backend="openai", base_url="http://x", model="m", max_tokens=5)
    c = ModelSpec(backend="openai", base_url="http://x", model="n")
    assert pool_name(a) == pool_name(b)
    assert pool_name(a) != pool_name(c)


class Guess(BaseModel):
    number: float


class Asker(Agent):
    async def ask(self, what: str) -> object:
        if what == "text":
            return await self.model.ask("Say something.")
        if what == "model":
            return (await self.model.ask("Guess.", returns=Guess)).number
        if what == "schema":
            return await self.model.ask("Guess.", returns=SCHEMA)
        if what == "remember":
            await self.model.ask("one", remember=True)
            await self.model.ask("two", system="be brief")
            return len(self.memory)
        if what == "unknown":
            return await self.model.ask("x", model="other")
        if what == "bad schema":
            return await self.model.ask("x", returns={"type": 3})
        response = await self.model.generate([{"role": "user", "content": "x"}])
        return [response.tokens_in, response.tokens_out, response.backend]


async def test_agents_ask(endpoint: Endpoint) -> None:
    spec = ModelSpec(backend="openai", base_url=endpoint.url, model="m")
    async with populace.local(models={"default": spec}) as world:
        agent = Asker().to_dist(world)
        assert await agent.ask("text") == "hello"
        endpoint.replies = [lambda: answer('{"number": 4}')] * 2
        assert await agent.ask("model") == 4
        assert await agent.ask("schema") == {"number": 4}
        assert await agent.ask("count") == [11, 3, "openai:m"]
        assert await agent.ask("remember") == 2
        roles = [m["role"] for m in endpoint.requests[-1]["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        asked = len(endpoint.requests)
        with pytest.raises(populace.AgentError) as caught:
            await agent.ask("schema")
        assert len(endpoint.requests) == asked + 2  # the second time to repair it
        assert caught.value.kind == "model_schema"
        with pytest.raises(populace.AgentError, match="no model named 'other'"):
            await agent.ask("unknown")
        with pytest.raises(populace.AgentError, match="not a JSON schema"):
            await agent.ask("bad schema")
    assert issubclass(ModelFailure, populace.Failure)


async def test_the_embedded_model_answers() -> None:
    """A real model on this machine's CPU; its answers must fit the schema."""
    schema = {**SCHEMA, "additionalProperties": False}
    backend = make_backend(ModelSpec(), Settings(embedded_slots=2))
    await backend.start()
    details = await backend.check()
    response = await backend.answer(prompt(schema=schema, max_tokens=30))
    text = await backend.answer(prompt(max_tokens=5))
    await backend.close()
    assert "SmolLM2" in details["model"]
    assert response.error_kind in ("", "schema")
    assert response.tokens_in > 5
    assert response.tokens_out > 1
    assert response.backend == "embedded"
    assert text.text
    assert text.error_kind == ""


def test_weights_that_are_not_there() -> None:
    from pathlib import Path

    with pytest.raises(InvalidInputError, match="which is no file"):
        make_backend(ModelSpec(), Settings(embedded_model=Path("/nowhere.gguf")))
