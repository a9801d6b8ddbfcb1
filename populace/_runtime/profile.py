"""Where a run's time goes: measured on request, since measuring costs a little itself.

Two views. *Processes*: what workers and the run's own process did with the time from the
world's opening on: agents' own code, serialisation, the engine (all other CPU time of the
process: calls, answers, records, the event loop), and idleness. *An average call*: the broker
(from sending to arrival, there and back), the queue at the worker, the agent's own code, the
queue for a model, the model itself, other waits (sleep, other agents), and storing its record.
The calls of a run overlap, so the second view's seconds add up to a call's latency, not to the
run's time. Times in transit compare the clocks of two machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import psutil

from shared.code import CodeLoader
from shared.codec import Codec


@dataclass(slots=True)
class Profile:
    """Sums of seconds in one process since it was made."""

    calls: int = 0
    """Calls begun here."""
    work: float = 0.0
    """In agents' own code."""
    coding: float = 0.0
    """Packing and unpacking."""
    sent: float = 0.0
    """Of calls, between their sending and their arrival here."""
    queued: float = 0.0
    """Of calls, between their arrival here and their beginning."""
    lived: float = 0.0
    """Of calls that waited for something, between beginning and end."""
    models: float = 0.0
    """Of calls, waiting for models."""
    served: float = 0.0
    """Of these, at work in the model back end."""
    stored: float = 0.0
    """Of calls, between the answer and the result stream's word that it has the record."""
    came_back: float = 0.0
    """Of answers, between their sending and their arrival here."""
    came: int = 0
    """Answers (or, when they are summarised, calls) that arrived here."""

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """An agent's method, whose time counts as its own work."""
        clock = time.perf_counter

        def call(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.work += clock() - began

        return call

    def begun(self, arrived: float, count: int, first: float) -> None:
        """Note calls that began one after the other, from a time ``first`` until now.

        A ``count`` below 0 takes back calls that did not begin after all.
        """
        self.calls += count
        self.queued += ((first + time.time()) / 2 - arrived) * count

    def arrived(self, sent: float, count: int) -> None:
        """Note answers that came."""
        self.came_back += max(0.0, time.time() - sent) * count
        self.came += count


class TimedCodec(Codec):
    """A codec whose time is counted."""

    def __init__(self, loader: CodeLoader | None, profile: Profile) -> None:
        super().__init__(loader)
        self._profile = profile
        self._inside = False

    def pack(self, value: Any) -> bytes:
        """See ``Codec.pack``."""
        return self._timed(super().pack, value)  # type: ignore[no-any-return]

    def unpack(self, data: bytes) -> Any:
        """See ``Codec.unpack``."""
        return self._timed(super().unpack, data)

    def _timed(self, work: Callable[[Any], Any], value: Any) -> Any:
        if self._inside:  # called by itself, for what is within
            return work(value)
        began = time.perf_counter()
        self._inside = True
        try:
            return work(value)
        finally:
            self._inside = False
            self._profile.coding += time.perf_counter() - began


@dataclass(slots=True)
class Usage:
    """One process's profile, with its clock and CPU time since then."""

    profile: Profile
    wall: float
    cpu: float

    def plain(self) -> dict[str, float]:
        """As it travels."""
        return {"wall": self.wall, "cpu": self.cpu, **asdict(self.profile)}


class Meter:
    """Measures this process from now on."""

    def __init__(self) -> None:
        self.profile = Profile()
        self._began = time.monotonic()
        self._cpu = self._cpu_seconds()

    @staticmethod
    def _cpu_seconds() -> float:
        times = psutil.Process().cpu_times()
        return float(times.user + times.system)

    def usage(self) -> Usage:
        """What was measured so far."""
        wall = time.monotonic() - self._began
        return Usage(self.profile, wall, self._cpu_seconds() - self._cpu)


def summarise(workers: list[dict[str, float]], caller: dict[str, float]) -> dict[str, Any]:
    """Both views, in seconds.

    Args:
        workers: ``Usage.plain`` of each worker.
        caller: the same of the process that plays the run.

    Returns:
        ``{"processes": {"workers": {...}, "player": {...}}, "call": {...}}``
    """
    total = {
        name: sum(w.get(name, 0) for w in workers)
        for name in ("wall", "cpu", *(f.name for f in fields(Profile)))
    }
    calls, came = max(1, int(total["calls"])), max(1, int(caller["came"]))
    # A call that waits holds its own code's time as well; what is left is waiting for others.
    waits = max(0.0, total["lived"] - total["models"])
    return {
        "processes": {
            f"workers ({len(workers)})": _process(total),
            "player": _process(caller),
        },
        "call": {
            "calls": int(total["calls"]),
            "broker, to the worker": total["sent"] / calls,
            "queue at the worker": total["queued"] / calls,
            "agent's own code": total["work"] / calls,
            "queue for a model": max(0.0, total["models"] - total["served"]) / calls,
            "model": total["served"] / calls,
            "other waits": waits / calls,
            "storing the record": total["stored"] / calls,
            "broker, back": caller["came_back"] / came,
        },
    }


def _process(sums: dict[str, float]) -> dict[str, float]:
    work, coding = sums["work"], sums["coding"]
    return {
        "seconds": sums["wall"],
        "agents' own code": work,
        "serialisation": coding,
        "engine": max(0.0, sums["cpu"] - work - coding),
        "idle": max(0.0, sums["wall"] - max(sums["cpu"], work + coding)),
    }
