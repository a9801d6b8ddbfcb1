"""A prompt's way: made to fit, asked, repaired, limited, charged, kept; against a real endpoint."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import populace
from populace import Agent, ModelSpec, ScriptSpec
from populace._random import shuffled_place
from populace.models import limits
from populace.models.accounts import Accounts, BudgetKeeper, OwnBudget, PriceTable, Spent
from populace.models.answering import Answerer
from populace.models.backends import make_backend, openai
from populace.models.backends.openai import OpenAIBackend
from populace.models.context import estimate_messages, estimate_tokens, fit_prompt, latest
from populace.models.gate import Gate
from populace.models.limits import OwnPace, RateLimiter
from populace.models.serving import OwnCache, Serving, cache_key
from populace.models.structured import fit
from shared.errors import InvalidInputError
from shared.messages.model import Handling, ModelRequest, ModelResponse, Terms
from shared.messages.scenario import Budget, Latency, Limits, MemorySpec, Mixture, ScriptRule
from shared.settings import Settings
from tests.endpoint import Endpoint, answer, serving

SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "number"}},
    "required": ["number"],
}


def prompt(text: str = "hi", agent: int = 3, **more: Any) -> ModelRequest:
    return ModelRequest(1, (7, "p", agent, 1, 0), [{"role": "user", "content": text}], **more)


def spec_of(endpoint: Endpoint, **more: Any) -> ModelSpec:
    return ModelSpec(backend="openai", base_url=endpoint.url, model="m", **more)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_PAUSE", 0.01)


class Asked(Answerer):
    """Answers as a specification says."""

    spec: ModelSpec

    async def answer(self, request: ModelRequest, *more: Any) -> ModelResponse:
        return await super().answer(request, Handling.of(self.spec))


async def answerer(endpoint: Endpoint, **more: Any) -> Asked:
    spec = spec_of(endpoint, **more)
    backend = make_backend(spec, Settings())
    await backend.start()
    one = Asked(backend)
    one.spec = spec
    return one


# Structured answers
async def test_an_answer_is_repaired_once(endpoint: Endpoint) -> None:
    one = await answerer(endpoint)
    endpoint.replies = [lambda: answer('{"number": "x"}'), lambda: answer('{"number": 4}')]
    response = await one.answer(prompt(schema=SCHEMA))
    assert (response.error_kind, response.data) == ("", {"number": 4})
    assert response.details["repaired"] is True
    assert (response.tokens_in, response.tokens_out) == (22, 6)
    told = endpoint.requests[1]["messages"]
    assert [m["role"] for m in told] == ["user", "assistant", "user"]
    assert "'x' is not of type 'number'" in told[2]["content"]
    endpoint.replies = [lambda: answer("four"), lambda: answer("4, I said")]
    response = await one.answer(prompt(schema=SCHEMA))
    assert (response.error_kind, response.text) == ("schema", "four")
    assert len(endpoint.requests) == 4
    await one.backend.close()
    plain = await answerer(endpoint, repair=False)
    endpoint.replies = [lambda: answer("four")]
    assert (await plain.answer(prompt(schema=SCHEMA))).error_kind == "schema"
    assert len(endpoint.requests) == 5
    await plain.backend.close()


async def test_what_else_answers_hold(endpoint: Endpoint) -> None:
    """Thoughts apart, tool calls passed on, fences taken off, cut answers marked."""
    one = await answerer(endpoint)
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"content": None, "tool_calls": call, "reasoning_content": "well"}
    usage = {
        "prompt_tokens": 40,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    body = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}
    endpoint.replies = [lambda: web.json_response(body)]
    response = await one.answer(prompt(tools=[{"type": "function", "function": {"name": "f"}}]))
    assert response.details["tool_calls"] == call
    assert (response.details["reasoning"], response.details["cached"]) == ("well", 32)
    assert endpoint.requests[0]["tools"][0]["function"]["name"] == "f"
    endpoint.replies = [lambda: answer('<think>hm {"number": 1}</think> {"number": 2}')]
    response = await one.answer(prompt(schema=SCHEMA))
    assert response.data == {"number": 2}
    assert response.details["reasoning"] == 'hm {"number": 1}'
    endpoint.replies = [lambda: answer('```json\n{"number": 3}\n```')]
    assert (await one.answer(prompt(schema=SCHEMA))).data == {"number": 3}
    endpoint.replies = [lambda: answer("and then", finish="length")]
    assert (await one.answer(prompt())).finish == "length"
    await one.backend.close()


@pytest.mark.parametrize(
    "usage",
    [None, "many", {}, {"prompt_tokens": -1, "completion_tokens": 3},
     {"prompt_tokens": 10**12, "completion_tokens": 3}, {"prompt_tokens": "9"}],
)  # fmt: skip
async def test_wrong_usage_is_estimated_and_marked(endpoint: Endpoint, usage: Any) -> None:
    one = await answerer(endpoint)
    body = {"choices": [{"message": {"content": "yes"}}], "usage": usage}
    endpoint.replies = [lambda: web.json_response(body)]
    response = await one.answer(prompt("a question of some length"))
    assert 5 < response.tokens_in < 40
    assert 0 < response.tokens_out < 5
    assert response.details["usage"] == "estimated"
    accounts = Accounts()
    accounts.add(1, "m", response, None)
    assert accounts.total().estimated == 1
    await one.backend.close()


# Context
LONG = [{"role": "system", "content": "rules"}] + [
    {"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} " + "word " * 40}
    for i in range(20)
] + [{"role": "user", "content": "now?"}]  # fmt: skip


async def no_count(_: Any) -> int | None:
    return None


async def test_a_long_prompt_is_shortened_from_its_oldest_memory() -> None:
    fitted = await fit_prompt(LONG, 50, 600, spare=(1, 21), policy="window", count=no_count)
    assert estimate_messages(fitted.messages) + 50 <= 600
    assert fitted.messages[0] == LONG[0]
    assert fitted.messages[-1] == LONG[-1]
    assert fitted.messages[-2] == LONG[-2]
    assert len(fitted.messages) + fitted.shortened == len(LONG)
    assert fitted.shortened % 2 == 0
    same = await fit_prompt(LONG, 50, None, spare=(1, 21), policy="window", count=no_count)
    assert same.messages is LONG
    refused = await fit_prompt(LONG, 50, 600, spare=(1, 21), policy="none", count=no_count)
    assert not refused.fits


async def test_what_cannot_be_left_out_is_cut() -> None:
    long = [{"role": "user", "content": "x" * 9000}]
    fitted = await fit_prompt(long, 200, 512, spare=(0, 0), policy="window", count=no_count)
    assert estimate_messages(fitted.messages) + fitted.max_tokens <= 512
    assert fitted.cut > 0
    assert fitted.max_tokens >= 16
    assert " [...] " in fitted.messages[0]["content"]


async def test_the_endpoint_counts_where_it_can() -> None:
    """An estimate near the limit is not believed, if there is better."""

    async def count(messages: Any) -> int:
        return sum(len(m["content"].split()) for m in messages)

    fitted = await fit_prompt(LONG, 50, 950, spare=(1, 21), policy="window", count=count)
    assert fitted.shortened == 0  # 822 words, though the estimate is above a thousand
    assert estimate_messages(LONG) > 950


def test_the_latest_messages() -> None:
    messages = [{"role": "user", "content": "w" * 32} for _ in range(10)]
    each = estimate_messages(messages[:1])
    assert len(latest(messages, 3 * each)) == 3
    assert len(latest(messages, 1)) == 1
    assert latest([], 10) == []


def test_estimates_err_on_the_long_side() -> None:
    prose = "The players of this game pick a number between zero and one hundred. " * 20
    assert len(prose) / 4.6 < estimate_tokens(prose) < len(prose) / 3
    assert estimate_tokens("你好世界") >= 4


async def test_an_endpoint_that_says_too_long_is_asked_with_less(endpoint: Endpoint) -> None:
    def respond(body: dict[str, Any]) -> web.Response:
        size = sum(len(m["content"].split()) for m in body["messages"])
        if size > 300:
            text = "This model's maximum context length is 400 tokens. Please reduce the length."
            return web.json_response({"error": {"message": text}}, status=400)
        return answer("fine")

    endpoint.respond = respond
    one = await answerer(endpoint)
    request = ModelRequest(1, (7, "p", 3, 1, 0), LONG, max_tokens=50, spare=(1, 21))
    response = await one.answer(request)
    assert (response.error_kind, response.text) == ("", "fine")
    assert response.details["shortened"] > 0
    before = len(endpoint.requests)
    assert (await one.answer(request)).text == "fine"
    assert len(endpoint.requests) == before + 1  # it has learned the limit
    await one.backend.close()


async def test_each_refit_is_smaller(endpoint: Endpoint) -> None:
    """Where the endpoint states its limit, but counts more tokens than anyone would estimate."""

    def respond(body: dict[str, Any]) -> web.Response:
        if sum(len(m["content"]) for m in body["messages"]) > 2000:
            return web.json_response({"error": "maximum context length is 2000"}, status=400)
        return answer("fine")

    endpoint.respond = respond
    one = await answerer(endpoint, context=2000)
    request = ModelRequest(1, (7, "p", 3, 1, 0), LONG * 2, max_tokens=50, spare=(1, 43))
    await one.answer(request)
    sizes = [len(r["messages"]) for r in endpoint.requests]
    assert all(b < a for a, b in itertools.pairwise(sizes)), sizes
    await one.backend.close()


class Talker(Agent):
    async def talk(self, times: int) -> list[int]:
        """Converse, everything remembered; gives the memory's length after each turn."""
        lengths = []
        for i in range(times):
            await self.model.ask(f"Turn {i}: " + "tell me more. " * 12, remember=True)
            lengths.append(len(self.memory))
        return lengths


