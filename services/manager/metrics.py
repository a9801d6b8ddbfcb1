"""The installation in figures, for Prometheus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from services.manager.installation import overview, pools

if TYPE_CHECKING:
    from services.manager.manager import Manager


def metrics(manager: Manager) -> str:
    """What Prometheus takes."""
    told = overview(manager)
    lines = []

    def gauge(name: str, about: str, values: dict[str, float]) -> None:
        lines.append(f"# HELP populace_{name} {about}")
        lines.append(f"# TYPE populace_{name} gauge")
        lines.extend(f"populace_{name}{labels} {value:g}" for labels, value in values.items())

    gauge("broker_up", "Whether the broker answers.", {"": float(told["broker"] == "up")})
    for name, about in (
        ("hosts", "Agent hosts that are there."),
        ("workers", "Worker processes that runs have."),
        ("agents", "Agents of runs under way."),
        ("queued", "Messages of prompts that wait or are under way."),
    ):
        gauge(name, about, {"": float(told[name])})
    states: dict[str, float] = {}
    for info in manager.watcher.runs.values():
        label = f'{{state="{info.state}"}}'
        states[label] = states.get(label, 0.0) + 1
    gauge("runs", "Runs on record, by state.", states)
    services = {f'{{service="{n}"}}': float(count) for n, count in told["services"].items()}
    gauge("services", "Instances that answer.", services)
    for part in ("slots", "under_way", "answered", "failed"):
        values = {
            f'{{pool="{p["pool"]}",service="{p["service"]}"}}': float(p.get(part) or 0)
            for p in pools(manager)
        }
        gauge(f"pool_{part}", f"Of a model pool: {part.replace('_', ' ')}.", values)
    lines.append(f"# generated at {time.time():.0f}")
    return "\n".join(lines) + "\n"
