"""Drawing a population: time and memory on one core, beside a bare numpy draw.

python -m benchmarks.personas [--people N] [--json]

N people (a million) with six attributes: one with exact quotas, one with shares, two given others,
one numeric, one derived, and a constraint. The quotas are counted, the constraint is checked, and
a slice drawn by itself is compared with the same slice of the whole. Beside it, in turn: as many
columns drawn by numpy's own generator, without conditions, quotas, or slices.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import machine

REPEATS = 3

_FILE = """
name: bench
size: {people}
seed: 3
attributes:
  gender: {{shares: {{female: 0.51, male: 0.49}}}}
  education: {{quotas: {{primary: 0.2, secondary: 0.5, bachelor: 0.2, phd: 0.1}}}}
  age: {{distribution: norm, params: {{loc: 42, scale: 18}}, min: 16, max: 95, round: 0}}
  occupation:
    table:
      - {{when: {{education: phd}}, shares: {{teacher: 0.6, engineer: 0.4}}}}
      - when: {{education: [bachelor, secondary], gender: female}}
        shares: {{teacher: 0.3, clerk: 0.7}}
      - {{shares: {{clerk: 0.5, farmer: 0.5}}}}
  income:
    table:
      - when: {{occupation: engineer}}
        distribution: lognorm
        params: {{s: 0.5, scale: 60000}}
        round: 0
      - {{distribution: lognorm, params: {{s: 0.6, scale: 30000}}, round: 0}}
  band: {{derive: "'young' if age < 30 else ('old' if age >= 65 else 'middle')"}}
constraints:
  - "age >= 24 or education != 'phd'"
"""


def ours(people: int) -> dict[str, float]:
    """Draw and check; run in a process of its own."""
    import numpy as np

    from populace.personas.sampling import Sampler
    from populace.personas.spec import PopulationFile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "people.yaml"
        path.write_text(_FILE.format(people=people))
        sampler = Sampler(PopulationFile(path))
        began = time.perf_counter()
        table = sampler.rows()
        wall = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        counted = {r["values"]: r["counts"] for r in table["education"].value_counts().to_pylist()}
        ages = np.asarray(table["age"])
        doctors = np.asarray(table["education"].cast("string")) == "phd"
        start = people // 3
        part = Sampler(PopulationFile(path)).rows(start, start + 1000)
    if counted["phd"] != round(people * 0.1) or (ages[doctors] < 24).any():
        raise SystemExit("quotas or constraint are not met")
    if part.to_pylist() != table.slice(start, 1000).to_pylist():
        raise SystemExit("a slice differs from the same slice of the whole")
    return {"wall_s": wall, "peak_mb": peak}


def bare(people: int) -> dict[str, float]:
    """As many columns by numpy alone."""
    import numpy as np

    began = time.perf_counter()
    source = np.random.default_rng(3)
    columns = [
        source.choice(["female", "male"], people, p=[0.51, 0.49]),
        source.choice(["primary", "secondary", "bachelor", "phd"], people, p=[0.2, 0.5, 0.2, 0.1]),
        np.clip(np.round(source.normal(42, 18, people)), 16, 95),
        source.choice(["teacher", "engineer", "clerk", "farmer"], people),
        np.round(source.lognormal(10, 0.5, people)),
        source.choice(["young", "middle", "old"], people),
    ]
    wall = time.perf_counter() - began
    assert all(len(column) == people for column in columns)
    return {"wall_s": wall, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}


def apart(way: str, people: int) -> dict[str, float]:
    """One way in a process of its own, on one core."""
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.personas", "--way", way, "--people", str(people)],
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(people: int, as_json: bool) -> None:
    """Measure both in turn, and print medians."""
    runs = [(apart("ours", people), apart("bare", people)) for _ in range(REPEATS)]
    found: dict[str, Any] = {
        "people": people,
        "wall_s": round(statistics.median(o["wall_s"] for o, _ in runs), 3),
        "peak_mb": round(statistics.median(o["peak_mb"] for o, _ in runs)),
        "numpy_wall_s": round(statistics.median(b["wall_s"] for _, b in runs), 3),
        "ratio": round(statistics.median(o["wall_s"] / b["wall_s"] for o, b in runs), 2),
        "machine": machine(),
    }
    if as_json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:<14}{value}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--people", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", choices=("ours", "bare"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is None:
        main(arguments.people, arguments.json)
    else:
        print(json.dumps({"ours": ours, "bare": bare}[arguments.way](arguments.people)))