async def test_sixty_rounds_with_a_small_model(endpoint: Endpoint) -> None:
    """A 2,048-token model that refuses what is longer is never asked for more, after the first."""

    def respond(body: dict[str, Any]) -> web.Response:
        size = sum(len(m["content"]) / 4 + 4 for m in body["messages"]) + body["max_tokens"]
        if size > 2048:
            return web.json_response({"error": "maximum context length is 2048"}, status=400)
        return answer("so it goes, and so on. " * 12)

    endpoint.respond = respond
    for memory in (MemorySpec(), MemorySpec(policy="summary"), MemorySpec(tokens=500)):
        spec = spec_of(endpoint, context=2048, memory=memory, max_tokens=128)
        async with populace.local(models={"default": spec}) as world:
            talker = Talker().to_dist(world)
            lengths = await talker.talk(60)
            usage = world.accounts.total()
        assert usage.failed == 0
        if memory.policy == "summary":
            assert max(lengths) < 40
            assert usage.requests > 60
        else:
            assert lengths[-1] == 120
        assert (usage.shortened > 0) == (memory == MemorySpec())


async def test_the_policy_none_fails_unsent(endpoint: Endpoint) -> None:
    spec = spec_of(endpoint, context=300, memory=MemorySpec(policy="none"), max_tokens=64)
    async with populace.local(models={"default": spec}) as world:
        with pytest.raises(populace.AgentError) as caught:
            await Talker().to_dist(world).talk(30)
    assert caught.value.kind == "model_context"
    assert 2 < len(endpoint.requests) < 30


