"""Chaos: kill -9 at random moments over all kinds of processes, and look for what was lost.

python -m benchmarks.chaos [--kills N] [--seed S] [--agents N] [--play NAME] [--json]

Three brokers that keep copies of one another, and all services, each killed and started again
at random moments of small runs whose every answer follows from all that was before. Each run's
answers, and its messages and events where the play records them, are compared with those of a run
that nobody disturbed. Counted are answers that are lost, doubled or different, and requests that a
model was asked twice although they were not under way at any kill.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.counting import Asked, CountingModel, counting_model
from benchmarks.harness import machine
from benchmarks.installation import MODULES, ROOT, Installation
from populace.runs import Outcome, follow, submit
from shared.bus import NatsBus
from shared.errors import PopulaceError
from shared.ids import new_id
from shared.logs import configure_logs
from shared.messages.scenario import ScenarioSpec
from shared.settings import Settings

SLOTS = 48
ROUNDS = 3
DELAY = 0.03
_KEY = ["round", "population", "agent", "method", "call"]
_COLUMNS = [*_KEY, "value", "answer", "error"]
_MESSAGES = ["round", "sender", "receiver", "method", "arguments", "answer", "error"]
_TALK = ("messages", "events")
_EVENTS = ["round", "path", "name", "by", "arguments", "value"]
PLAYS: dict[str, dict[str, Any]] = {
    "diaries": {"scenario": "diaries:Diaries"},
    "rumours": {
        "scenario": "rumours:Rumours",
        "record_messages": True,
        "record_events": True,
    },
    "calls": {
        "scenario": "rumours:Rumours",
        "record_messages": True,
        "record_events": True,
        "durability": "call",
    },
}
"""What can be played meanwhile."""
_KILLS_PER_RUN = 2
_RUN_WITHIN = 180.0
_JUST_ANSWERED = 1.0
"""Seconds after its answer in which a request may not be kept yet."""
_MOST_UNDER_WAY = SLOTS
"""Requests that one kill can cost: each holds its slot until its answer is kept."""
_READ = 0.05
"""Seconds in which the model reads what was on its way."""
_NODE_AWAY = 20.0
"""Seconds in which brokers may have no leader for a stream, so that answers can't be kept."""
_LOOKED_AT = 30.0


@dataclass
class Kill:
    """One process that was killed."""

    kind: str
    at: float
    gap: float = 0.0
    """The longest time without a request in what followed."""
    done: float = 0.0
    """When it was surely dead, and what it had sent was read by the model."""
    asked_again: int = 0
    """Requests that were under way when it came, and were asked again."""


@dataclass
class Found:
    """What came of it all."""

    kills: list[Kill] = field(default_factory=list)
    runs: int = 0
    unfinished: int = 0
    lost: int = 0
    doubled: int = 0
    different: int = 0
    paid_twice: int = 0
    again: int = 0
    """Requests that were asked a second time, those under way at a kill included."""


def fields(model: CountingModel, agents: int, play: str) -> dict[str, Any]:
    """The scenario that is played."""
    return {
        **PLAYS[play],
        "name": "chaos",
        "folder": str(ROOT / "benchmarks"),
        "seed": 11,
        "rounds": ROUNDS,
        "agents": {"count": agents, "workers": 2},
        "run": new_id("chaos"),
        "models": {
            "default": {
                "backend": "openai",
                "base_url": model.url,
                "model": new_id("m"),
                "concurrency": SLOTS,
            }
        },
    }


async def watch(
    bus: NatsBus, installation: Installation, run: str, within: float = _RUN_WITHIN
) -> Outcome:
    """Follow a run to its end, for so many seconds at most."""
    outcome = Outcome(run)
    async with asyncio.timeout(within):
        async for status in follow(bus, installation.settings(), run, submitted=True):
            if status is not None:
                outcome.take(status)
    return outcome


def answers(installation: Installation, run: str) -> list[tuple[Any, ...]]:
    """A run's answers as rows."""
    table = pq.read_table(installation.runs / run / "answers.parquet", columns=_COLUMNS)
    return list(zip(*(table[name].to_pylist() for name in _COLUMNS), strict=True))


def talk(installation: Installation, run: str) -> dict[str, Counter[tuple[Any, ...]]]:
    """A run's messages and events, where it records them: what was said how often."""
    found = {}
    for name, columns in (("messages", _MESSAGES), ("events", _EVENTS)):
        file = installation.runs / run / f"{name}.parquet"
        if file.exists():
            table = pq.read_table(file, columns=columns)
            rows = zip(*(table[column].to_pylist() for column in columns), strict=True)
            found[name] = Counter(rows)
    return found


