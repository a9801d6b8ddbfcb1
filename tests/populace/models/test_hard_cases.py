"""Endpoints that say odd things, prompts in other scripts, budgets that count each request."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import BaseModel, ValidationError, field_validator

import populace
from populace import Agent
from populace.models.accounts import BudgetKeeper, OwnBudget, PriceTable
from populace.models.answering import Answerer
from populace.models.backends import endpoint as endpoint_module
from populace.models.backends import openai
from populace.models.backends.openai import OpenAIBackend
from populace.models.limits import OwnPace, RateLimiter
from populace.models.serving import OwnCache, Serving
from populace.models.structured import fit
from shared.errors import InvalidInputError
from shared.messages.model import Handling, ModelRequest, ModelResponse, Terms
from shared.messages.scenario import Limits, MemorySpec, ModelSpec, ScenarioSpec
from tests.endpoint import Endpoint, answer, serving


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_PAUSE", 0.01)


def prompt(text: str = "hi", **more: Any) -> ModelRequest:
    return ModelRequest(1, (7, "p", 3, 1, 0), [{"role": "user", "content": text}], **more)


async def backend_of(*urls: str, **more: Any) -> OpenAIBackend:
    backend = OpenAIBackend(list(urls), "m", **more)
    await backend.start()
    return backend


@pytest.mark.parametrize(
    ("status", "told", "least"),
    [(429, "1", 0.95), (503, "1.2", 1.15), (429, "date", 0.5), (429, "nonsense", 0.0)],
)
async def test_endpoints_are_left_alone_as_long_as_they_say(
    endpoint: Endpoint, status: int, told: str, least: float
) -> None:
    times: list[float] = []

    def respond(_: Any) -> web.Response:
        times.append(time.monotonic())
        if len(times) > 1:
            return answer("there")
        when = formatdate(time.time() + 2, usegmt=True) if told == "date" else told
        return web.Response(status=status, headers={"Retry-After": when})

    endpoint.respond = respond
    backend = await backend_of(endpoint.url)
    assert (await backend.answer(prompt())).text == "there"
    assert least <= times[1] - times[0] < 4
    await backend.close()


async def test_a_long_storm_that_does_not_say_how_long(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many a window, far fewer than are asked at once: all are served, and few asked in vain."""
    monkeypatch.setattr(openai, "_PAUSE", 0.1)
    monkeypatch.setattr(endpoint_module, "_AWAY", 0.2)
    window, allowed, count = 0.5, 20, 200
    began, used, refused = 0.0, 0, 0

    def respond(_: Any) -> web.Response:
        nonlocal began, used, refused
        now = time.monotonic()
        if now - began > window:
            began, used = now, 0
        used += 1
        if used > allowed:
            refused += 1
            return web.Response(status=429)
        return answer("in time")

    endpoint.respond = respond
    backend = await backend_of(endpoint.url)
    slots = asyncio.Semaphore(100)

    async def ask() -> ModelResponse:
        async with slots:
            return await backend.answer(prompt())

    responses = await asyncio.gather(*(ask() for _ in range(count)))
    assert [r.text for r in responses] == ["in time"] * count
    assert refused < 5 * count
    await backend.close()