# Several endpoints
async def test_equal_prefixes_go_to_the_same_endpoint() -> None:
    async with serving() as one, serving() as two:
        backend = OpenAIBackend([one.url, two.url], "m")
        await backend.start()
        for i in range(40):
            for prefix in ("a", "b", "c", "d"):
                messages = [
                    {"role": "system", "content": prefix * 50},
                    {"role": "user", "content": str(i)},
                ]
                await backend.answer(ModelRequest(i, (1, "p", i, 1, 0), messages))
        by_prefix = [
            Counter(r["messages"][0]["content"][0] for r in e.requests) for e in (one, two)
        ]
        for prefix in "abcd":
            assert sorted(c[prefix] for c in by_prefix) == [0, 40]
        one.delay = two.delay = 0.05
        before = len(one.requests), len(two.requests)
        await asyncio.gather(*(backend.answer(prompt("same")) for _ in range(40)))
        shares = len(one.requests) - before[0], len(two.requests) - before[1]
        assert min(shares) >= 12  # however alike they are, nobody waits while another is idle
        await backend.close()


async def test_a_dead_endpoint_among_several(endpoint: Endpoint) -> None:
    backend = OpenAIBackend(["http://127.0.0.1:9", endpoint.url], "m")
    await backend.start()
    responses = await asyncio.gather(*(backend.answer(prompt(str(i))) for i in range(50)))
    assert {r.text for r in responses} == {"hello"}
    assert (await backend.check())["answering"] == 1
    await backend.close()


