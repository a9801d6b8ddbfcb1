"""Weak scaling: as many agents per worker, and more workers.

python -m benchmarks.weak_scaling [--agents-per-worker N] [--wait S] [--workers 1,2,4] [--json]

Each worker holds N dummy agents, which are made, wait, and answer with a random number; every
answer is checked, as in ``million``. With perfect scaling the wall time stays as it is while
there is a core for every process. Two efficiencies are told: by wall time, which the number of
cores bounds, and by CPU time per agent, which shows what the system itself adds as it grows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

import uvloop

from benchmarks.harness import ground, machine
from benchmarks.million import ours

REPEATS = 3


async def main(per_worker: int, wait: float, workers: list[int], as_json: bool) -> None:
    """Measure and print."""
    rows = []
    for count in workers:
        async with ground(count) as made:
            runs = [await ours(made, per_worker * count, wait, count) for _ in range(REPEATS)]
        keys = ("agents", "wall_s", "cpu_us_per_agent", "peak_mb")
        row = {key: statistics.median(run[key] for run in runs) for key in keys}
        rows.append({"workers": count, **row})
    for row in rows:
        row["wall_efficiency"] = rows[0]["wall_s"] / row["wall_s"]
        row["cpu_efficiency"] = rows[0]["cpu_us_per_agent"] / row["cpu_us_per_agent"]
    found: dict[str, Any] = {
        "agents_per_worker": per_worker,
        "wait_s": wait,
        "cores": len(os.sched_getaffinity(0)),
        "rows": [
            {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows
        ],
        "machine": machine(),
    }
    if as_json:
        print(json.dumps(found))
        return
    print(f"{per_worker:,} agents per worker, wait {wait:g} s; {found['machine']}")
    for row in found["rows"]:
        print("  ".join(f"{key} {value:,}" for key, value in row.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents-per-worker", type=int, default=250_000)
    parser.add_argument("--wait", type=float, default=1.0)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    counts = [int(part) for part in arguments.workers.split(",")]
    uvloop.run(main(arguments.agents_per_worker, arguments.wait, counts, arguments.json))
