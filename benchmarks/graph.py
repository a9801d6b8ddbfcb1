"""A random directed graph of calls: each call's arguments are the answers of earlier calls.

python -m benchmarks.graph [--calls N] [--agents A] [--seed S] [--json]

The graph is drawn from the seed: call i goes to a random agent, and takes the answers of 0 to 4
earlier calls (2 in the mean), given as placeholders. Nothing but the last answers comes back to
the caller. For 1, 2 and 4 workers the result is compared with the sequential evaluation of the
same graph: every answer that no other call took, and the sum of all numbers that each agent
made. The critical path is the depth of the graph times what one call takes that waits for
another, measured in the same world as a chain of calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

import uvloop

from benchmarks.agents import Node, combine
from benchmarks.harness import Ground, ground, machine
from populace.world import World, open_world
from shared.collector import settle_collector
from shared.ids import new_id

REPEATS = 3
CHAIN = 300


class Graph:
    """Which agent each call goes to, and whose answers it takes."""

    def __init__(self, calls: int, agents: int, seed: int) -> None:
        source = random.Random(seed)
        self.agents = agents
        self.target = [source.randrange(agents) for _ in range(calls)]
        self.inputs = [
            [source.randrange(i) for _ in range(source.randint(0, 4))] if i else []
            for i in range(calls)
        ]
        depth = [0] * calls
        used = bytearray(calls)
        for i, inputs in enumerate(self.inputs):
            depth[i] = 1 + max((depth[j] for j in inputs), default=0)
            for j in inputs:
                used[j] = 1
        self.depth = max(depth)
        self.last = [i for i in range(calls) if not used[i]]

    def sequential(self) -> tuple[list[int], list[int]]:
        """The values of calls that no other took, and each agent's sum."""
        values: list[int] = []
        sums = [0] * self.agents
        for i, inputs in enumerate(self.inputs):
            values.append(combine(i, [values[j] for j in inputs]))
            sums[self.target[i]] += values[-1]
        return [values[i] for i in self.last], [s % Node.MODULUS for s in sums]


async def hop(world: World) -> float:
    """Seconds that one call of a chain takes, each waiting for the one before."""
    nodes = await world.population(Node, count=8, name=new_id("chain"))
    began = time.perf_counter()
    value = nodes[0].combine(0, [])
    for i in range(1, CHAIN):
        value = nodes[i % 8].combine(i, [value])
    await value
    return (time.perf_counter() - began) / CHAIN


async def distributed(ground: Ground, graph: Graph, workers: int) -> dict[str, float]:
    """One evaluation over so many workers; raises if it differs from the sequential one."""
    async with open_world(
        ground.settings, ground.url, run=new_id("bench"), seed=1, workers=workers
    ) as world:
        nodes = await world.population(Node, count=graph.agents)
        one = await hop(world)
        proxies = [nodes[i] for i in range(graph.agents)]
        settle_collector()
        before, began = ground.cpu(), time.perf_counter()
        calls: list[Any] = []
        for i, (target, inputs) in enumerate(zip(graph.target, graph.inputs, strict=True)):
            calls.append(proxies[target].combine(i, [calls[j] for j in inputs]))
        values = await asyncio.gather(*(calls[i] for i in graph.last))
        wall = time.perf_counter() - began
        after = ground.cpu()
        sums = list(await nodes.total())
    if (values, sums) != graph.sequential():
        raise SystemExit(f"{workers} workers: not what the sequential evaluation gives")
    used = {f"{k}_cpu_us": (after[k] - before[k]) / len(calls) * 1e6 for k in after}
    return {
        "wall_s": wall,
        "cpu_us_per_call": sum(used.values()),
        **used,
        "hop_us": one * 1e6,
        "critical_path_s": one * graph.depth,
    }


async def main(calls: int, agents: int, seed: int, as_json: bool) -> None:
    """Measure and print."""
    graph = Graph(calls, agents, seed)
    began = time.perf_counter()
    graph.sequential()
    found: dict[str, Any] = {
        "calls": calls,
        "agents": agents,
        "mean_in_degree": round(statistics.fmean(map(len, graph.inputs)), 3),
        "depth": graph.depth,
        "last_calls": len(graph.last),
        "sequential_s": round(time.perf_counter() - began, 4),
        "machine": machine(),
    }
    for workers in (1, 2, 4):
        async with ground(workers) as made:
            runs = [await distributed(made, graph, workers) for _ in range(REPEATS)]
        found[f"workers_{workers}"] = {
            key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]
        }
    if as_json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:<16}{value}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    uvloop.run(main(arguments.calls, arguments.agents, arguments.seed, arguments.json))
