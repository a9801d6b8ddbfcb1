"""How long a run stands still when a worker dies, and what surviving costs while nothing does.

python -m benchmarks.recovery [--kills N] [--agents N] [--million N] [--repeats N] [--json]

Recovery: a worker of a run is killed with kill -9 in the middle of a round; the time is from there
to the first request that the model gets from the run's next life.

Cost: the same runs with ``durability: round`` and with ``none``, in turn, as ratios of the medians:
very many dummies, and 2,000 agents with a model whose answers take 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos import SLOTS, watch
from benchmarks.counting import CountingModel, counting_model
from benchmarks.harness import machine
from benchmarks.installation import MODULES, ROOT, Installation
from populace.runs import submit
from shared.bus import Message, NatsBus
from shared.ids import new_id
from shared.messages.scenario import ScenarioSpec, Status

_MILLION_WITHIN = 900.0
ROUNDS = 3


def diaries(model: CountingModel, agents: int, durability: str) -> dict[str, Any]:
    """Agents with a model, a memory and an environment."""
    return {
        "name": "recovery",
        "scenario": "diaries:Diaries",
        "folder": str(ROOT / "benchmarks"),
        "rounds": ROUNDS,
        "agents": {"count": agents, "workers": 2},
        "run": new_id("recovery"),
        "durability": durability,
        "models": {
            "default": {
                "backend": "openai",
                "base_url": model.url,
                "model": "m",
                "concurrency": SLOTS * 2,
            }
        },
    }


def sleepers(agents: int, wait: float, durability: str) -> dict[str, Any]:
    """Dummies without a model."""
    return {
        "name": "sleepers",
        "scenario": "diaries:Sleepers",
        "folder": str(ROOT / "benchmarks"),
        "rounds": ROUNDS,
        "agents": {"count": agents, "workers": 2},
        "params": {"pause": wait},
        "run": new_id("sleepers"),
        "durability": durability,
        "models": {"default": {"backend": "scripted"}},
    }


async def play(
    installation: Installation, bus: NatsBus, fields: dict[str, Any]
) -> tuple[float, list[dict[str, Any]]]:
    """Play a run; returns seconds from its start to its end, and what its rounds noted."""
    times: dict[str, float] = {}

    def note(message: Message) -> None:
        status = Status.model_validate_json(message.data)
        times.setdefault(status.kind, status.time)

    subject = installation.settings().subjects.run_status(fields["run"])
    listening = await bus.subscribe(subject, note)
    run = await submit(bus, installation.settings(), ScenarioSpec.model_validate(fields))
    outcome = await watch(bus, installation, run, _MILLION_WITHIN)
    await listening.unsubscribe()
    if outcome.state != "finished":
        raise SystemExit(f"{run} is {outcome.state}: {outcome.reason}")
    return times["ended"] - times["started"], [row.values for row in outcome.rows]


async def kill_one(installation: Installation, bus: NatsBus, model: CountingModel) -> float:
    """Kill a worker in the middle; returns the seconds until the next life asks the model."""
    fields = diaries(model, 400, "round")
    first = len(model.requests)
    run = await submit(bus, installation.settings(), ScenarioSpec.model_validate(fields))
    following = asyncio.ensure_future(watch(bus, installation, run))
    restarted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    seen = 0

    def note(message: Message) -> None:
        nonlocal seen
        status = Status.model_validate_json(message.data)
        seen += status.kind == "started"
        if seen == 2 and not restarted.done():
            restarted.set_result(None)

    listening = await bus.subscribe(installation.settings().subjects.run_status(run), note)
    while len(model.requests) < first + 600:
        await asyncio.sleep(0.002)
    victim = (await installation.workers(bus, run))[0]
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    await asyncio.wait_for(restarted, 60)
    count = len(model.requests)
    while len(model.requests) == count:
        await asyncio.sleep(0.002)
    taken = time.monotonic() - began
    outcome = await following
    await listening.unsubscribe()
    if outcome.state != "finished":
        raise SystemExit(f"{run} is {outcome.state}: {outcome.reason}")
    return taken


async def cost(
    installation: Installation, bus: NatsBus, make: Any, repeats: int
) -> dict[str, float]:
    """Median seconds of each level, in turn, and the ratios to none."""
    seconds: dict[str, list[float]] = {"none": [], "round": [], "call": []}
    noted: list[Any] = []
    for _ in range(repeats):
        for durability, held in seconds.items():
            taken, values = await play(installation, bus, make(durability))
            held.append(taken)
            noted.append(values)
    if any(values != noted[0] for values in noted):
        raise SystemExit("the runs did not come to the same")
    medians = {name: statistics.median(held) for name, held in seconds.items()}
    ratios = {
        f"{n}_ratio": round(m / medians["none"], 3) for n, m in medians.items() if n != "none"
    }
    return {**{name: round(median, 3) for name, median in medians.items()}, **ratios}


async def measure(
    kills: int, agents: int, million: int, repeats: int, waits: list[float]
) -> dict[str, Any]:
    """All of it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        installation = Installation(Path(folder))
        installation.start_broker()
        try:
            installation.start(*MODULES)
            bus = await NatsBus.connect(installation.settings(), installation.url)
            await installation.ready(bus)
            found: dict[str, Any] = {}
            async with counting_model(0.05) as model:
                times = [await kill_one(installation, bus, model) for _ in range(kills)]
                if times:
                    found["recovery_seconds"] = {
                        "kills": kills,
                        "median": round(statistics.median(times), 2),
                        "max": round(max(times), 2),
                    }
                if repeats and agents:
                    found[f"model_{agents}"] = await cost(
                        installation, bus, lambda d: diaries(model, agents, d), repeats
                    )
            if repeats and million:
                for wait in waits:
                    found[f"dummies_{million}_wait_{wait:g}"] = await cost(
                        installation,
                        bus,
                        lambda d, wait=wait: sleepers(million, wait, d),
                        repeats,
                    )
            await bus.drain()
            return {**found, "machine": machine()}
        finally:
            installation.close()


def main() -> int:
    """Run it; returns 1 if a recovery took longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--million", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--waits", type=float, nargs="*", default=[0.0, 1.0], help="seconds that dummies wait"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = asyncio.run(
        measure(given.kills, given.agents, given.million, given.repeats, given.waits)
    )
    if given.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        for name, value in found.items():
            sys.stdout.write(f"{name + ':':<28}{value}\n")
    return 1 if found.get("recovery_seconds", {}).get("median", 0.0) > 3.0 else 0


if __name__ == "__main__":
    sys.exit(main())