class Chaos:
    """Plays runs and kills things meanwhile.

    Args:
        installation: whose processes are killed.
        bus: a connection.
        model: what is asked.
        agents: in each run.
        seed: of what is killed when.
        play: one of ``PLAYS``.
    """

    def __init__(
        self,
        installation: Installation,
        bus: NatsBus,
        model: CountingModel,
        agents: int,
        seed: int,
        play: str,
    ) -> None:
        self._installation = installation
        self._bus = bus
        self._model = model
        self._agents = agents
        self._random = random.Random(seed)
        self._play = play
        self._node_back = time.monotonic()
        self._expected: list[tuple[Any, ...]] = []
        self._expected_talk: dict[str, Counter[tuple[Any, ...]]] = {}
        self.found = Found()

    async def undisturbed(self) -> None:
        """Play a run that nobody disturbs: what the others are compared with."""
        spec = ScenarioSpec.model_validate(fields(self._model, self._agents, self._play))
        run = await submit(self._bus, self._installation.settings(), spec)
        outcome = await watch(self._bus, self._installation, run)
        if outcome.state != "finished":
            raise SystemExit(f"the undisturbed run is {outcome.state}: {outcome.reason}")
        self._expected = answers(self._installation, run)
        self._expected_talk = talk(self._installation, run)
        if len(self._expected) % (ROUNDS * self._agents) or not self._expected:
            raise SystemExit(f"the undisturbed run has {len(self._expected)} answers")
        if self._play != "diaries" and not all(self._expected_talk.get(n) for n in _TALK):
            raise SystemExit("the undisturbed run has no messages or no events")

    async def one_run(self, kills: int) -> None:
        """Play a run, and kill so many processes at random moments of it."""
        model, found = self._model, self.found
        first = len(model.requests)
        spec = ScenarioSpec.model_validate(fields(model, self._agents, self._play))
        settings = self._installation.settings()
        moments = sorted(self._random.uniform(0.02, ROUNDS) for _ in range(kills))
        run = await submit(self._bus, settings, spec)
        following = asyncio.ensure_future(watch(self._bus, self._installation, run))
        here: list[Kill] = []
        for moment in moments:
            when = first + int(moment * self._agents)
            while len(model.requests) < when and not following.done():
                await asyncio.sleep(0.002)
            if following.done():
                break
            killed = await self._kill(run)
            await asyncio.sleep(_READ)  # the model shares this loop, which stood still meanwhile
            killed.done = time.monotonic()
            here.append(killed)
        try:
            outcome = await following
        except TimeoutError:
            outcome = Outcome(run, state=None, reason="it did not end")
        except PopulaceError as error:
            outcome = Outcome(run, state=None, reason=str(error))
        found.runs += 1
        found.kills += here
        requests = model.requests[first:]
        self._judge_requests(requests, here)
        if outcome.state != "finished":
            found.unfinished += 1
            sys.stderr.write(f"{run}: {outcome.state} {outcome.reason}; {[k.kind for k in here]}\n")
            return
        self._judge_answers(run, here)

    async def _kill(self, run: str) -> Kill:
        """Kill something, start it again."""
        installation = self._installation
        kinds = ["worker", "player", *MODULES]
        if time.monotonic() > self._node_back:
            kinds.append("broker")
        kind = self._random.choice(kinds)
        if kind == "worker":
            pids = await installation.workers(self._bus, run)
            at = time.monotonic()
            if pids:
                installation.kill_process(self._random.choice(pids))
            return Kill(kind, at)
        at = time.monotonic()
        if kind == "player":
            for player in installation.forked("director"):
                installation.kill_process(player.pid)
        elif kind == "broker":
            number = self._random.randrange(3)
            installation.kill_node(number)
            self._node_back = at + 30
            loop = asyncio.get_running_loop()
            loop.call_later(5.0, installation.start_node, number)
        else:
            installation.kill(kind)
            installation.start(kind)
        return Kill(kind, at)

    def _judge_requests(self, requests: list[Asked], kills: list[Kill]) -> None:
        by_prompt: dict[str, list[Asked]] = {}
        for asked in requests:
            by_prompt.setdefault(asked.prompt, []).append(asked)
        for prompt, several in by_prompt.items():
            if "Say yes." in prompt:
                continue  # the check of the model, once a life
            self.found.again += len(several) - 1
            for before in several[:-1]:
                if not _excused(before, self.found.kills):
                    self.found.paid_twice += 1
                    self._tell_twice(several)
        starts = [asked.began for asked in requests]
        for kill in kills:
            after = [kill.at, *(s for s in starts if kill.at <= s <= kill.at + _LOOKED_AT)]
            kill.gap = max((b - a for a, b in itertools.pairwise(after)), default=0.0)

    def _tell_twice(self, several: list[Asked]) -> None:
        """Say when a prompt was asked, and what was killed around then."""
        began = several[0].began
        times = [(round(a.began - began, 2), round(a.ended - began, 2)) for a in several]
        kills = [(k.kind, round(k.at - began, 2)) for k in self.found.kills[-6:]]
        sys.stderr.write(f"asked twice: {several[0].prompt[-80:]!r} at {times}; kills: {kills}\n")

    def _judge_answers(self, run: str, kills: list[Kill]) -> None:
        got = answers(self._installation, run)
        size = len(_KEY)
        keys = Counter(row[:size] for row in got)
        expected = {row[:size]: row for row in self._expected}
        lost = len(expected.keys() - keys.keys())
        doubled = sum(count - 1 for count in keys.values())
        different = sum(expected.get(row[:size]) != row for row in got)
        for name, said in talk(self._installation, run).items():
            wanted = self._expected_talk[name]
            missing, beyond = (wanted - said).total(), (said - wanted).total()
            if missing or beyond:
                sys.stderr.write(f"{run}: {name}: {missing} missing, {beyond} beyond\n")
            lost += missing
            doubled += beyond
        self.found.lost += lost
        self.found.doubled += doubled
        self.found.different += different
        if lost or doubled or different:
            told = f"{lost} lost, {doubled} doubled, {different} different"
            sys.stderr.write(f"{run}: {told}; {[k.kind for k in kills]}\n")


