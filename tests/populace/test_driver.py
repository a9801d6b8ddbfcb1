"""Whatever asyncio code stands inside an agent must behave, though no Task drives it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import populace
from populace._runtime.driver import CallTask
from tests.conftest import eventually
from tests.populace.manners import Manners
from tests.populace.sample import Counter

EXPECTED: dict[str, Any] = {
    "timeout_expires": "timed out",
    "timeout_over_platform_sleep": "timed out",
    "timeout_not_needed": "in time",
    "wait_for": "ok",
    "gather": [0, 1, 2, 3, 4],
    "group": 10,
    "group_fails": "ValueError 1",
    "group_parent_waits_outside": "ValueError cancelling=0",
    "queue_and_lock": [0, 1, 2, 3, 4],
    "shield": "kept",
    "contextvars": ["none", "blue", "blue", "blue", "blue"],
    "current_task": [True, True, True, True, True],
    "cancels_itself": "('enough',) 0",
    "to_thread": 6,
    "same_future_twice": [7, 7],
    "done_future": 3,
    "failed_future": "'late'",
    "odd_awaitable": "an agent awaited 'nonsense', which asyncio does not know",
    "async_generators": 6,
    "http": "hello timed out",
    "sleeps": True,
    "collected": True,
}


@pytest.mark.parametrize("method", EXPECTED)
async def test_manners(world: populace.World, method: str) -> None:
    agent = Manners().to_dist(world)
    assert await getattr(agent, method)().with_timeout(20) == EXPECTED[method]


async def test_everything_at_once(world: populace.World) -> None:
    """Many agents in the midst of it don't disturb one another."""
    methods = [m for m in EXPECTED if m != "http"]
    agents = await world.population(Manners, count=len(methods) * 5)
    calls = [getattr(agents[i], method)() for i, method in enumerate(methods * 5)]
    answers = await asyncio.gather(*calls)
    assert answers == [EXPECTED[m] for m in methods * 5]


async def test_cancelled_calls_clean_up(world: populace.World) -> None:
    agent, witness = Manners().to_dist(world), Counter().to_dist(world)
    pending = agent.cleans_up(witness)
    await eventually(witness.seen, [0])
    pending.cancel()
    assert await agent.read() == ["cleaning", "clean"]  # waits for its turn


async def test_a_call_may_swallow_its_cancellation(world: populace.World) -> None:
    agent, witness = Manners().to_dist(world), Counter().to_dist(world)
    pending = agent.swallows(witness)
    await eventually(witness.seen, [0])
    pending.cancel()
    assert await agent.read() == ["swallowed"]


async def test_the_task_protocol() -> None:
    """What asyncio.Task offers, a CallTask offers."""
    public = {name for name in dir(asyncio.Task) if not name.startswith("_")}
    missing = public - set(dir(CallTask)) - {"print_stack", "set_result", "set_exception"}
    assert missing == set()