# Limits
async def test_a_rate_is_kept_evenly() -> None:
    limiters = [RateLimiter(Limits(requests_per_minute=1200), OwnPace()) for _ in range(1)]
    shared = limiters[0]._store
    limiters += [RateLimiter(Limits(requests_per_minute=1200), shared) for _ in range(2)]
    sent: list[float] = []

    async def send(limiter: RateLimiter) -> None:
        await limiter.admit(1)
        sent.append(time.monotonic())

    began = time.monotonic()
    await asyncio.gather(*(send(limiters[i % 3]) for i in range(60)))
    passed = time.monotonic() - began
    assert 59 / 20 * 0.98 <= passed < 59 / 20 + 0.5
    for number, at in enumerate(sent):  # no crowd at any time
        assert at - began >= (number - 1) / 20


async def test_tokens_a_minute() -> None:
    limiter = RateLimiter(Limits(tokens_per_minute=60_000), OwnPace())
    began = time.monotonic()
    for _ in range(10):
        await limiter.admit(100)
        limiter.settle(100, 50)
    passed = time.monotonic() - began
    assert 0.35 < passed < 1.2  # 10 of 50 and the first presumed 100 at 1,000 a second


async def test_a_pause_holds_for_all() -> None:
    store = OwnPace()
    one, two = (RateLimiter(Limits(requests_per_minute=60_000), store) for _ in range(2))
    await one.pause(0.3)
    began = time.monotonic()
    await two.admit(1)
    assert time.monotonic() - began > 0.25


async def test_no_pause_is_longer_than_a_minute() -> None:
    store = OwnPace()
    await RateLimiter(Limits(requests_per_minute=60), store).pause(86400)
    pace, _ = await store.read()
    assert pace.request_at < time.time() + 61


def test_a_gate_grows_while_that_serves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from populace.models import gate as module

    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    gate = Gate(500)
    best = 60  # more slots than these serve nobody faster

    def second() -> None:
        gate.take(max(0, gate.free))
        rate = min(gate.slots, best) * 10
        for _ in range(rate):
            now[0] += 1 / rate
            gate.give_back()
            gate.take(1)

    for _ in range(60):
        second()
    assert 40 <= gate.slots <= 160
    before = gate.slots
    gate.pressure()
    assert gate.slots == before  # one may be chance
    for _ in range(2 * before):
        gate.pressure()  # the same moment: one cut
    assert gate.slots == int(before * 0.67)
    fixed = Gate(8, fixed=True)
    fixed.pressure()
    assert fixed.slots == 8


async def test_a_slot_is_held_until_its_answer_is_kept() -> None:
    gate = Gate(2, fixed=True)
    assert await gate.enter()
    assert await gate.enter()
    third = asyncio.ensure_future(gate.enter())
    gate.leave(answered=True)
    await asyncio.sleep(0)
    assert not third.done()
    gate.kept(1)
    assert await asyncio.wait_for(third, 1)
    fourth = asyncio.ensure_future(gate.enter())
    gate.leave()  # it was not asked at all
    assert await asyncio.wait_for(fourth, 1)


