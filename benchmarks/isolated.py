"""One process per agent: how fast they start, what they weigh, and whether all cores work.

python -m benchmarks.isolated [--agents N] [--rounds R] [--json]

N agents with a process each are made, called, and made to compute; then as many in one worker do
the same work. Every answer is compared with the same computation done here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import psutil
import uvloop

from benchmarks.agents import Worker, toil
from benchmarks.harness import Ground, ground, machine
from populace.world import open_world
from shared.ids import new_id

REPEATS = 3


async def measure(ground: Ground, count: int, rounds: int, isolated: bool) -> dict[str, float]:
    """One way of placing the agents."""
    async with open_world(
        ground.settings, ground.url, run=new_id("bench"), seed=1, workers=1
    ) as world:
        began = time.perf_counter()
        agents = await world.population(Worker, count=count, isolated=isolated)
        made = time.perf_counter() - began
        began = time.perf_counter()
        if list(await agents.compute(1)) != [toil(i, 1) for i in range(count)]:
            raise SystemExit("wrong answers")
        called = time.perf_counter() - began
        began = time.perf_counter()
        answers = list(await agents.compute(rounds))
        computed = time.perf_counter() - began
        pids = set(await agents.pid())
        private = [psutil.Process(pid).memory_full_info().uss for pid in pids]
    sample = range(0, count, max(1, count // 4))
    if [answers[i] for i in sample] != [toil(i, rounds) for i in sample]:
        raise SystemExit("wrong answers")
    if len(pids) != (count if isolated else 1):
        raise SystemExit(f"{len(pids)} processes for {count} agents")
    return {
        "creation_s": made,
        "creation_ms_per_agent": made / count * 1e3,
        "private_mb_per_process": statistics.fmean(private) / 1e6,
        "population_call_ms": called * 1e3,
        "compute_s": computed,
    }


async def main(count: int, rounds: int, as_json: bool) -> None:
    """Measure and print."""
    found: dict[str, Any] = {"agents": count, "machine": machine()}
    async with ground(1) as made:
        for name, isolated in (("isolated", True), ("one_worker", False)):
            runs = [await measure(made, count, rounds, isolated) for _ in range(REPEATS)]
            found[name] = {k: round(statistics.median(r[k] for r in runs), 3) for k in runs[0]}
    found["speedup"] = round(found["one_worker"]["compute_s"] / found["isolated"]["compute_s"], 2)
    if as_json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:<12}{value}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    uvloop.run(main(arguments.agents, arguments.rounds, arguments.json))