async def test_a_spent_quota_is_not_waited_for_again_and_again(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but 429: prompts fail at once after a while, and one asks now and then."""
    monkeypatch.setattr(openai, "_LIMITED_FOR", 0.5)
    monkeypatch.setattr(openai, "_PAUSE", 0.1)
    monkeypatch.setattr(endpoint_module, "_AWAY", 0.2)
    monkeypatch.setattr(endpoint_module, "_LONGEST_PAUSE", 0.4)
    endpoint.respond = lambda _: web.Response(status=429)
    backend = await backend_of(endpoint.url)
    async with asyncio.timeout(20):
        responses = await asyncio.gather(*(backend.answer(prompt(str(i))) for i in range(100)))
        assert {r.error_kind for r in responses} == {"rate_limit"}
        asked = len(endpoint.requests)
        responses = await asyncio.gather(*(backend.answer(prompt(str(i))) for i in range(100)))
        assert any("nothing but 429 for" in r.error for r in responses)
        assert len(endpoint.requests) < asked + 100
        endpoint.respond = lambda _: answer("more was paid for")
        while (await backend.answer(prompt())).text != "more was paid for":
            await asyncio.sleep(0.05)
        responses = await asyncio.gather(*(backend.answer(prompt(str(i))) for i in range(100)))
        assert {r.text for r in responses} == {"more was paid for"}
    await backend.close()


async def test_an_endpoint_that_was_long_away_is_used_again(endpoint: Endpoint) -> None:
    async with serving() as other:
        backend = await backend_of(endpoint.url, other.url, patience=0.2)
        endpoint.respond = lambda _: web.Response(status=502)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            await asyncio.gather(*(backend.answer(prompt(str(i))) for i in range(8)))
            await asyncio.sleep(0.05)
        endpoint.respond = lambda _: answer("back")
        async with asyncio.timeout(20):
            while not {r.text for r in await asyncio.gather(
                *(backend.answer(prompt(str(i))) for i in range(20))
            )} >= {"back", "hello"}:  # fmt: skip
                await asyncio.sleep(0.05)
        await backend.close()


async def test_a_cut_answer_is_the_request_s_fault_alone(endpoint: Endpoint) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "500"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", cut)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    backend = await backend_of(f"http://127.0.0.1:{runner.addresses[0][1]}")
    response = await backend.answer(prompt())
    assert (response.error_kind, response.details["attempts"]) == ("unreachable", 5)
    assert backend.endpoints[0].down_for == backend.endpoints[0].away_for == 0
    await backend.close()
    await runner.cleanup()


async def test_an_answer_without_an_end(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_MOST_BYTES", 1 << 20)
    endpoint.respond = lambda _: web.Response(body=b"x" * (2 << 20))
    backend = await backend_of(endpoint.url)
    response = await backend.answer(prompt())
    assert response.error_kind == "refused"
    assert "more than 1 MB" in response.error
    await backend.close()


@pytest.mark.parametrize(
    "usage", [(0, 3), (11, 0), (True, 3), (40_000_000, 3), (11, 40_000_000), (11, 3)]
)
async def test_counts_that_cannot_be_true(endpoint: Endpoint, usage: tuple[Any, Any]) -> None:
    choice = {"message": {"content": "some words"}, "finish_reason": "stop"}
    told = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    endpoint.respond = lambda _: web.json_response({"choices": [choice], "usage": told})
    backend = await backend_of(endpoint.url)
    response = await backend.answer(prompt("some question"))
    assert ("usage" not in response.details) == (usage == (11, 3))
    assert 0 < response.tokens_in < 100
    assert 0 < response.tokens_out < 100
    await backend.close()


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ("This model's maximum context length is 128,000 tokens", 128_000),
        ("maximum context length is 2048 tokens. However, you requested 3000", 2048),
        ("maximum context length is 32 768 tokens", 32_768),
    ],
)
async def test_limits_are_read_with_their_separators(
    endpoint: Endpoint, said: str, limit: int
) -> None:
    endpoint.respond = lambda _: web.Response(status=400, text=said)
    backend = await backend_of(endpoint.url)
    response = await backend.answer(prompt())
    assert (response.error_kind, response.details["limit"]) == ("context", limit)
    await backend.close()


@pytest.mark.parametrize(
    ("text", "left", "thought"),
    [
        ("<think>a</think>\n42", "42", "a"),
        ("hm, let me see</think>\n\n42", "42", "hm, let me see"),
        ("<think>on and on", "", "on and on"),
        ("ok <think>a</think>42", "ok 42", "a"),
        ("I think so", "I think so", None),
    ],
)
async def test_thoughts_stand_apart(
    endpoint: Endpoint, text: str, left: str, thought: str | None
) -> None:
    endpoint.respond = lambda _: answer(text)
    backend = await backend_of(endpoint.url)
    response = await Answerer(backend).answer(prompt())
    assert (response.text, response.details.get("reasoning")) == (left, thought)
    await backend.close()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("per_token", [2.0, 1.0, 0.4])
async def test_prompts_fit_whatever_the_script(
    endpoint: Endpoint, per_token: float, told: bool
) -> None:
    """A model of 2,048 tokens, by a tokenizer for which estimates are far too low."""

    def tokens(body: dict[str, Any]) -> int:
        return int(sum(len(m["content"]) for m in body["messages"]) / per_token)

    def respond(body: dict[str, Any]) -> web.Response:
        if tokens(body) + body["max_tokens"] > 2048:
            said = "maximum context length is 2048 tokens" if told else "prompt is too long"
            return web.Response(status=400, text=said)
        choice = {"message": {"content": "x" * 100}, "finish_reason": "stop"}
        usage = {"prompt_tokens": tokens(body), "completion_tokens": 100}
        return web.json_response({"choices": [choice], "usage": usage})

    endpoint.respond = respond
    backend = await backend_of(endpoint.url)
    answerer = Answerer(backend)
    history: list[dict[str, Any]] = []
    for number in range(60):
        history += [
            {"role": "user", "content": f"question {number} " + "y" * 150},
            {"role": "assistant", "content": "x" * 100},
        ]
        messages = [*history, {"role": "user", "content": "and now?"}]
        request = ModelRequest(
            number, (1, "p", 0, number, 0), messages, max_tokens=64, spare=(0, len(history))
        )
        response = await answerer.answer(request, Handling())
        assert not response.error_kind, response.error
    assert len(endpoint.requests) < 60 + 15  # it learns
    await backend.close()


async def test_a_budget_of_requests_counts_each(endpoint: Endpoint) -> None:
    endpoint.respond = lambda _: web.Response(status=500)
    keeper = BudgetKeeper({"requests": 7}, OwnBudget(), "p")

    async def keeper_of(run: str, budget: dict[str, Any]) -> BudgetKeeper:
        return keeper

    spec = ModelSpec(backend="openai", base_url=endpoint.url, model="m")
    one = Serving(await backend_of(endpoint.url), spec, None, OwnCache(), keeper_of)
    terms = Terms(budget={"requests": 7})
    responses = await asyncio.gather(*(one.serve(prompt(str(i)), "r", terms) for i in range(20)))
    assert len(endpoint.requests) == 7
    assert {r.error_kind for r in responses} <= {"budget", "unreachable"}
    assert one.accounts["r"].total().attempts == 7
    await one.backend.close()


async def test_at_temperature_zero_all_get_one_answer(endpoint: Endpoint) -> None:
    endpoint.delay = 0.02
    endpoint.respond = lambda _: answer(f"number {len(endpoint.requests)}")

    async def nobody(run: str, budget: dict[str, Any]) -> Any:
        raise AssertionError

    spec = ModelSpec(backend="openai", base_url=endpoint.url, model="m")
    one = Serving(await backend_of(endpoint.url), spec, None, OwnCache(), nobody)
    terms = Terms(cache="read-write")
    asked = [prompt(temperature=0.0) for _ in range(10)]
    responses = await asyncio.gather(*(one.serve(request, "r", terms) for request in asked))
    assert {r.text for r in responses} == {"number 1"}
    assert one.accounts["r"].total().kept == 9
    await one.backend.close()


async def test_no_crowd_leaves_when_an_endpoint_is_back(endpoint: Endpoint) -> None:
    """Requests are admitted when they may leave, and not before they wait."""
    times: list[float] = []
    began = time.monotonic()

    def respond(_: Any) -> web.Response:
        if time.monotonic() - began < 1.0:
            return web.Response(status=503)
        times.append(time.monotonic())
        return answer("fine")

    async def nobody(run: str, budget: dict[str, Any]) -> Any:
        raise AssertionError

    endpoint.respond = respond
    limits = Limits(requests_per_minute=1200)
    spec = ModelSpec(backend="openai", base_url=endpoint.url, model="m", limits=limits)
    limiter = RateLimiter(limits, OwnPace())
    one = Serving(await backend_of(endpoint.url), spec, limiter, OwnCache(), nobody)
    await asyncio.gather(*(one.serve(prompt(str(i)), "r", Terms()) for i in range(40)))
    for number, at in enumerate(times):  # 20 a second, from when it is back
        assert at - (began + 1.0) >= (number - 2) / 20
    await one.backend.close()


def test_answers_too_deep_and_schemas_that_lead_nowhere() -> None:
    deep = fit(ModelResponse(1, text="[" * 100_000), {"type": "array"})
    assert deep.error_kind == "schema"
    nowhere = fit(ModelResponse(1, text="{}"), {"$ref": "#/$defs/Nobody"})
    assert nowhere.error_kind == "schema"
    assert "can't be followed" in nowhere.error


class Even(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


class Chooser(Agent):
    async def choose(self) -> int:
        return (await self.model.ask("An even number?", returns=Even)).number

    async def remember(self, text: str) -> str:
        self.memory.add_user(text)
        return await self.model.ask("And?")


async def test_what_a_class_alone_knows_is_repaired_and_shown(endpoint: Endpoint) -> None:
    spec = ModelSpec(backend="openai", base_url=endpoint.url, model="m")
    async with populace.local(models={"default": spec}) as world:
        choosers = await world.population(Chooser, count=1)
        endpoint.replies = [lambda: answer('{"number": 3}'), lambda: answer('{"number": 4}')]
        assert list(await choosers.choose()) == [4]
        assert "must be even" in endpoint.requests[-1]["messages"][-1]["content"]
        endpoint.respond = lambda _: answer('{"number": 5}')
        (failure,) = (await choosers.choose()).errors.values()
        assert failure.kind == "model_schema"
        assert 'must be even; the answer was: {"number": 5}' in failure.message


async def test_a_very_long_memory_still_travels(endpoint: Endpoint) -> None:
    spec = ModelSpec(
        backend="openai",
        base_url=endpoint.url,
        model="m",
        context=2048,
        max_tokens=16,
        memory=MemorySpec(policy="window"),
    )
    async with populace.local(models={"default": spec}) as world:
        people = await world.population(Chooser, count=1)
        for _ in range(3):
            assert list(await people.remember("word " * 100_000)) == ["hello"]
    assert max(len(str(body)) for body in endpoint.requests) < 20_000


def test_a_budget_of_money_needs_prices(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "name": "n",
        "scenario": "a:B",
        "budget": {"money": 1},
        "models": {"default": {"backend": "openai", "base_url": "http://x", "model": "m"}},
    }
    table = PriceTable(None)
    with pytest.raises(InvalidInputError, match="no price of default is known"):
        table.check_budget(ScenarioSpec.model_validate(fields))
    fields["models"]["default"]["price"] = {"input": 1}
    table.check_budget(ScenarioSpec.model_validate(fields))
    path = tmp_path / "prices.yaml"
    path.write_text("- a\n")
    with pytest.raises(InvalidInputError, match="must map models"):
        PriceTable(path)


# What is paid for, and what is no answer
async def serving_of(endpoint: Endpoint, **more: Any) -> Serving:
    spec = ModelSpec(backend="openai", base_url=endpoint.url, model="m", **more)
    backend = await backend_of(endpoint.url, extra=spec.extra)
    keeper = BudgetKeeper({"tokens": 10_000}, OwnBudget(), "p")

    async def budget_of(_: str, __: Any) -> BudgetKeeper:
        return keeper

    return Serving(backend, spec, None, OwnCache(), budget_of)


async def test_a_schema_that_python_cannot_follow_costs_what_it_costs(endpoint: Endpoint) -> None:
    """A pattern of another dialect of regular expressions; a reference to elsewhere."""
    one = await serving_of(endpoint)
    endpoint.respond = lambda _: answer('"word"')
    terms = Terms(budget={"tokens": 10_000}, handling={"default": Handling(repair=False)})
    for schema in (
        {"type": "string", "pattern": r"^\p{L}+$"},
        {"$ref": f"{endpoint.url}/schema.json"},
    ):
        response = await one.serve(prompt(schema=schema), "r", terms)
        assert response.error_kind == "schema"
        assert "can't be followed" in response.error
        assert (response.tokens_in, response.tokens_out) == (11, 3)
    assert len(endpoint.requests) == 2
    assert one.accounts["r"].total().tokens_in == 22
    keeper = await one._budget_of("r", {})
    assert (keeper._paid.tokens, keeper._paid.requests) == (28, 2)
    await one.backend.close()


@pytest.mark.parametrize("text", ['{"n": NaN}', '{"n": -Infinity}', '{"n": 1e999}'])
def test_json_knows_no_number_like_that(text: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number"}}}
    response = fit(ModelResponse(1, text=text), schema)
    assert (response.error_kind, response.data) == ("schema", None)
    assert fit(ModelResponse(1, text='{"n": 1e300}'), schema).data == {"n": 1e300}


async def test_an_answer_that_was_paid_for_is_mended_though_the_service_ends(
    endpoint: Endpoint,
) -> None:
    """Nothing new leaves; and what nobody waits for is counted, as it was had."""
    one = await serving_of(endpoint)
    schema = {"type": "object", "required": ["n"]}
    terms = Terms(budget={"tokens": 10_000})
    endpoint.replies = [lambda: answer("{}"), lambda: answer('{"n": 1}')]
    left: list[bool] = []

    def ending(paid: bool) -> bool:
        left.append(paid)
        return paid or len(left) == 1

    response = await one.serve(prompt(schema=schema), "r", terms, ending)
    assert (response.error_kind, response.data) == ("", {"n": 1})
    endpoint.replies = [lambda: answer("{}")]
    response = await one.serve(prompt(schema=schema), "r", terms, lambda paid: not paid)
    assert response.error_kind == "schema"
    assert len(endpoint.requests) == 3
    assert one.accounts["r"].total().tokens_in == 33
    assert (await one._budget_of("r", {}))._paid.tokens == 42
    await one.backend.close()


async def test_what_came_to_nothing_is_counted(endpoint: Endpoint) -> None:
    odd = {
        "choices": [{"message": {"content": 42}}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3},
    }
    endpoint.replies = [lambda: web.json_response(odd) for _ in range(2)]
    backend = await backend_of(endpoint.url)
    response = await backend.answer(prompt())
    assert (response.text, response.tokens_in, response.tokens_out) == ("hello", 33, 9)
    assert response.details["attempts"] == 3
    await backend.close()


@pytest.mark.parametrize(
    ("message", "finish", "said"),
    [
        ({"content": None, "refusal": "I won't."}, "stop", "refused to answer: I won't."),
        ({"content": ""}, "content_filter", "content_filter"),
    ],
)
async def test_a_refusal_is_no_answer(
    endpoint: Endpoint, message: dict[str, Any], finish: str, said: str
) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    body = {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}
    endpoint.respond = lambda _: web.json_response(body)
    one = await serving_of(endpoint)
    response = await one.serve(prompt(schema={"type": "object"}), "r", Terms())
    assert (response.error_kind, response.tokens_in) == ("refused", 11)
    assert said in response.error
    assert len(endpoint.requests) == 1
    await one.backend.close()


async def test_half_a_character_is_replaced(endpoint: Endpoint) -> None:
    raw = '{"choices": [{"message": {"content": "cut \\ud83d"}}]}'
    endpoint.respond = lambda _: web.Response(text=raw, content_type="application/json")
    backend = await backend_of(endpoint.url)
    assert (await backend.answer(prompt())).text == "cut \ufffd"
    assert len(endpoint.requests) == 1
    await backend.close()


async def test_nothing_left_to_pay_with_is_not_waited_for(endpoint: Endpoint) -> None:
    said = {"error": {"code": "insufficient_quota", "message": "check your plan"}}
    endpoint.respond = lambda _: web.json_response(said, status=429)
    backend = await backend_of(endpoint.url)
    response = await asyncio.wait_for(backend.answer(prompt()), 5)
    assert (response.error_kind, len(endpoint.requests)) == ("rate_limit", 1)
    assert "insufficient_quota" in response.error
    await backend.close()


async def test_endpoints_that_want_other_fields(endpoint: Endpoint) -> None:
    def respond(body: dict[str, Any]) -> web.Response:
        if "max_tokens" in body:
            said = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return web.json_response({"error": {"message": said}}, status=400)
        return answer("fine")

    endpoint.respond = respond
    one = await serving_of(endpoint, extra={"top_p": None, "reasoning_effort": "low"})
    endpoint.delay = 0.05  # so that several have left before the first is refused
    asked = (one.serve(prompt(max_tokens=40), "r", Terms()) for _ in range(8))
    assert [r.text for r in await asyncio.gather(*asked)] == ["fine"] * 8
    assert len(endpoint.requests) == 16
    assert (await one.serve(prompt(max_tokens=40), "r", Terms())).text == "fine"
    assert len(endpoint.requests) == 17
    last = endpoint.requests[-1]
    assert (last["max_completion_tokens"], last["reasoning_effort"]) == (40, "low")
    assert "top_p" not in last
    await one.backend.close()
    with pytest.raises(ValidationError, match="extra must not hold messages"):
        ModelSpec(backend="openai", base_url="http://x", model="m", extra={"messages": []})
    with pytest.raises(ValidationError, match="openai backend alone"):
        ModelSpec(backend="scripted", extra={"a": 1})