# Budget
async def test_a_budget_stops_within_what_is_under_way() -> None:
    store = OwnBudget()
    keepers = [BudgetKeeper({"tokens": 1000}, store, f"p{i}") for i in range(3)]
    asked = 0

    async def ask(keeper: BudgetKeeper) -> str | None:
        nonlocal asked
        presumed = Spent(80, 0.0, 1)
        over = await keeper.admit(presumed)
        if over is not None:
            return over
        asked += 1
        await asyncio.sleep(0.01)
        keeper.pay(presumed, Spent(50, 0.0, 1))
        return None

    for _ in range(3):
        results = await asyncio.gather(*(ask(keepers[i % 3]) for i in range(20)))
    assert results.count("1,000 tokens") == 20
    assert 1000 <= asked * 50 <= 1000 + 3 * 80


def test_prices(tmp_path: Any) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("m: {input: 2, output: 10}\n")
    table = PriceTable(path)
    spec = ModelSpec(backend="openai", base_url="http://x", model="m")
    assert table.of(spec) == (2, 10)
    assert table.of(spec.model_copy(update={"model": "n"})) is None
    path.write_text("m: {input: free}\n")
    with pytest.raises(
        InvalidInputError,
        match=r"price table .*prices.yaml: m: input: Input should be a valid number",
    ):
        PriceTable(path)


# Cache
async def test_answers_are_kept_across_runs(endpoint: Endpoint) -> None:
    spec = spec_of(endpoint, temperature=1.0)
    backend = make_backend(spec, Settings())
    await backend.start()
    cache = OwnCache()

    async def no_budget(run: str, budget: dict[str, Any]) -> BudgetKeeper:
        raise AssertionError

    limiter = RateLimiter(Limits(requests_per_minute=60_000), OwnPace())
    one = Serving(backend, spec, limiter, cache, no_budget)
    endpoint.respond = lambda body: answer(f"seed {body['seed']}")
    first = [await one.serve(prompt(agent=i), "r1", Terms(cache="read-write")) for i in range(50)]
    assert len({r.text for r in first}) == 50  # the same prompt, yet a draw for each
    for mode in ("read-write", "replay"):
        again = [await one.serve(prompt(agent=i), "r2", Terms(cache=mode)) for i in range(50)]
        assert [r.text for r in again] == [r.text for r in first]
    assert len(endpoint.requests) == 50
    assert one.accounts["r2"].total().kept == 100
    assert one.accounts["r2"].total().tokens_in == 0
    missing = await one.serve(prompt("other"), "r2", Terms(cache="replay"))
    assert missing.error_kind == "not_kept"
    assert len(endpoint.requests) == 50
    await one.serve(prompt(agent=1), "r3", Terms())
    assert len(endpoint.requests) == 51
    await backend.close()


def test_what_a_kept_answer_depends_on() -> None:
    spec = ModelSpec(backend="openai", base_url="http://x", model="m")
    base = cache_key(spec, prompt())
    assert cache_key(spec, prompt(agent=4)) != base
    assert cache_key(spec, prompt("other")) != base
    assert cache_key(spec, prompt(schema=SCHEMA)) != base
    assert cache_key(spec.model_copy(update={"model": "n"}), prompt()) != base
    assert cache_key(spec.model_copy(update={"base_url": "http://y"}), prompt()) == base
    long = Handling(context=32_000)
    assert cache_key(spec, prompt(), long) != base
    assert cache_key(spec, prompt(spare=(1, 2))) != base
    assert cache_key(spec, prompt(), weights="another.gguf") != base
    cold = cache_key(spec, prompt(temperature=0.0))
    assert cache_key(spec, prompt(agent=4, temperature=0.0)) == cold


# Mixtures
class Chooser(Agent):
    async def ask(self) -> str:
        return await self.model.ask("Say something.")


