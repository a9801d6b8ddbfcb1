"""Memory of idle agents that hold a persona.

python -m benchmarks.memory [--agents N] [--personas P] [--json]

Makes N agents, each with a persona of 200 characters out of P different ones, which the agents
of one worker share by reference where they are equal. Reported is by how much the workers grew
for each agent: the object, its attributes, and its place in the shard; the state itself (the
texts, once per worker) is taken off. Every agent is then asked for its persona's length.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import uvloop

from benchmarks.agents import Person
from benchmarks.harness import Ground, ground, machine
from populace import each
from populace.world import open_world
from shared.ids import new_id

REPEATS = 3
WORKERS = 2
LENGTH = 200


async def measure(ground: Ground, count: int, different: int) -> dict[str, float]:
    """Bytes by which the workers grow."""
    texts = [f"Person {i}, ".ljust(LENGTH, "x") for i in range(different)]
    personas = [texts[i * 7919 % different] for i in range(count)]
    async with open_world(
        ground.settings, ground.url, run=new_id("bench"), seed=1, workers=WORKERS
    ) as world:
        before = sum(s.rss for s in await world.worker_stats())
        people = await world.population(Person, each(personas), count=count)
        stats = await world.worker_stats()
        if sum(s.agents for s in stats) != count:
            raise SystemExit("agents are missing")
        lengths = await people.length().reduce("mean")
        if (lengths.count, lengths.mean, lengths.failed) != (count, LENGTH, 0):
            raise SystemExit("an agent does not hold its persona")
    grown = sum(s.rss for s in stats) - before
    state = WORKERS * different * (LENGTH + 49)  # a str of Python's is 49 bytes and its text
    return {
        "bytes_per_agent": grown / count,
        "state_bytes_per_agent": state / count,
        "beyond_state": (grown - state) / count,
        "workers_mb": sum(s.rss for s in stats) / 1e6,
    }


async def main(count: int, different: int, as_json: bool) -> None:
    """Measure and print."""
    async with ground(WORKERS) as made:
        runs = [await measure(made, count, different) for _ in range(REPEATS)]
    found: dict[str, Any] = {"agents": count, "personas": different, "workers": WORKERS}
    for key in runs[0]:
        found[key] = round(statistics.median(run[key] for run in runs), 1)
    found["machine"] = machine()
    if as_json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:<24}{value}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1_000_000)
    parser.add_argument("--personas", type=int, default=1_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    uvloop.run(main(arguments.agents, arguments.personas, arguments.json))
