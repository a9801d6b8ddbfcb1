"""Calls to one environment by many agents, and events to many listeners.

python -m benchmarks.environments [--agents N] [--times T] [--json]

N agents on two workers increment one attribute T times each, all at once, and again one after the
other; the count must be exact, and every increment is journalled before it is answered. Beside it,
in the same run, a bare NATS service that answers one request per call (with nats-py's own
requests, a thousand at a time), without journal. Then an event that N agents listen to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import nats
import psutil
import uvloop

from benchmarks.agents import Counter, Hearer, Incrementer, Square
from benchmarks.harness import Ground, cpu_seconds, ground, machine
from populace.world import open_world
from shared.ids import new_id

REPEATS = 3
EVENTS = 100

_BARE = """
import asyncio, sys, nats, uvloop
async def main():
    client = await nats.connect(sys.argv[1])
    count = 0
    async def add(message):
        nonlocal count
        count += 1
        await message.respond(b"%d" % count)
    await client.subscribe("bare.add", cb=add)
    await client.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()
uvloop.run(main())
"""


def _keeper_cpu(ground: Ground) -> float:
    assert ground.keeper is not None
    return sum(cpu_seconds(child) for child in ground.keeper.children(recursive=True))


async def increments(ground: Ground, count: int, times: int, method: str) -> dict[str, float]:
    """All agents add; raises if the sum is not exact."""
    async with open_world(
        ground.settings, ground.url, run=new_id("bench"), seed=1, workers=2
    ) as world:
        counter = await world.environment(Counter, "counter")
        agents = await world.population(Incrementer, count=count)
        before, keeper, began = ground.cpu(), _keeper_cpu(ground), time.perf_counter()
        answers = await getattr(agents, method)("counter", times)
        wall = time.perf_counter() - began
        after, kept = ground.cpu(), _keeper_cpu(ground)
        if list(answers) != [times] * count or await counter.get("count") != count * times:
            raise SystemExit("an increment was lost or doubled")
    calls = count * times
    return {
        "wall_us": wall / calls * 1e6,
        "environment_cpu_us": (kept - keeper) / calls * 1e6,
        "worker_cpu_us": (after["worker"] - before["worker"]) / calls * 1e6,
        "broker_cpu_us": (after["broker"] - before["broker"]) / calls * 1e6,
    }


async def bare(ground: Ground, calls: int) -> dict[str, float]:
    """A request per call to a bare service."""
    service = subprocess.Popen(
        [sys.executable, "-c", _BARE, ground.url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert service.stdout is not None
        service.stdout.readline()
        client = await nats.connect(ground.url)
        process = psutil.Process(service.pid)
        before, began = cpu_seconds(process), time.perf_counter()
        for _ in range(0, calls, 1000):
            await asyncio.gather(
                *(client.request("bare.add", b"", timeout=30) for _ in range(1000))
            )
        wall = time.perf_counter() - began
        used = cpu_seconds(process) - before
        last = int((await client.request("bare.add", b"", timeout=5)).data)
        if last != calls + 1:
            raise SystemExit("the bare service lost a request")
        await client.close()
    finally:
        service.kill()
        service.wait()
    return {"wall_us": wall / calls * 1e6, "environment_cpu_us": used / calls * 1e6}


async def events(ground: Ground, count: int) -> dict[str, float]:
    """One place, many listeners; raises if any hears too little or too much."""
    async with open_world(
        ground.settings, ground.url, run=new_id("bench"), seed=1, workers=2
    ) as world:
        square = await world.environment(Square, "square")
        agents = await world.population(Hearer, count=count)
        await agents.hear("square")
        began = time.perf_counter()
        await asyncio.gather(*(square.say("hello") for _ in range(EVENTS)))
        told = time.perf_counter() - began
        while (await agents.heard().reduce("mean")).mean != EVENTS:
            if time.perf_counter() - began > 60:
                raise SystemExit("an event is missing")
        wall = time.perf_counter() - began
        if set(await agents.heard()) != {EVENTS}:
            raise SystemExit("an event came where it should not")
    return {
        "event_us": told / EVENTS * 1e6,
        "deliveries": count * EVENTS,
        "delivery_us": wall / (count * EVENTS) * 1e6,
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}


async def main(count: int, times: int, as_json: bool) -> None:
    """Measure and print."""
    found: dict[str, Any] = {"agents": count, "times": times, "machine": machine()}
    async with ground(2, keeper=True) as made:
        ways: dict[str, list[dict[str, float]]] = {}
        for _ in range(REPEATS):
            at_once = await increments(made, count, times, "add")
            ways.setdefault("all at once", []).append(at_once)
            in_turn = await increments(made, count, times, "add_in_turn")
            ways.setdefault("in turn", []).append(in_turn)
            ways.setdefault("bare NATS requests", []).append(await bare(made, count * times))
            ways.setdefault("events", []).append(await events(made, count))
    for way, runs in ways.items():
        found[way] = medians(runs)
    if as_json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:<20}{value}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("POPULACE_LOG_LEVEL", "error")
    uvloop.run(main(arguments.agents, arguments.times, arguments.json))