def _excused(asked: Asked, kills: list[Kill]) -> bool:
    """Whether a request that was asked again was under way at a kill, of this run or the last.

    No kill excuses more than can have been under way or not kept yet.
    """
    for kill in kills:
        if kill.asked_again < _MOST_UNDER_WAY and _under_way(asked, kill):
            kill.asked_again += 1
            return True
    return False


def _under_way(asked: Asked, kill: Kill) -> bool:
    until = kill.done + (_NODE_AWAY if kill.kind == "broker" else 0.0)
    return asked.began <= until and asked.ended + _JUST_ANSWERED >= kill.at


async def play(
    kills: int, agents: int, seed: int, scenario: str, keep: Path | None = None
) -> Found:
    """Kill so many processes, over as many runs as it takes; the services' logs can be kept."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        installation = Installation(Path(folder))
        installation.start_cluster()
        try:
            bus = await installation.connect_to_cluster()
            installation.start(*MODULES)
            await installation.ready(bus)
            async with counting_model(DELAY) as model:
                chaos = Chaos(installation, bus, model, agents, seed, scenario)
                await chaos.undisturbed()
                while len(chaos.found.kills) < kills:
                    await chaos.one_run(min(_KILLS_PER_RUN, kills - len(chaos.found.kills)))
                    found = chaos.found
                    sys.stderr.write(
                        f"{len(found.kills)} kills in {found.runs} runs; {found.lost} lost, "
                        f"{found.paid_twice} paid twice\n"
                    )
                await bus.drain()
                return chaos.found
        finally:
            installation.close()
            if keep is not None and Path(folder).exists():
                shutil.copytree(
                    folder, keep, ignore=shutil.ignore_patterns("nats*", "runs"), dirs_exist_ok=True
                )


def summary(found: Found) -> dict[str, Any]:
    """The figures to show."""
    gaps = sorted(kill.gap for kill in found.kills)
    by_kind: dict[str, list[float]] = {}
    for kill in found.kills:
        by_kind.setdefault(kill.kind, []).append(kill.gap)

    def at(share: float) -> float:
        return round(gaps[min(len(gaps) - 1, int(len(gaps) * share))], 2) if gaps else 0.0

    return {
        "kills": len(found.kills),
        "runs": found.runs,
        "unfinished": found.unfinished,
        "lost": found.lost,
        "doubled": found.doubled,
        "different": found.different,
        "paid_twice": found.paid_twice,
        "asked_again": found.again,
        "gap_seconds": {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99)},
        "by_kind": {
            kind: {"kills": len(held), "median_gap": round(statistics.median(held), 2)}
            for kind, held in sorted(by_kind.items())
        },
        "machine": machine(),
    }


def main() -> int:
    """Run it; returns 1 if anything was lost, doubled, different or paid twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--agents", type=int, default=150)
    parser.add_argument("--play", choices=PLAYS, default="diaries", help="what is played meanwhile")
    parser.add_argument("--logs", type=Path, help="a folder to keep the services' logs in")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    configure_logs(Settings(log_level="error"), service="chaos")
    found = asyncio.run(play(given.kills, given.agents, given.seed, given.play, given.logs))
    told = summary(found)
    if given.json:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        for name, value in told.items():
            sys.stdout.write(f"{name + ':':<14}{value}\n")
    bad = found.unfinished + found.lost + found.doubled + found.different + found.paid_twice
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
