"""Prompts that a model service took and can't or need not ask: handed on, or dropped."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from populace.models.accounts import Accounts
from shared.bus import NatsBus
from shared.messages.model import Terms
from shared.messages.scenario import Limits, MemorySpec, Status
from tests.conftest import Services, wait_until
from tests.endpoint import Endpoint, answer
from tests.services.test_models_under_fire import (
    openai,
    prompts,
    queue,
    three,  # noqa: F401 - a fixture
    wait_for_services,
)


@pytest.mark.slow
async def test_a_service_without_a_share_hands_on_what_it_took(
    three: Any,  # noqa: F811
    endpoint: Endpoint,
) -> None:
    """One request at a time for two services: the second takes the first's share, and its prompts.

    With an acknowledgement time of many seconds none may wait for that.
    """
    broker, start = three
    start()
    endpoint.delay = 0.05
    bus = await NatsBus.connect(broker.settings(), broker.url)
    await wait_for_services(bus, broker, 1)
    models = await queue(bus, broker, openai(endpoint, limits=Limits(concurrency=1)))
    waiting = [asyncio.ensure_future(models.request("default", r)) for r in prompts(models, 60)]
    await wait_until(lambda: len(endpoint.requests) > 3, 30, "the first answers")
    start()
    start()
    responses = await asyncio.wait_for(asyncio.gather(*waiting), 40)
    assert {r.text for r in responses} == {"hello"}
    assert len(endpoint.requests) == 60
    await models.close()
    await bus.drain()


async def test_a_service_that_stops_finishes_and_hands_on(
    three: Any,  # noqa: F811
    endpoint: Endpoint,
) -> None:
    """What left for the endpoint is answered, what did not is for others at once; none twice."""
    broker, start = three
    first = start()
    endpoint.delay = 0.5
    endpoint.respond = lambda body: answer(body["messages"][-1]["content"])
    bus = await NatsBus.connect(broker.settings(), broker.url)
    models = await queue(bus, broker, openai(endpoint, concurrency=20))
    waiting = [asyncio.ensure_future(models.request("default", r)) for r in prompts(models, 100)]
    await wait_until(lambda: len(endpoint.requests) >= 30, 30, "the middle")
    first.terminate()
    await asyncio.to_thread(first.wait, 15)
    asked = len(endpoint.requests)
    await wait_until(lambda: sum(t.done() for t in waiting) == asked, 10, "their answers")
    assert asked < 100
    start()
    responses = await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert [r.text for r in responses] == [f"number {i}" for i in range(100)]
    assert len(endpoint.requests) == 100
    await models.close()
    await bus.drain()


@pytest.mark.slow
async def test_what_was_taken_of_a_run_that_is_over_is_not_asked(
    services: Services, endpoint: Endpoint
) -> None:
    bus = await NatsBus.connect(services.settings(), services.broker.url)
    spec = openai(endpoint, concurrency=64, limits=Limits(requests_per_minute=120))
    models = await queue(bus, services.broker, spec)
    run = models._run
    waiting = [asyncio.ensure_future(models.request("default", r)) for r in prompts(models, 60)]
    await wait_until(lambda: len(endpoint.requests) >= 2, 30, "the first requests")
    told = Status(kind="ended", run=run, state="cancelled")
    subjects = services.settings().subjects
    await bus.append(subjects.run_status(run), told.model_dump_json(exclude_none=True).encode())
    await asyncio.sleep(0.2)
    asked = len(endpoint.requests)
    await asyncio.sleep(2.5)  # five more would have had their turn
    assert len(endpoint.requests) <= asked + 1
    left, _ = await bus.held(
        subjects.stream_models, subjects.model_queue(models._pool_of["default"])
    )
    assert left <= 8  # dropped as their turn comes
    await models.close()
    await asyncio.gather(*waiting)
    await bus.drain()


async def test_nobody_waits_for_them_any_more(services: Services, endpoint: Endpoint) -> None:
    """Prompts whose askers have given up are not asked."""
    bus = await NatsBus.connect(services.settings(), services.broker.url)
    spec = openai(endpoint, concurrency=1)
    models = await queue(bus, services.broker, spec)
    (first,) = prompts(models, 1)
    assert not (await models.request("default", first)).error_kind  # its queue is served
    models._timeout = 1.0
    endpoint.delay = 0.3
    responses = await asyncio.gather(*(models.request("default", r) for r in prompts(models, 40)))
    assert {r.error_kind for r in responses} == {"", "timeout"}
    asked = len(endpoint.requests)
    await asyncio.sleep(1.5)
    assert len(endpoint.requests) <= asked + 1 < 10
    await models.close()
    await bus.drain()


async def test_two_runs_ask_one_endpoint_in_their_own_ways(
    services: Services, endpoint: Endpoint
) -> None:
    """Whoever opened the pool does not decide for the other."""
    strict = openai(endpoint, context=300, memory=MemorySpec(policy="none"), repair=False)
    lenient = strict.model_copy(update={"memory": MemorySpec(), "repair": True})
    endpoint.respond = lambda body: answer("no JSON" if "response_format" in body else "fine")
    found = []
    for spec in (strict, lenient):
        bus = await NatsBus.connect(services.settings(), services.broker.url)
        models = await queue(bus, services.broker, spec)
        long, structured = prompts(models, 2)
        long.messages[0]["content"] = "word " * 500
        structured.schema = {"type": "object"}
        before = len(endpoint.requests)
        first = await models.request("default", long)
        await models.request("default", structured)
        found.append((first.error_kind, len(endpoint.requests) - before))
        await models.close()
        await bus.drain()
    assert found == [("context", 1), ("", 3)]


async def test_a_budget_that_two_services_share_is_paid_at_once(
    three: Any,  # noqa: F811
    endpoint: Endpoint,
) -> None:
    """Promises are corrected as soon as answers come, not when the next prompt is admitted."""
    broker, start = three
    start()
    start()
    bus = await NatsBus.connect(broker.settings(), broker.url)
    await wait_for_services(bus, broker, 2)
    spec = openai(endpoint, max_tokens=4000)
    models = await queue(bus, broker, spec, Terms(budget={"tokens": 6000}))
    # Each is presumed to take 4,000 tokens, and takes 14: one after the other gets in.
    began = time.monotonic()
    for request in prompts(models, 12):
        response = await asyncio.wait_for(models.request("default", request), 10)
        assert response.error_kind == ""
    assert time.monotonic() - began < 10
    await models.close()
    await bus.drain()


async def test_accounts_of_very_many_rounds(services: Services, endpoint: Endpoint) -> None:
    bus = await NatsBus.connect(services.settings(), services.broker.url)
    models = await queue(bus, services.broker, openai(endpoint))
    requests = prompts(models, 100)
    for number, request in enumerate(requests):
        request.key = (1, "p", 0, number, 0)
    await asyncio.gather(*(models.request("default", r) for r in requests))
    bucket = await bus.bucket(services.settings().subjects.bucket_usage)
    accounts, keys = Accounts(), []
    for entry in await bucket.entries(f"{models._run}.>"):
        accounts.take_json(entry.value)
        keys.append(entry.key)
    assert len(keys) == 4  # of 32 rounds each
    assert accounts.total().requests == 100
    assert {r for r, _ in accounts.by} == set(range(100))
    await models.close()
    await bus.drain()
