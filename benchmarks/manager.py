"""The manager at 100,000 agents on 10 hosts: what its overview costs, how fast agents are found.

``python -m benchmarks.manager [--agents N] [--hosts N] [--seconds S]``

All services are started here. While a run is under way, somebody has the overview open: it is told
of changes and fetches the page anew, as a browser does. Measured: the manager's CPU time, as a
share of one core. After the run, pages of its agents are fetched, with filters and orders.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.installation import ROOT, Installation
from populace.runs import control, find_run, follow, submit
from populace.scenario_file import read_scenario
from shared.bus import NatsBus

TOKEN = "benchmark"
QUERIES = {
    "first page": "",
    "page 1,000": "start=50000",
    "highest values": "sort=-value",
    "a persona column": "column=education&op=%3D&value=Ph.D.&sort=value",
    "two conditions": "column=age&op=%3E&value=40&column=value&op=%3C&value=30",
    "a text": "column=answer&op=contains&value=77",
}


async def address_of(installation: Installation) -> str:
    """Where the manager listens, once it does."""
    file = installation.home / "manager.url"
    async with asyncio.timeout(30):
        while not (file.exists() and file.read_text().endswith("\n")):
            await asyncio.sleep(0.05)
    return file.read_text().strip()


async def watch_overview(http: aiohttp.ClientSession, seconds: float) -> int:
    """Have the overview open for a while; gives how often it was renewed."""
    count = 0
    until = time.monotonic() + seconds
    async with http.get("/events?since=0", timeout=aiohttp.ClientTimeout()) as stream:
        while time.monotonic() < until:
            line = await stream.content.readline()
            if line.startswith(b"data"):
                async with http.get("/") as page:
                    assert page.status == 200
                    assert b"Overview" in await page.read()
                count += 1
    return count


async def times(http: aiohttp.ClientSession, path: str, repeat: int) -> list[float]:
    """Milliseconds that a page takes."""
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        async with http.get(path) as page:
            assert page.status == 200, await page.text()
            await page.read()
        found.append((time.perf_counter() - began) * 1000)
    return found


async def measure(options: argparse.Namespace, home: Path) -> None:
    """Start everything, measure, print."""
    installation = Installation(home, workers=1)
    try:
        installation.start_broker()
        installation.start("director", "recorder", "models", "env_service")
        for i in range(options.hosts):
            installation.start_one(f"agent_host{i}", POPULACE_HOST_NAME=f"host-{i}")
        manager = installation.start_one(
            "manager", POPULACE_MANAGER_PORT="0", POPULACE_MANAGER_TOKEN=TOKEN
        )
        settings = installation.settings()
        bus = await NatsBus.connect(settings, installation.url)
        await installation.ready(bus)
        process = psutil.Process(manager.pid)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(await address_of(installation), headers=headers) as http:
            async with asyncio.timeout(60):
                while True:
                    async with http.get("/api/overview") as answer:
                        if (await answer.json())["hosts"] == options.hosts:
                            break
                    await asyncio.sleep(0.2)
            overrides: dict[str, Any] = {
                "agents.count": options.agents,
                "agents.personas": "education",
                "params.players": {"kind": "level_k"},
                "rounds": 10_000,
            }
            file = read_scenario(ROOT / "examples/guess_average/scenario.yaml", overrides)
            run = await submit(bus, settings, file.spec)
            async for status in follow(bus, settings, run, submitted=True):
                if status is not None and status.kind == "round_finished":
                    break
            before, began = process.cpu_times(), time.monotonic()
            renewed = await watch_overview(http, options.seconds)
            after, wall = process.cpu_times(), time.monotonic() - began
            used = after.user + after.system - before.user - before.system
            info = await find_run(bus, settings, run)
            print(
                f"overview: {options.agents:,} agents, {options.hosts} hosts, round "
                f"{info.rounds_done if info else '?'}: renewed {renewed} times in {wall:.1f} s, "
                f"{used / wall:.1%} of one core, {process.memory_info().rss >> 20} MB"
            )
            await control(bus, settings, run, "cancel")
            async for status in follow(bus, settings, run):
                if status is not None and status.kind == "recorded":
                    rows = status.records or 0
            (cold,) = await times(http, f"/runs/{run}/agents", 1)
            print(f"agents: {rows:,} answers; the first look (index made): {cold:.0f} ms")
            for name, query in QUERIES.items():
                found = await times(http, f"/runs/{run}/agents?{query}", 20)
                print(
                    f"  {name:<18} median {statistics.median(found):6.1f} ms, "
                    f"largest {max(found):6.1f} ms"
                )
            one = await times(http, f"/runs/{run}/agents/players/{options.agents // 2}", 5)
            print(f"  {'one agent':<18} median {statistics.median(one):6.1f} ms")
        await bus.drain()
    finally:
        installation.close()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=100_000)
    parser.add_argument("--hosts", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(measure(options, Path(home)))


if __name__ == "__main__":
    main()
