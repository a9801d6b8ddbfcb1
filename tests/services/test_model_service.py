"""The model service as a process: queues, crashes, runs that are over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from populace.models.client import QueuedModels
from shared.bus import NatsBus
from shared.codec import pack_plain
from shared.messages.control import CheckModel, ModelChecked
from shared.messages.model import ModelRequest, pool_name
from shared.messages.scenario import ModelSpec, ScriptSpec, Status
from shared.service import ask
from shared.streams import ensure_streams
from tests.conftest import Broker, Services, start_service, unique, wait_until


def prompt(models: QueuedModels, agent: int) -> ModelRequest:
    return ModelRequest(
        models.next_number(), (1, "p", agent, 1, 0), [{"role": "user", "content": "hi"}]
    )


async def client(
    bus: NatsBus, broker: Broker, spec: ModelSpec, run: str, timeout: float = 30
) -> QueuedModels:
    settings = broker.settings()
    await ensure_streams(bus, settings.subjects)
    pools = await bus.bucket(settings.subjects.bucket_pools)
    await pools.put(pool_name(spec), spec.model_dump_json().encode())
    models = QueuedModels(bus, settings.subjects, {"default": spec}, run, timeout=timeout)
    await models.start()
    return models


@pytest.fixture
async def bus(services: Services) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(services.settings(), services.broker.url)
    yield made
    await made.drain()


async def test_prompts_are_answered_through_the_queue(services: Services, bus: NatsBus) -> None:
    spec = ModelSpec(backend="scripted", script=ScriptSpec(text="n={number}"))
    models = await client(bus, services.broker, spec, unique("r"))
    answers = await asyncio.gather(
        *(models.request("default", prompt(models, i)) for i in range(1000))
    )
    assert len({a.text for a in answers}) > 900
    assert {a.backend for a in answers} == {"scripted"}
    again = await models.request("default", prompt(models, 5))
    assert again.text == answers[5].text
    await models.close()


async def test_nobody_serves_a_pool(services: Services, bus: NatsBus) -> None:
    spec = ModelSpec(
        backend="openai",
        base_url="http://127.0.0.1:9",
        model=unique("m"),
        api_key_env="MISSING_API_KEY",
    )
    models = await client(bus, services.broker, spec, unique("r"), timeout=0.5)
    response = await models.request("default", prompt(models, 1))
    assert response.error_kind == "timeout"
    assert "no model answered within 0.5 s" in response.error
    await models.close()


async def test_closing_fails_what_waits(services: Services, bus: NatsBus) -> None:
    spec = ModelSpec(backend="scripted", script=ScriptSpec(latency=20))
    models = await client(bus, services.broker, spec, unique("r"))
    waiting = asyncio.ensure_future(models.request("default", prompt(models, 1)))
    await asyncio.sleep(0.1)
    await models.close()
    assert (await waiting).error_kind == "internal"


async def test_prompts_of_a_run_that_is_over_are_dropped(services: Services, bus: NatsBus) -> None:
    run = unique("over")
    spec = ModelSpec(
        backend="scripted", script=ScriptSpec(latency=0.5, text=unique()), concurrency=1
    )
    models = await client(bus, services.broker, spec, run)
    assert (await models.request("default", prompt(models, 0))).error_kind == ""
    told = Status(kind="ended", run=run, state="cancelled")
    subjects = services.settings().subjects
    await bus.append(subjects.run_status(run), told.model_dump_json(exclude_none=True).encode())
    late = [asyncio.ensure_future(models.request("default", prompt(models, i))) for i in range(200)]
    other_bus = await NatsBus.connect(services.settings(), services.broker.url)
    other = await client(other_bus, services.broker, spec, unique("r"))
    assert (await other.request("default", prompt(other, 1))).error_kind == ""  # their turn came
    assert not any(task.done() for task in late)
    await models.close()
    assert {task.result().error_kind for task in late if task.done()} <= {"internal"}
    await asyncio.gather(*late)
    await other.close()
    await other_bus.drain()


async def test_checking_a_model(services: Services, bus: NatsBus) -> None:
    subject = services.settings().subjects.model_check

    async def check(spec: ModelSpec) -> ModelChecked:
        return await ask(bus, subject, CheckModel(spec=spec), ModelChecked, timeout=60)

    assert (await check(ModelSpec(backend="scripted"))).ok
    real = await check(ModelSpec())
    assert real.ok
    assert real.details["backend"] == "embedded"
    dead = await check(ModelSpec(backend="openai", base_url="http://127.0.0.1:9", model="m"))
    assert not dead.ok
    assert "can't be reached" in dead.error


async def test_what_cannot_be_read_is_dropped(services: Services, bus: NatsBus) -> None:
    spec = ModelSpec(backend="scripted", script=ScriptSpec(text=unique()))
    models = await client(bus, services.broker, spec, unique("r"))
    subject = services.settings().subjects.model_queue(pool_name(spec))
    await bus.append(subject, b"\xc1noise")
    await bus.append(subject, pack_plain(["inbox", "run", [[1, 2]]]))
    response = await models.request("default", prompt(models, 1))
    assert response.error_kind == ""
    await models.close()


async def test_a_killed_model_worker_loses_no_prompt(
    own_broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had taken goes to another once its time to acknowledge is over."""
    broker = own_broker()
    first = start_service("tests.services.quick_models", broker, tmp_path / "first.log")
    bus = await NatsBus.connect(broker.settings(), broker.url)
    spec = ModelSpec(backend="scripted", script=ScriptSpec(latency=1.0))
    models = await client(bus, broker, spec, unique("r"))
    waiting = [
        asyncio.ensure_future(models.request("default", prompt(models, i))) for i in range(20)
    ]
    log = tmp_path / "first.log"
    await wait_until(lambda: "pool is served" in log.read_text(), 20, "the pool")
    await asyncio.sleep(0.3)  # it has them now, and answers in a second
    first.kill()
    first.wait(10)
    began = time.monotonic()
    second = start_service("tests.services.quick_models", broker, tmp_path / "second.log")
    answers = await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert [a.error_kind for a in answers] == [""] * 20
    assert time.monotonic() - began < 20
    await models.close()
    await bus.drain()
    second.terminate()
    assert second.wait(20) == 0
