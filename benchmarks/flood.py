"""A flood of single calls to one shard: does memory stay bounded, and is every call answered?

python -m benchmarks.flood [--calls N] [--slow S] [--json]

One agent on one worker gets N calls (a million), all made before the first is awaited; with
``--slow`` it computes so many seconds for each, so that calls come in far faster than they are
done. The highest resident memory of each process is reported: of the caller, which holds a
placeholder per call, of the worker and of the broker, which hold no more than flow control lets
through. Every answer is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import psutil
import uvloop

from benchmarks.agents import Slow
from benchmarks.harness import Ground, ground, machine, watching
from populace.world import open_world
from shared.ids import new_id


@contextlib.contextmanager
def peaks(ground: Ground) -> Iterator[dict[str, float]]:
    """Highest resident memory by kind of process, in MB."""
    found = {"caller": 0.0, "worker": 0.0, "broker": 0.0}

    def look() -> None:
        for name, processes in (
            ("caller", [psutil.Process()]),
            ("worker", ground.host.children(recursive=True)),
            ("broker", [ground.broker]),
        ):
            for process in processes:
                found[name] = max(found[name], process.memory_info().rss / 1e6)

    with watching(look, 0.05):
        yield found


async def main(count: int, slow: float, as_json: bool) -> None:
    """Measure and print."""
    async with ground(1) as made:
        with peaks(made) as memory:
            async with open_world(
                made.settings, made.url, run=new_id("bench"), seed=1, workers=1
            ) as world:
                agent = (await world.population(Slow, slow, count=1))[0]
                before, began = made.cpu(), time.perf_counter()
                calls = [agent.add(i) for i in range(count)]
                for i, call in enumerate(calls):
                    if await call != i + 1:
                        raise SystemExit(f"call {i} got another's answer")
                wall = time.perf_counter() - began
                after = made.cpu()
                handled = await agent.handled()
        if handled != count:
            raise SystemExit(f"the agent handled {handled} of {count} calls")
    found: dict[str, Any] = {
        "calls": count,
        "slow_s": slow,
        "wall_s": round(wall, 3),
        "cpu_us_per_call": round(sum(after[k] - before[k] for k in after) / count * 1e6, 2),
        **{f"peak_{name}_mb": round(value) for name, value in memory.items()},
        "machine": machine(),
    }
    if as_json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:<18}{value}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    uvloop.run(main(arguments.calls, arguments.slow, arguments.json))
