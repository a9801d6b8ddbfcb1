"""What a call costs: CPU microseconds in caller, worker and broker; memory of an idle agent.

python -m benchmarks.calls [--calls N] [--json]

One population call to N agents, N single calls to N agents, and N single calls to one agent,
over a real broker and two worker processes; every answer is checked. Then agents on one worker
that call agents on the other and await each answer: one pair, and a hundred at once. Medians of
three.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import uvloop

from benchmarks.agents import Plain, Player
from benchmarks.harness import Ground, ground, machine
from populace.world import open_world
from shared.ids import new_id

WORKERS = 2
REPEATS = 3
IN_FLIGHT = 10_000


async def measure(ground: Ground, count: int, way: str) -> dict[str, float]:
    """CPU and wall time of ``count`` calls made in one way."""
    async with open_world(
        ground.settings, ground.url, run=new_id("bench"), seed=1, workers=WORKERS
    ) as world:
        agents = await world.population(Plain, count=count if way != "one agent" else 1)
        before, began = ground.cpu(), time.perf_counter()
        if way == "population":
            answers = list(await agents.add(41))
            expected: list[int] = [42] * count
        else:
            proxies = [agents[i] for i in range(len(agents))]
            answers = []
            for start in range(0, count, IN_FLIGHT):
                calls = [
                    proxies[i % len(proxies)].add(i)
                    for i in range(start, min(count, start + IN_FLIGHT))
                ]
                for call in calls:
                    answers.append(await call)
            expected = list(range(1, count + 1))
        wall = time.perf_counter() - began
        after = ground.cpu()
        if answers != expected:
            raise SystemExit(f"{way}: wrong answers")
    used = {name: (after[name] - before[name]) / count * 1e6 for name in before}
    return {**used, "total": sum(used.values()), "wall": wall / count * 1e6}


async def ping_pong(ground: Ground, rallies: int, length: int) -> dict[str, float]:
    """Calls between agents on two workers, a number of rallies side by side.

    Returns the median and 99th percentile of a call's time there and back, and calls a second.
    """
    async with open_world(
        ground.settings, ground.url, run=new_id("bench"), seed=1, workers=WORKERS
    ) as world:
        players = await world.population(Player, count=2 * rallies)
        began = time.perf_counter()
        taken = await asyncio.gather(
            *(players[i].rally(f"player/{rallies + i}", length) for i in range(rallies))
        )
        wall = time.perf_counter() - began
        pids = list(await players.pid())
    if set(pids[:rallies]) & set(pids[rallies:]):
        raise SystemExit("both players are on one worker")
    times = sorted(seconds for row in taken for seconds in row)
    return {
        "p50_us": times[len(times) // 2] * 1e6,
        "p99_us": times[len(times) * 99 // 100] * 1e6,
        "calls_per_s": len(times) / wall,
    }


async def idle_memory(ground: Ground, count: int) -> float:
    """Bytes by which the workers grow for each agent, its object and its slot."""
    async with open_world(
        ground.settings, ground.url, run=new_id("bench"), seed=1, workers=WORKERS
    ) as world:
        before = sum(s.rss for s in await world.worker_stats())
        await world.population(Plain, count=count)
        stats = await world.worker_stats()
        if sum(s.agents for s in stats) != count:
            raise SystemExit("agents are missing")
        return (sum(s.rss for s in stats) - before) / count


async def main(count: int, as_json: bool) -> None:
    """Measure and print."""
    found: dict[str, Any] = {"machine": machine(), "calls": count, "workers": WORKERS}
    async with ground(WORKERS) as made:
        for way in ("population", "single", "one agent"):
            runs = [await measure(made, count, way) for _ in range(REPEATS)]
            found[way] = {
                key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]
            }
        for name, rallies, length in (("ping-pong", 1, 2000), ("ping-pong of 100", 100, 200)):
            games = [await ping_pong(made, rallies, length) for _ in range(REPEATS)]
            found[name] = {k: round(statistics.median(g[k] for g in games), 1) for k in games[0]}
        found["bytes per idle agent"] = round(await idle_memory(made, count * 5))
    if as_json:
        print(json.dumps(found))
        return
    print(f"{count:,} calls of a plain method, {WORKERS} workers; {found['machine']}")
    print("CPU microseconds per call (median of 3)")
    print(f"{'':<34}{'caller':>8}{'worker':>8}{'broker':>8}{'total':>8}{'wall':>8}")
    names = {
        "population": "one population call",
        "single": "10,000 single calls at once",
        "one agent": "the same, all to one agent",
    }
    for way, name in names.items():
        row = found[way]
        cells = "".join(
            f"{row[key]:>8.2f}" for key in ("caller", "worker", "broker", "total", "wall")
        )
        print(f"{name:<34}{cells}")
    for name in ("ping-pong", "ping-pong of 100"):
        row = found[name]
        print(
            f"{name}: p50 {row['p50_us']:,.0f} µs, p99 {row['p99_us']:,.0f} µs, "
            f"{row['calls_per_s']:,.0f} calls/s"
        )
    print(f"memory per idle agent: {found['bytes per idle agent']:,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    uvloop.run(main(arguments.calls, arguments.json))
