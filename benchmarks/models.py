"""Requests per second through Populace, agent to answer, over those of a bare load generator.

python -m benchmarks.models [--url URL --model NAME] [--requests N] [--concurrency C] [--json]

Without --url, the server is benchmarks.null_server, which answers after --latency seconds: the
figure is then what everything around the model costs; with 0 it is the hardest, since the generator
does nothing but HTTP. With it, any endpoint that speaks OpenAI's chat API. Both send
the same prompts with the same settings, as many at once, to the same server, in turn; each answer
is checked. Ours is the whole way: agents ask, prompts go through the queue to one model service,
answers are kept by the broker, counted, and given to the agents. The ratio is the median of turns;
who goes first changes from turn to turn, since machines grow slower and quicker as they go.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.agents import Guesser
from benchmarks.harness import Ground, cpu_seconds, ground, machine, service
from populace.world import open_world
from shared.ids import new_id
from shared.messages.scenario import ModelSpec

RULES = (
    "You are one of many players of a number game. Each player secretly picks a number from 0 to "
    "100; decimals are allowed. The target is 2/3 of the average of all picked numbers. The player "
    "whose number is nearest to the target wins."
)
QUESTION = "Pick your number now. Reply with the number alone."


@contextlib.contextmanager
def null_server(latency: float) -> Iterator[str]:
    """A null server in a process of its own; gives its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.null_server", str(latency)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def bare(url: str, model: str, requests: int, concurrency: int) -> float:
    """Seconds that a bare generator takes, in a process of its own."""
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.models", "--bare", "--url", url, "--model", model,
            "--requests", str(requests), "--concurrency", str(concurrency),
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout)


async def generate(url: str, model: str, requests: int, concurrency: int) -> float:
    """What the bare generator does: so many workers, each asks again once it is answered."""
    left = iter(range(requests))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def work() -> None:
            for number in left:
                body = {
                    "model": model,
                    "messages": [
                        {"role": "system", "content": RULES},
                        {"role": "user", "content": QUESTION},
                    ],
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "max_tokens": 16,
                    "seed": number,
                }
                address = f"{url}/v1/chat/completions"
                async with session.post(address, json=body) as reply:
                    content = await reply.json()
                    assert content["choices"][0]["message"]["content"] is not None

        began = time.monotonic()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return time.monotonic() - began


async def ours(
    place: Ground,
    services: list[psutil.Process],
    url: str,
    model: str,
    requests: int,
    concurrency: int,
) -> dict[str, float]:
    """Seconds that as many agents take, each with one question."""
    spec = ModelSpec(
        backend="openai", base_url=url, model=model, max_tokens=16, concurrency=concurrency
    )
    async with open_world(
        place.settings, place.url, run=new_id("bench"), seed=1, models={"default": spec}
    ) as world:
        people = await world.population(Guesser, count=requests)
        warm = await world.population(Guesser, count=concurrency, name="warm")
        await warm.guess(RULES, QUESTION)
        before = {**place.cpu(), "models": sum(map(cpu_seconds, services))}
        began = time.monotonic()
        answers = await people.guess(RULES, QUESTION)
        seconds = time.monotonic() - began
        after = {**place.cpu(), "models": sum(map(cpu_seconds, services))}
        assert sum(1 for a in answers if isinstance(a, str)) == requests, answers.failures
        return {"seconds": seconds, **{k: after[k] - before[k] for k in after}}


async def measure(arguments: argparse.Namespace, url: str) -> dict[str, Any]:
    turns = []
    async with ground(1) as place:
        with contextlib.ExitStack() as stack:
            services = [
                stack.enter_context(service(place, "services.models"))
                for _ in range(arguments.services)
            ]
            share = max(1, arguments.concurrency // arguments.services)
            for number in range(arguments.turns):
                turn: dict[str, float] = {}
                for ours_now in (False, True) if number % 2 == 0 else (True, False):
                    if ours_now:
                        turn |= await ours(
                            place, services, url, arguments.model, arguments.requests, share
                        )
                    else:
                        turn["bare"] = await asyncio.to_thread(
                            bare, url, arguments.model, arguments.requests, arguments.concurrency
                        )
                turns.append(turn)
    return {
        "machine": machine(),
        "requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "bare": round(arguments.requests / statistics.median(t["bare"] for t in turns), 1),
        "ours": round(arguments.requests / statistics.median(t["seconds"] for t in turns), 1),
        "ratio": round(statistics.median(t["bare"] / t["seconds"] for t in turns), 3),
        "turns": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url")
    parser.add_argument("--model", default="null")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds, of the null server")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--services", type=int, default=2, help="model services")
    parser.add_argument("--turns", type=int, default=4, help="of both, in changing order")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", action="store_true", help="only the load generator")
    arguments = parser.parse_args()
    if arguments.bare:
        print(
            uvloop.run(
                generate(arguments.url, arguments.model, arguments.requests, arguments.concurrency)
            )
        )
        return
    with contextlib.ExitStack() as stack:
        url = arguments.url or stack.enter_context(null_server(arguments.latency))
        found = uvloop.run(measure(arguments, url))
    if arguments.json:
        print(json.dumps(found))
        return
    print(found["machine"])
    print(
        f"{found['requests']} requests, {found['concurrency']} at once: bare {found['bare']}/s, "
        f"ours {found['ours']}/s, ratio {found['ratio']}"
    )
    for turn in found["turns"]:
        print("  ", {k: round(v, 3) for k, v in turn.items()})


if __name__ == "__main__":
    main()