async def test_mixtures_by_weight_and_by_persona() -> None:
    models = {
        "default": ModelSpec(mixture=Mixture(weights={"small": 2, "large": 1})),
        "mixed": ModelSpec(mixture=Mixture(by="job", choose={"chef": "large", "*": "small"})),
        "small": ModelSpec(backend="scripted", script=ScriptSpec(text="small")),
        "large": ModelSpec(backend="scripted", script=ScriptSpec(text="large")),
    }
    told = []
    for workers in (1, 3):
        async with populace.local(models=models, seed=4, workers=workers) as world:
            people = await world.population(Chooser, count=31)
            told.append(list(await people.ask()))
            usage = world.accounts.by_model()
    assert told[0] == told[1]
    assert Counter(told[0]) == {"small": 21, "large": 10}
    assert told[0] != sorted(told[0], reverse=True)
    assert usage["small"]["requests"] == 21


@given(st.integers(0, 2**31), st.integers(1, 300))
def test_a_shuffle_by_place_is_a_permutation(seed: int, size: int) -> None:
    places = [shuffled_place(seed, "x", i, size) for i in range(size)]
    assert sorted(places) == list(range(size))


def test_wrong_specifications() -> None:
    for fields, complaint in (
        ({"mixture": {"weights": {}}}, "0 or more"),
        ({"mixture": {"by": "x"}}, "needs choose"),
        ({"mixture": {"weights": {"a": 1}, "by": "x", "choose": {"*": "a"}}}, "either weights"),
        ({"mixture": {"weights": {"a": 1}}, "model": "m"}, "no keys besides"),
        ({"backend": "vllm"}, "needs model"),
        ({"backend": "openai", "base_url": [], "model": "m"}, "at least one endpoint"),
        ({"backend": "openai", "base_url": ["x"], "model": "m"}, "http:// or https://"),
        ({"backend": "scripted", "engine": {"a": 1}}, "vllm backend alone"),
        ({"script": {"rules": [{"when": "(", "text": ""}]}, "backend": "scripted"}, "no regular"),
    ):
        with pytest.raises(ValidationError, match=complaint):
            ModelSpec.model_validate(fields)
    with pytest.raises(ValidationError, match="give tokens, money or requests"):
        Budget()


# Scripts
async def test_scripts_follow_the_prompt_and_wait_as_drawn() -> None:
    script = ScriptSpec(
        rules=[ScriptRule(when=r"colou?r of (\w+)", text="{1} is blue")],
        text="no idea",
        latency=Latency(median=0.01, sigma=0.5),
    )
    backend = make_backend(ModelSpec(backend="scripted", script=script), Settings())
    assert (await backend.answer(prompt("The color of grass?"))).text == "grass is blue"
    began = time.monotonic()
    responses: list[ModelResponse] = [await backend.answer(prompt(agent=i)) for i in range(20)]
    assert {r.text for r in responses} == {"no idea"}
    assert 0.1 < time.monotonic() - began < 1.5


async def test_who_is_not_wanted_any_more_leaves_its_time_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that was cancelled, and another that asks for one thing."""
    monkeypatch.setattr(limits, "_LOOK", 0.05)
    limiter = RateLimiter(Limits(requests_per_minute=120), OwnPace())
    wanted = True
    crowd = [asyncio.ensure_future(limiter.admit(1, lambda: wanted)) for _ in range(20)]
    await asyncio.sleep(0)
    other = asyncio.ensure_future(limiter.admit(1))
    await asyncio.sleep(0.1)
    assert not other.done()
    wanted = False
    async with asyncio.timeout(3):  # its turn would have come after ten seconds
        await asyncio.gather(*crowd)
        await other
    began = time.monotonic()
    for _ in range(4):
        await limiter.admit(1)
    assert time.monotonic() - began > 3 * 0.45


def test_one_block_of_code_in_a_text_is_what_was_asked_for() -> None:
    text = 'Sure, here it is:\n```json\n{"number": 4}\n```\nAnything else?'
    assert fit(ModelResponse(1, text=text), SCHEMA).data == {"number": 4}
    assert fit(ModelResponse(1, text=text + text), SCHEMA).error_kind == "schema"
    quoted = '{"number": 4, "why": "```\\n5\\n```"}'
    assert fit(ModelResponse(1, text=quoted), SCHEMA).data["number"] == 4
