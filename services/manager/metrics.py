"""The installation in figures, for Prometheus."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from services.manager.installation import overview, pools

if TYPE_CHECKING:
    from services.manager.manager import Manager


def metrics(manager: Manager) -> str:
    """What Prometheus takes."""
    told = overview(manager)
    lines: list[str] = []

    def family(
        name: str, about: str, rows: list[tuple[dict[str, str], float]], kind: str = "gauge"
    ) -> None:
        lines.append(f"# HELP populace_{name} {about}")
        lines.append(f"# TYPE populace_{name} {kind}")
        for labels, value in rows:
            told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            number = int(value) if float(value).is_integer() else repr(float(value))
            lines.append(f"populace_{name}{f'{{{told}}}' if told else ''} {number}")

    family("broker_up", "Whether the broker answers.", [({}, told["broker"] == "up")])
    for name, about in (
        ("hosts", "Agent hosts that are there."),
        ("workers", "Worker processes that runs have."),
        ("agents", "Agents of runs under way."),
        ("queued", "Messages of prompts that wait or are under way."),
    ):
        family(name, about, [({}, told[name])])
    states = Counter(info.state for info in manager.watcher.runs.values())
    family("runs", "Runs on record, by state.", [({"state": s}, n) for s, n in states.items()])
    services = [({"service": name}, count) for name, count in told["services"].items()]
    family("services", "Instances that answer.", services)
    held = pools(manager)
    for part, kind, about in (
        ("slots", "gauge", "Requests that may be under way at once."),
        ("under_way", "gauge", "Requests under way."),
        ("answered", "counter", "Prompts that were answered."),
        ("failed", "counter", "Prompts that failed."),
        ("tokens_in", "counter", "Prompt tokens."),
        ("tokens_out", "counter", "Answer tokens."),
    ):
        rows = [
            ({"pool": str(p["pool"]), "service": str(p["service"])}, float(p.get(part) or 0))
            for p in held
        ]
        name = f"pool_{part}" + ("_total" if kind == "counter" else "")
        family(name, f"Of a model pool: {about}", rows, kind)
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
