"""A million dummy agents: each waits, then returns a random number of its own.

python -m benchmarks.million [--agents N] [--wait S] [--workers W] [--json]

Everything counts: making the agents, the calls over a real broker to worker processes, and
every answer, which is checked against what its agent's random stream must give. Beside it, in
the same run, plain asyncio: one process, a task per agent, gathered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import uvloop

from benchmarks.agents import Dummy
from benchmarks.harness import Ground, ground, machine, watching
from populace._random import AgentRandom, round_key, stream_key, stream_state
from populace.world import open_world
from shared.ids import new_id

SEED = 7
REPEATS = 3


@contextlib.contextmanager
def peak_memory(ground: Ground) -> Iterator[dict[str, float]]:
    """Highest sum of the proportional memory of all our processes, in MB, while it lasts."""
    found = {"peak_mb": 0.0}
    own = [psutil.Process(), ground.broker, ground.host]

    def look() -> None:
        total = sum(p.memory_info().rss for p in [*own, *ground.host.children(recursive=True)])
        found["peak_mb"] = max(found["peak_mb"], total / 1e6)

    with watching(look, 0.1):
        yield found


async def ours(ground: Ground, count: int, wait: float, workers: int) -> dict[str, Any]:
    """One run; raises if any answer is not its agent's."""
    with peak_memory(ground) as memory:
        async with open_world(
            ground.settings, ground.url, run=new_id("bench"), seed=SEED, workers=workers
        ) as world:
            before, began = ground.cpu(), time.perf_counter()
            agents = await world.population(Dummy, count=count)
            made = time.perf_counter() - began
            answers = agents.guess(wait) if wait else agents.pick()
            received = 0
            total = 0.0
            sample: list[tuple[int, float]] = []
            seen = bytearray(count)
            async for batch in answers.batches():
                if batch.errors:
                    raise SystemExit(f"an agent failed: {next(iter(batch.errors.values()))}")
                received += len(batch)
                total += sum(batch.values)
                for agent in batch.agents:
                    seen[agent] += 1
                sample.append((batch.agents[0], batch.values[0]))
            wall = time.perf_counter() - began
            after = ground.cpu()
    if received != count or seen.count(1) != count:
        raise SystemExit(f"{received} answers for {count} agents")
    key = round_key(stream_key(SEED, "dummy"), 0)
    for agent, value in sample:
        if value != AgentRandom(stream_state(key, agent)).random() * 100:
            raise SystemExit(f"agent {agent} gave another's answer")
    return {
        "agents": count,
        "answers": received,
        "mean": total / received,
        "wall_s": wall,
        "creation_s": made,
        "cpu_us_per_agent": sum(after[k] - before[k] for k in after) / count * 1e6,
        **{f"{k}_cpu_us": (after[k] - before[k]) / count * 1e6 for k in after},
        "peak_mb": memory["peak_mb"],
    }


def plain_asyncio(count: int, wait: float) -> None:
    """The reference: an object and a task per agent in one process; prints its figures."""

    class Agent:
        def __init__(self, source: random.Random) -> None:
            self.source = source

        async def guess(self) -> float:
            if wait:
                await asyncio.sleep(wait)
            return self.source.random() * 100

    async def run() -> dict[str, float]:
        began = time.perf_counter()
        source = random.Random(SEED)
        agents = [Agent(source) for _ in range(count)]
        answers = await asyncio.gather(*(agent.guess() for agent in agents))
        return {"wall_s": time.perf_counter() - began, "mean": statistics.fmean(answers)}

    found = asyncio.run(run())
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps(found))


def reference(count: int, wait: float) -> dict[str, float]:
    """Plain asyncio in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.million", "--reference"]
    done = subprocess.run(
        [*command, "--agents", str(count), "--wait", str(wait)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


async def main(count: int, wait: float, workers: int, repeats: int, as_json: bool) -> None:
    """Measure both in turn, and print medians."""
    runs, plain = [], []
    async with ground(workers) as made:
        for _ in range(repeats):
            runs.append(await ours(made, count, wait, workers))
            plain.append(reference(count, wait))
    found: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    found["asyncio_wall_s"] = statistics.median(p["wall_s"] for p in plain)
    found["asyncio_peak_mb"] = statistics.median(p["peak_mb"] for p in plain)
    found["ratio"] = statistics.median(
        run["wall_s"] / p["wall_s"] for run, p in zip(runs, plain, strict=True)
    )
    found["wait_s"], found["workers"], found["machine"] = wait, workers, machine()
    found = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
    if as_json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:<18}{value:,}" if isinstance(value, (int, float)) else f"{key:<18}{value}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1_000_000)
    parser.add_argument("--wait", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--reference", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reference:
        plain_asyncio(arguments.agents, arguments.wait)
    else:
        uvloop.run(
            main(
                arguments.agents,
                arguments.wait,
                arguments.workers,
                arguments.repeats,
                arguments.json,
            )
        )
