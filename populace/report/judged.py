"""What a judge found out of character, for the page."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from populace.recorded import RecordedRun
from shared.errors import InvalidInputError

if TYPE_CHECKING:
    from populace.report.data import RunData

_MOST = 40


@dataclass
class Judged:
    """A judge's verdicts on one run."""

    run: str
    """The judge's own run."""
    judge: str
    """Which model it is."""
    judged: int = 0
    out: int = 0
    failed: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Those that contradict their persona: agent, round, persona, answer, reason."""


_POINTER = "judged.json"


def note_judged(folder: Path, run: str) -> None:
    """Note beside a run which other run has judged it.

    Raises:
        OSError: it can't be written.
    """
    (folder / _POINTER).write_text(json.dumps({"run": run}) + "\n")


def find_judged(runs_dir: Path, data: RunData) -> Judged | None:
    """The latest verdicts on a run, if it was judged."""
    pointer = runs_dir / data.run / _POINTER
    try:
        name = str(json.loads(pointer.read_text())["run"])
        run = RecordedRun(runs_dir / name)
        manifest = run.manifest
    except (FileNotFoundError, InvalidInputError, KeyError, ValueError):
        return None
    from populace.report.data import model_name  # the command line imports this without plots

    model = manifest.get("models", {}).get("default", {})
    found = Judged(name, model_name(model))
    for row in run.to_arrow().select(["answer", "error"]).to_pylist():
        if row["error"] is not None or row["answer"] is None:
            found.failed += 1
            continue
        verdict = json.loads(row["answer"])
        found.judged += 1
        if verdict["contradicts"]:
            found.out += 1
            if len(found.rows) < _MOST:
                found.rows.append(verdict)
    return found
