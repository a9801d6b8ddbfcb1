"""The same dummy task by others and by us, in turn in one run.

python -m benchmarks.peers [--install] [--agents N] [--actors A] [--only NAMES] [--json]

The task: make the agents, call each once, take every answer; with a wait of 1 s in each, and
with none. Peers: plain asyncio (a task per agent), a thread pool, Ray (an actor per agent, at the
number given by ``--actors``, since each is a process), and AgentScope 0.1.6. Each runs in a
process tree of its own; ``--install`` makes virtual environments for Ray and AgentScope under
the cache folder (``POPULACE_BENCH_CACHE``, else ``~/.cache/populace-bench``). Imports, servers
and brokers are up before the clock starts, on both sides. CPU time is that of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.agents import Dummy
from benchmarks.harness import ROOT, Ground, cpu_seconds, ground, machine
from populace.world import open_world
from shared.ids import new_id

REPEATS = 3
TIMEOUT = 300.0
PROGRAMS = ROOT / "benchmarks" / "peer_programs"
PACKAGES = {
    "ray": ["ray==2.60.0"],
    "agentscope": ["agentscope[distribute]==0.1.6", "tqdm"],
}
"""What each environment holds. AgentScope 0.1.6 imports tqdm without asking for it."""
PEERS = {
    "asyncio": ("asyncio_tasks.py", None),
    "threads": ("thread_pool.py", None),
    "ray": ("ray_actors.py", "ray"),
    "agentscope": ("agentscope_agents.py", "agentscope"),
}


def cache() -> Path:
    """Where the environments are."""
    return Path(os.environ.get("POPULACE_BENCH_CACHE", "~/.cache/populace-bench")).expanduser()


def python_of(environment: str | None) -> Path | None:
    """The Python of a peer's environment; None if it isn't installed."""
    if environment is None:
        return Path(sys.executable)
    found = cache() / environment / "bin" / "python"
    return found if found.exists() else None


def install() -> None:
    """Make the peers' environments."""
    for name, packages in PACKAGES.items():
        folder = cache() / name
        if not (folder / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run(
            [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *packages], check=True
        )


class Tree:
    """CPU time of a process and all its descendants, those that have ended included."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[tuple[int, float], float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.seconds()

    def seconds(self) -> float:
        """CPU seconds so far."""
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            processes = []
        for process in processes:
            try:
                key = (process.pid, process.create_time())
                self._seen[key] = max(self._seen.get(key, 0.0), cpu_seconds(process))
            except psutil.Error:
                continue
        return sum(self._seen.values())

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()
        self._thread.join()


def peer(name: str, agents: int, wait: float) -> dict[str, float]:
    """One run of a peer; raises if an answer is missing."""
    program, environment = PEERS[name]
    python = python_of(environment)
    assert python is not None
    process = subprocess.Popen(
        [str(python), str(PROGRAMS / program), str(agents), str(wait)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    tree = Tree(process.pid)
    guard = threading.Timer(TIMEOUT, process.kill)
    guard.start()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        _line(process, "begin")
        before = tree.seconds()
        _answer(process)
        line = _line(process, "{")
        after = tree.seconds()
        if not line:
            raise SystemExit(f"{name} did not finish {agents} agents within {TIMEOUT:g} s")
        found: dict[str, float] = json.loads(line)
        if found["answers"] != agents:
            raise SystemExit(f"{name}: {found['answers']} answers for {agents} agents")
        _answer(process)
        process.wait(60)
    finally:
        guard.cancel()
        tree.stop()
        _end_tree(process)
    return {"wall_s": found["wall_s"], "cpu_us_per_call": (after - before) / agents * 1e6}


def _line(process: subprocess.Popen[str], start: str) -> str:
    """The next line that begins so (some peers say more); empty if there is none."""
    assert process.stdout is not None
    while (line := process.stdout.readline()) and not line.startswith(start):
        pass
    return line


def _answer(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _end_tree(process: subprocess.Popen[str]) -> None:
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    except psutil.Error:
        pass
    process.kill()
    process.wait(10)


async def ours(
    ground: Ground, agents: int, wait: float, isolated: bool = False
) -> dict[str, float]:
    """One run of ours; raises if an answer is missing."""
    async with open_world(
        ground.settings, ground.url, run=new_id("bench"), seed=7, workers=2
    ) as world:
        tree, broker = Tree(ground.host.pid), Tree(ground.broker.pid)
        own = time.process_time()
        before = tree.seconds() + broker.seconds()
        began = time.perf_counter()
        made = await world.population(Dummy, count=agents, isolated=isolated)
        answers = await (made.guess(wait) if wait else made.pick())
        wall = time.perf_counter() - began
        cpu = tree.seconds() + broker.seconds() - before + time.process_time() - own
        tree.stop()
        broker.stop()
        if len(answers) != agents or answers.errors or not all(0 <= a < 100 for a in answers):
            raise SystemExit("an answer is missing")
    return {"wall_s": wall, "cpu_us_per_call": cpu / agents * 1e6}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}


async def main(agents: int, actors: int, only: list[str], as_json: bool) -> None:
    """Measure in turn, and print ratios."""
    rows: list[dict[str, Any]] = []
    left_out = [name for name in only if python_of(PEERS[name][1]) is None]
    async with ground(2) as made:
        for wait in (1.0, 0.0):
            for name in only:
                if name in left_out:
                    continue
                count = actors if name == "ray" else agents
                theirs, mine, apart = [], [], []
                for _ in range(REPEATS):
                    theirs.append(peer(name, count, wait))
                    mine.append(await ours(made, count, wait))
                    if name == "ray":  # a process per agent on both sides
                        apart.append(await ours(made, count, wait, isolated=True))
                rows.append(_compare(name, count, wait, medians(theirs), medians(mine)))
                if apart:
                    label = "ray, ours isolated"
                    rows.append(_compare(label, count, wait, medians(theirs), medians(apart)))
    found = {"rows": rows, "not_installed": left_out, "machine": machine()}
    if as_json:
        print(json.dumps(found))
        return
    print(f"peers; {found['machine']}")
    for row in rows:
        print(
            f"{row['peer']:<20}{row['agents']:>7,} agents, wait {row['wait_s']:g} s: "
            f"wall {row['wall_s']:>8.3f} s (ours {row['our_wall_s']:.3f}), "
            f"CPU {row['cpu_us_per_call']:>9,.1f} µs a call "
            f"(ours {row['our_cpu_us_per_call']:,.1f}, "
            f"{row['cpu_ratio']:,g} times less)"
        )
    for name in left_out:
        print(f"{name}: not installed; run with --install first")


def _compare(
    name: str, count: int, wait: float, theirs: dict[str, float], mine: dict[str, float]
) -> dict[str, Any]:
    return {
        "peer": name,
        "agents": count,
        "wait_s": wait,
        **theirs,
        "our_wall_s": mine["wall_s"],
        "our_cpu_us_per_call": mine["cpu_us_per_call"],
        "wall_ratio": round(theirs["wall_s"] / mine["wall_s"], 2),
        "cpu_ratio": round(theirs["cpu_us_per_call"] / max(0.1, mine["cpu_us_per_call"]), 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--agents", type=int, default=5_000)
    parser.add_argument("--actors", type=int, default=100)
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    for unknown in set(chosen) - set(PEERS):
        parser.error(f"there is no peer named {unknown!r} (there are: {', '.join(PEERS)})")
    if arguments.install:
        install()
    uvloop.run(main(arguments.agents, arguments.actors, chosen, arguments.json))
