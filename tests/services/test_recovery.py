"""Runs whose processes are killed: nothing is lost, doubled, or asked twice beyond what was under
way.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from aiohttp import web

from benchmarks.installation import Installation
from populace.cli.runs import Outcome, follow, submit
from shared.bus import NatsBus
from shared.messages.scenario import ScenarioSpec
from tests.conftest import unique, wait_until
from tests.endpoint import Endpoint, answer
from tests.services.test_runs import GAMES

COLUMNS = ["round", "population", "agent", "method", "call", "value", "answer", "error"]
SLOTS = 64


def respond(body: dict[str, Any]) -> web.StreamResponse:
    """Follows from the prompt and its seed alone."""
    told = json.dumps([body["messages"], body["seed"]])
    return answer(hashlib.blake2b(told.encode(), digest_size=4).hexdigest())


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    made = Installation(tmp_path, models="tests.services.quick_models")
    made.start_broker()
    yield made
    made.close()


def diaries(endpoint: Endpoint, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": "diaries",
        "scenario": "games:Diaries",
        "folder": GAMES,
        "seed": 11,
        "rounds": 3,
        "agents": {"count": 300, "workers": 2},
        "run": unique("r"),
        "models": {
            "default": {
                "backend": "openai",
                "base_url": endpoint.url,
                "model": unique("m"),
                "concurrency": SLOTS,
            }
        },
    }
    fields.update(more)
    return fields


async def watch(bus: NatsBus, installation: Installation, run: str) -> Outcome:
    outcome = Outcome(run)
    async with asyncio.timeout(90):
        async for status in follow(bus, installation.settings(), run, submitted=True):
            if status is not None:
                outcome.take(status)
    return outcome


def table(installation: Installation, run: str) -> list[dict[str, Any]]:
    path = installation.runs / run / "answers.parquet"
    rows: list[dict[str, Any]] = pq.read_table(path, columns=COLUMNS).to_pylist()
    return rows


async def undisturbed(
    bus: NatsBus, installation: Installation, endpoint: Endpoint, **more: Any
) -> tuple[list[dict[str, Any]], Outcome, int]:
    """What a run without any trouble gives: its answers, its end, its requests."""
    before = len(endpoint.requests)
    fields = diaries(endpoint, **more)
    await submit(bus, installation.settings(), ScenarioSpec.model_validate(fields))
    outcome = await watch(bus, installation, fields["run"])
    assert (outcome.state, outcome.reason) == ("finished", "")
    return table(installation, fields["run"]), outcome, len(endpoint.requests) - before


def asked(endpoint: Endpoint, since: int) -> Counter[str]:
    return Counter(json.dumps(b["messages"]) for b in endpoint.requests[since:])


async def test_a_worker_is_killed(installation: Installation, endpoint: Endpoint) -> None:
    installation.start("director", "recorder", "models", "env_service", "agent_host")
    endpoint.respond = respond
    endpoint.delay = 0.05
    bus = await NatsBus.connect(installation.settings(), installation.url)
    await installation.ready(bus)
    rows, first, requests = await undisturbed(bus, installation, endpoint)
    assert requests == 900 + 1
    before = len(endpoint.requests)
    fields = diaries(endpoint)
    run = await submit(bus, installation.settings(), ScenarioSpec.model_validate(fields))
    await wait_until(lambda: len(endpoint.requests) > before + 450, 60, "the middle of round 2")
    victims = await installation.workers(bus, run)
    assert len(victims) == 2
    os.kill(victims[0], signal.SIGKILL)
    outcome = await watch(bus, installation, run)
    assert (outcome.state, outcome.reason) == ("finished", "")
    assert table(installation, run) == rows
    assert [r.values for r in outcome.rows] == [r.values for r in first.rows]
    again = asked(endpoint, before)
    assert max(again.values()) <= 2
    assert len(endpoint.requests) - before <= requests + SLOTS + 8
    await bus.drain()
