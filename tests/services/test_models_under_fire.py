"""Models that misbehave, workers that die, limits, budgets, replays: counted at the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from nats.js.errors import NotFoundError

from populace.answers import Results
from populace.estimate import _beyond
from populace.models import client as client_module
from populace.models.accounts import Accounts, Usage
from populace.models.client import QueuedModels
from populace.runs import control, submit
from populace.world import open_world
from shared.bus import NatsBus
from shared.errors import NoRespondersError
from shared.messages.model import ModelRequest, Terms, pool_name
from shared.messages.scenario import Limits, ModelSpec, ScenarioSpec, ScriptSpec
from shared.service import everybody
from shared.streams import ensure_streams
from tests.conftest import Broker, Services, start_service, unique, wait_until
from tests.endpoint import Endpoint, answer
from tests.services.games import Asker
from tests.services.test_runs import game, play, watch


def openai(endpoint: Endpoint, **more: Any) -> ModelSpec:
    return ModelSpec(backend="openai", base_url=endpoint.url, model=unique("m"), **more)


async def usage_of(bus: NatsBus, services: Services, run: str) -> Usage:
    bucket = await bus.bucket(services.settings().subjects.bucket_usage)
    accounts = Accounts()
    for entry in await bucket.entries(f"{run}.>"):
        accounts.take_json(entry.value)
    return accounts.total()


class Faulty:
    """A server that does everything wrong now and then, by a seeded draw."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.seen = Counter[str]()
        self.began = time.monotonic()

    def respond(self, body: dict[str, Any]) -> web.StreamResponse:
        if len(body["messages"][-1]["content"]) > 4000:
            return self.say("too long", 400, "maximum context length is 1000 tokens")
        storm = time.monotonic() - self.began < 0.5
        draw = self.random.random()
        if storm or draw < 0.08:
            self.seen["429"] += 1
            wait = {"Retry-After": "0.5" if storm else "0.05"} if draw < 0.04 or storm else {}
            return web.Response(status=429, headers=wait, text="slow down")
        if draw < 0.16:
            return self.say("500", 500, "oops")
        if draw < 0.20:
            self.seen["invalid"] += 1
            return web.Response(text='{"choices": [', content_type="application/json")
        if draw < 0.24:
            return self.say("nothing", 200, "[]")
        if draw < 0.30:
            self.seen["usage"] += 1
            wrong = {"prompt_tokens": -5, "completion_tokens": "many"}
            choice = {"message": {"content": "fine"}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": wrong})
        self.seen["fine"] += 1
        return answer("fine")

    def say(self, kind: str, status: int, text: str) -> web.Response:
        self.seen[kind] += 1
        return web.Response(status=status, text=text)


async def faulty_handler(endpoint: Endpoint, faulty: Faulty) -> Callable[..., Any]:
    """Besides bad answers: slow ones, cut bodies, and connections that never say anything."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        endpoint.requests.append(body)
        draw = faulty.random.random()
        if draw < 0.01:
            faulty.seen["silent"] += 1
            await asyncio.sleep(6)
        elif draw < 0.05:
            faulty.seen["slow"] += 1
            await asyncio.sleep(0.2)
        elif draw < 0.09:
            faulty.seen["cut"] += 1
            response = web.StreamResponse(headers={"Content-Length": "500"})
            await response.prepare(request)
            await response.write(b'{"choices": [{"mess')
            assert request.transport is not None
            request.transport.abort()
            return response
        return faulty.respond(body)

    return handle


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.slow)])
async def test_many_agents_and_a_faulty_server(services: Services, count: int) -> None:
    faulty = Faulty()
    endpoint = Endpoint()
    app = web.Application(client_max_size=8 << 20)
    app.router.add_post("/v1/chat/completions", await faulty_handler(endpoint, faulty))
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    run = unique("r")
    bus = await NatsBus.connect(services.settings(), services.broker.url)
    try:
        async with open_world(
            services.settings(),
            services.broker.url,
            run=run,
            seed=1,
            workers=2,
            models={"default": openai(endpoint, timeout=3.0, concurrency=100)},
        ) as world:
            faulty.began = time.monotonic()
            people = await world.population(Asker, count=count)
            answers: Results = await people.say()
            usage = await usage_of(bus, services, run)
    finally:
        await bus.drain()
        await runner.cleanup()
    assert len(answers) == count
    assert {a for a in answers.values if a is not None} == {"fine"}
    kinds = {"model_rate_limit", "model_unreachable", "model_refused", "model_timeout"}
    failures = Counter(error.kind for error in answers.errors.values())
    assert set(failures) <= kinds, failures
    assert failures.total() < count / 20
    assert all(
        faulty.seen[kind] > 0 for kind in ("429", "500", "invalid", "nothing", "usage", "cut")
    )
    assert faulty.seen["slow"] > 0
    assert usage.requests == count
    assert usage.failed == failures.total()
    assert usage.attempts == len(endpoint.requests)
    assert usage.estimated > 0


async def test_long_prompts_are_cut_rather_than_refused(
    services: Services, endpoint: Endpoint
) -> None:
    def respond(body: dict[str, Any]) -> web.Response:
        if sum(len(m["content"]) for m in body["messages"]) > 4000:
            return web.Response(status=400, text="maximum context length is 1000 tokens")
        return answer("fine")

    endpoint.respond = respond
    async with open_world(
        services.settings(),
        services.broker.url,
        run=unique("r"),
        seed=1,
        workers=1,
        models={"default": openai(endpoint, max_tokens=100)},
    ) as world:
        people = await world.population(Asker, count=20)
        answers = await people.say_at_length(9000)
    assert list(answers) == ["fine"] * 20


async def queue(bus: NatsBus, broker: Broker, spec: ModelSpec, terms: Terms | None = None) -> Any:
    """A client of its own, as a worker has one."""
    settings = broker.settings()
    await ensure_streams(bus, settings.subjects)
    pools = await bus.bucket(settings.subjects.bucket_pools)
    await pools.put(pool_name(spec), spec.model_dump_json().encode())
    models = QueuedModels(
        bus, settings.subjects, {"default": spec}, unique("r"), timeout=60, terms=terms
    )
    await models.start()
    return models


def prompts(models: QueuedModels, count: int) -> list[ModelRequest]:
    return [
        ModelRequest(
            models.next_number(), (1, "p", i, 1, 0), [{"role": "user", "content": f"number {i}"}]
        )
        for i in range(count)
    ]


@pytest.fixture
def three(own_broker: Callable[..., Broker], tmp_path: Path) -> Any:
    """A broker, and model services that a test may kill; gives both, and starts one."""
    broker = own_broker()
    started = []

    def start(module: str = "tests.services.quick_models") -> Any:
        started.append(start_service(module, broker, tmp_path / f"models{len(started)}.log"))
        return started[-1]

    yield broker, start
    for process in started:
        process.terminate()
    for process in started:
        process.wait(20)


async def wait_for_services(bus: NatsBus, broker: Broker, count: int) -> None:
    ping = broker.settings().subjects.service_ping("models")
    async with asyncio.timeout(30):
        while len(await everybody(bus, ping, f"{bus.process}.pings")) < count:
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_three_services_keep_one_rate(three: Any, endpoint: Endpoint) -> None:
    """600 a minute: after 9 seconds, within 2 per cent of 90, and never a burst."""
    broker, start = three
    for _ in range(3):
        start()
    times: list[float] = []

    def respond(_: Any) -> web.Response:
        times.append(time.monotonic())
        return answer("fine")

    endpoint.respond = respond
    bus = await NatsBus.connect(broker.settings(), broker.url)
    await wait_for_services(bus, broker, 3)
    models = await queue(bus, broker, openai(endpoint, limits=Limits(requests_per_minute=600)))
    waiting = [asyncio.ensure_future(models.request("default", r)) for r in prompts(models, 120)]
    await wait_until(lambda: len(times) > 5, 30, "the first answers")
    first = times[5]
    await asyncio.sleep(9)
    in_time = sum(1 for t in times if first < t <= first + 9)
    assert 90 * 0.98 <= in_time <= 90 * 1.02
    for start_at in times:
        assert sum(1 for t in times if start_at <= t < start_at + 1) <= 12
    responses = await asyncio.gather(*waiting)
    assert {r.text for r in responses} == {"fine"}
    assert len(times) == 120
    await models.close()
    await bus.drain()


@pytest.mark.slow
async def test_three_services_share_the_slots(three: Any, endpoint: Endpoint) -> None:
    broker, start = three
    for _ in range(3):
        start()
    endpoint.delay = 0.05
    bus = await NatsBus.connect(broker.settings(), broker.url)
    await wait_for_services(bus, broker, 3)
    models = await queue(bus, broker, openai(endpoint, limits=Limits(concurrency=7)))
    responses = await asyncio.gather(*(models.request("default", r) for r in prompts(models, 300)))
    assert {r.text for r in responses} == {"hello"}
    assert 4 <= endpoint.most <= 7
    await models.close()
    await bus.drain()


async def test_pools_of_one_endpoint_take_turns(three: Any, endpoint: Endpoint) -> None:
    """Two models at an endpoint that allows one request at a time, and one that nobody uses."""
    broker, start = three
    start()
    endpoint.delay = 0.05
    bus = await NatsBus.connect(broker.settings(), broker.url)
    await wait_for_services(bus, broker, 1)
    name = unique("m")
    specs = [
        ModelSpec(
            backend="openai",
            base_url=endpoint.url,
            model=name,
            timeout=60 + i,
            limits=Limits(concurrency=1),
        )
        for i in range(3)
    ]
    buses = [await NatsBus.connect(broker.settings(), broker.url) for _ in specs]
    clients = [await queue(*pair) for pair in zip(buses, [broker] * 3, specs, strict=True)]
    waiting = [
        models.request("default", request)
        for models in clients[:2]
        for request in prompts(models, 10)
    ]
    responses = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert {r.text for r in responses} == {"hello"}
    assert (endpoint.most, len(endpoint.requests)) == (1, 20)
    for models, own in zip(clients, buses, strict=True):
        await models.close()
        await own.drain()
    await bus.drain()


@pytest.mark.parametrize("forgetful", [False, True])
async def test_a_killed_worker_bills_nothing_twice(
    three: Any, endpoint: Endpoint, forgetful: bool
) -> None:
    """All are answered; what was answered and kept before the kill is not asked again.

    Also if the broker has forgotten what it had given out, as one may that is killed as well.
    """
    broker, start = three
    first = start()
    endpoint.delay = 0.3
    endpoint.respond = lambda body: answer(body["messages"][-1]["content"])
    bus = await NatsBus.connect(broker.settings(), broker.url)
    spec = openai(endpoint, concurrency=50)
    models = await queue(bus, broker, spec)
    waiting = [asyncio.ensure_future(models.request("default", r)) for r in prompts(models, 200)]
    await wait_until(lambda: len(endpoint.requests) >= 125, 30, "the middle")
    first.kill()
    first.wait(10)
    asked = len(endpoint.requests)
    if forgetful:
        stream = broker.settings().subjects.stream_models
        await bus._js.delete_consumer(stream, f"pool-{pool_name(spec)}")
    start()
    responses = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert [r.text for r in responses] == [f"number {i}" for i in range(200)]
    assert len(endpoint.requests) <= 200 + 50  # those in the slots, until they were kept
    again = Counter(b["messages"][-1]["content"] for b in endpoint.requests)
    assert max(again.values()) <= 2
    assert asked < 200
    await models.close()
    await bus.drain()


async def test_what_is_in_hand_is_not_asked_by_another(three: Any, endpoint: Endpoint) -> None:
    """The broker gives it out again, as it has heard nothing of it for too long."""
    broker, start = three
    endpoint.delay = 2.5
    bus = await NatsBus.connect(broker.settings(), broker.url)
    for _ in range(3):
        start("tests.services.mute_models")
    await wait_for_services(bus, broker, 3)
    spec = openai(endpoint, concurrency=50)
    models = await queue(bus, broker, spec)
    waiting = [asyncio.ensure_future(models.request("default", r)) for r in prompts(models, 40)]
    stream, again = broker.settings().subjects.stream_models, 0
    while not all(task.done() for task in waiting):
        with contextlib.suppress(NotFoundError):  # not yet
            info = await bus._js.consumer_info(stream, f"pool-{pool_name(spec)}")
            again = max(again, info.num_redelivered or 0)
        await asyncio.sleep(0.05)
    assert [r.text for r in await asyncio.gather(*waiting)] == ["hello"] * 40
    assert again > 0
    assert len(endpoint.requests) == 40
    await models.close()
    await bus.drain()


async def test_a_service_tells_how_much_waits(three: Any, endpoint: Endpoint) -> None:
    broker, start = three
    start()
    endpoint.delay = 1.5
    bus = await NatsBus.connect(broker.settings(), broker.url)
    spec = openai(endpoint, concurrency=1)
    models = await queue(bus, broker, spec)
    waiting = [asyncio.ensure_future(models.request("default", r)) for r in prompts(models, 32)]
    asked = broker.settings().subjects.service_stats("models")
    async with asyncio.timeout(20):
        while True:
            try:
                told = json.loads((await bus.request(asked, b"", timeout=2)).data)
            except NoRespondersError:
                told = {"endpoints": []}
            pools = [e["data"].get(pool_name(spec), {}) for e in told["endpoints"]]
            if any(pool.get("queued") and pool["oldest"] > 0 for pool in pools):
                break
            await asyncio.sleep(0.05)
    for one in waiting:
        one.cancel()
    await models.close()
    await bus.drain()


async def test_the_broker_is_away_while_models_answer(
    own_broker: Callable[..., Broker], tmp_path: Path, endpoint: Endpoint
) -> None:
    """Answers that were lost with a connection are found among those that were kept."""
    broker = own_broker()
    port = int(broker.url.rpartition(":")[2])
    service = start_service("tests.services.quick_models", broker, tmp_path / "models.log")
    endpoint.delay = 1.0
    bus = await NatsBus.connect(broker.settings(), broker.url)
    models = await queue(bus, broker, openai(endpoint, concurrency=40))
    waiting = [asyncio.ensure_future(models.request("default", r)) for r in prompts(models, 40)]
    await wait_until(lambda: len(endpoint.requests) >= 40, 30, "the requests")
    broker.process.kill()
    broker.process.wait()
    await asyncio.sleep(1.5)
    own_broker(port)
    began = time.monotonic()
    responses = await asyncio.wait_for(asyncio.gather(*waiting), 50)
    assert {r.text for r in responses} == {"hello"}
    assert time.monotonic() - began < 30
    assert len(endpoint.requests) <= 80
    await models.close()
    await bus.drain()
    service.terminate()
    service.wait(20)


async def test_an_answer_that_cannot_travel_harms_no_other(
    services: Services, endpoint: Endpoint
) -> None:
    """Half of a surrogate pair is valid JSON, but no text."""

    def respond(body: dict[str, Any]) -> web.Response:
        number = body["messages"][-1]["content"].rpartition(" ")[2]
        return answer('{"a": "\\ud83d"}' if number == "5" else '{"a": "fine"}')

    endpoint.respond = respond
    bus = await NatsBus.connect(services.settings(), services.broker.url)
    models = await queue(bus, services.broker, openai(endpoint))
    requests = prompts(models, 16)
    for request in requests:
        request.schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    responses = await asyncio.wait_for(
        asyncio.gather(*(models.request("default", r) for r in requests)), 20
    )
    assert [r.error_kind for r in responses] == ["schema" if i == 5 else "" for i in range(16)]
    assert "can't be passed on" in responses[5].error
    await models.close()
    await bus.drain()


# Whole runs
def asking(endpoint: Endpoint, **more: Any) -> dict[str, Any]:
    model = openai(endpoint, price={"input": 1.0, "output": 10.0}).model_dump(
        mode="json", exclude_none=True
    )
    model.pop("engine")
    found = game(params={"ask": True}, agents={"count": 60, "workers": 2}, rounds=3)
    return {**found, "models": {"default": model}, **more}


async def test_a_budget_ends_a_run_and_says_where(services: Services, endpoint: Endpoint) -> None:
    outcome = await play(services, asking(endpoint, budget={"tokens": 14 * 100}))
    assert outcome.state == "cancelled"
    assert "budget (1,400 tokens) is spent" in outcome.reason
    assert "in round 2" in outcome.reason
    manifest = json.loads((services.runs / outcome.run / "manifest.json").read_text())
    total = manifest["usage"]["total"]
    spent = total["tokens_in"] + total["tokens_out"]
    assert 1400 <= spent <= 1400 + 14 * 8
    assert total["requests"] == spent // 14
    assert total["money"] == pytest.approx(spent / 14 * (11 * 1 + 3 * 10) / 1e6)
    assert len(outcome.rows) == 2
    assert outcome.rows[1].failures["model_budget"] == 120 - total["requests"]
    for budget in ({"requests": 70}, {"money": 70 * 41 / 1e6}):
        outcome = await play(services, asking(endpoint, budget=budget))
        assert outcome.state == "cancelled"
        assert 70 <= outcome.rows[0].answers + outcome.rows[1].answers <= 78


async def test_a_second_run_is_served_from_the_first(
    services: Services, endpoint: Endpoint
) -> None:
    endpoint.respond = lambda body: answer(f"seed {body['seed']}")
    scenario = asking(endpoint, cache="read-write")
    first = await play(services, scenario)
    assert first.state == "finished"
    asked = len(endpoint.requests)
    assert asked == 180 + 1  # and the check
    # The same endpoint, but it must not be asked:
    second = await play(services, {**scenario, "cache": "replay"})
    assert second.state == "finished", second.reason
    assert len(endpoint.requests) == asked
    import pyarrow.parquet as pq

    columns = ["round", "agent", "value", "answer", "error"]
    tables = [
        pq.read_table(services.runs / o.run / "answers.parquet", columns=columns)
        for o in (first, second)
    ]
    assert tables[0].equals(tables[1])
    assert len(set(tables[0]["answer"].to_pylist())) == 180
    assert second.rows[0].usage == {"kept": 60}
    third = await play(services, {**scenario, "cache": "replay", "seed": 77})
    assert third.state == "failed"
    assert "no answer to this prompt was kept" in third.reason


@pytest.mark.parametrize("every", [1, 2, 4, 7, 10])
def test_an_estimate_of_many_rounds(every: int) -> None:
    """Rounds beyond those that are played may ask now and then, and with longer prompts."""
    accounts = Accounts()
    for number in range(1, 61):
        if number % every == 0:
            accounts.by[number, "default"] = Usage(
                requests=10, tokens_in=100 * number, tokens_out=20
            )
    spec = ScenarioSpec.model_validate({"name": "x", "scenario": "a:B", "rounds": 600})
    found = _beyond(accounts, spec, 60)["default"]
    asking = [n for n in range(61, 601) if n % every == 0]
    assert found.requests == pytest.approx(10 * len(asking), rel=0.06)
    assert found.tokens_out == pytest.approx(20 * len(asking), rel=0.06)
    assert found.tokens_in == pytest.approx(sum(100 * n for n in asking), rel=0.2)
    narrow = spec.model_copy(update={"models": {"default": ModelSpec(context=300)}})
    bounded = _beyond(accounts, narrow, 60)["default"]
    assert bounded.tokens_in <= 300 * bounded.requests + 1
    assert _beyond(accounts, spec.model_copy(update={"rounds": 60}), 60) == {}


async def test_an_estimate_is_near_what_is_counted(services: Services) -> None:
    from populace.estimate import estimate
    from populace.scenario_file import load_class, read_scenario
    from shared.code import CodeLoader
    from tests.conftest import ROOT

    file = read_scenario(
        ROOT / "examples/guess_average/dummy.yaml", {"agents.count": 500, "rounds": 4}
    )
    settings = services.settings()
    cls, params = load_class(file.spec, CodeLoader(settings.prefixes, [ROOT]), file)
    found = await estimate(file.spec, cls, params, settings)
    outcome = await play(services, file.spec.model_dump(mode="json", exclude_none=True))
    assert outcome.state == "finished", outcome.reason
    total = Usage()
    for row in outcome.rows:
        total.merge(row.usage)
    assert found.requests == total.requests == 2000
    assert found.tokens == pytest.approx(total.tokens_in + total.tokens_out, rel=0.15)


async def test_what_was_under_way_at_a_cancel_is_counted(
    services: Services, endpoint: Endpoint
) -> None:
    endpoint.delay = 1.0
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    fields = asking(endpoint)
    fields["models"]["default"]["concurrency"] = 30
    run = await submit(bus, settings, ScenarioSpec.model_validate(fields))
    following = asyncio.ensure_future(watch(bus, services, run))
    await wait_until(lambda: len(endpoint.requests) > 25, 30, "requests under way")
    await control(bus, settings, run, "cancel")
    outcome = await following
    assert outcome.state == "cancelled"
    total = json.loads((services.runs / run / "manifest.json").read_text())["usage"]["total"]
    assert total["attempts"] == len(endpoint.requests) - 1  # less the check
    assert total["tokens_in"] == 11 * total["attempts"]
    await bus.drain()


async def test_an_answer_that_was_lost_on_its_way_is_found(
    services: Services, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection broke, and yet it did not come: it was kept before it was sent."""
    monkeypatch.setattr(client_module, "_STALLED", 1.0)
    bus = await NatsBus.connect(services.settings(), services.broker.url)
    models = await queue(bus, services.broker, openai(endpoint))
    monkeypatch.setattr(models, "_receive", lambda message: None)
    await models._subscription.unsubscribe()  # nobody hears the answers
    responses = await asyncio.wait_for(
        asyncio.gather(*(models.request("default", r) for r in prompts(models, 5))), 20
    )
    assert [r.text for r in responses] == ["hello"] * 5
    assert len(endpoint.requests) == 5
    await models.close()
    await bus.drain()


@pytest.mark.parametrize("scripted", [False, True])
async def test_prompts_that_nobody_has_in_hand_are_asked_again(
    services: Services, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, scripted: bool
) -> None:
    """Their queue has lost them; as long as it holds them they are left alone."""
    monkeypatch.setattr(client_module, "_STALLED", 1.0)
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    spec = openai(endpoint)
    if scripted:
        spec = ModelSpec(backend="scripted", script=ScriptSpec(text=unique()))
    models = await queue(bus, services.broker, spec)
    pool, nobody = pool_name(spec), "nobody-serves-it"
    models._pool_of["default"] = nobody
    models._specs[nobody], models._per_message[nobody] = spec, 8
    asked = [asyncio.ensure_future(models.request("default", r)) for r in prompts(models, 3)]
    await wait_until(lambda: len(models._queued) == 3, 10, "their queue has them")
    await models._find_lost()
    assert len(models._queued) == 3
    lost = settings.subjects.model_queue(nobody, models._run)
    await bus.purge(settings.subjects.stream_models, lost)
    models._pool_of["default"] = pool  # where they go now
    responses = await asyncio.wait_for(asyncio.gather(*asked), 20)
    assert [r.error_kind for r in responses] == [""] * 3
    assert len(endpoint.requests) == (0 if scripted else 3)
    await models.close()
    await bus.drain()


async def test_an_estimate_of_growing_prompts_and_a_rare_model(services: Services) -> None:
    from populace.estimate import estimate
    from populace.scenario_file import load_class
    from shared.code import CodeLoader
    from tests.conftest import ROOT

    scripted = {"backend": "scripted", "script": {"text": "la la la"}}
    models = {
        "default": scripted,
        "small": {**scripted, "price": {"input": 1.0}},
        "large": {**scripted, "price": {"input": 1000.0}},
        "both": {"mixture": {"weights": {"small": 0.99, "large": 0.01}}},
    }
    fields = game(scenario="games:Chorus", agents={"count": 300}, rounds=3, models=models)
    settings = services.settings()
    spec = ScenarioSpec.model_validate(fields)
    cls, params = load_class(spec, CodeLoader(settings.prefixes, [ROOT]))
    found = await estimate(spec, cls, params, settings)
    assert found.growing
    outcome = await play(services, fields)
    assert outcome.state == "finished", outcome.reason
    total = Usage()
    for row in outcome.rows:
        total.merge(row.usage)
    assert found.requests == total.requests == 900
    assert found.tokens == pytest.approx(total.tokens_in + total.tokens_out, rel=0.15)
    assert found.money == pytest.approx(total.money, rel=0.15)
