"""A report as one self-contained HTML page; and its figures as files (extra ``report``)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from populace.report import figures
from populace.report.arithmetic import all_slips
from populace.report.data import RunData, model_name
from populace.report.drawing import STYLE, svg
from populace.report.judged import Judged, find_judged
from populace.report.spec import Variable
from populace.report.statistics import (
    RESAMPLES,
    Described,
    classify,
    compare_groups,
    describe,
    share_interval,
)
from shared import __version__

_NOT_IN_NAMES = re.compile(r"[^\w.-]+")
_TEXTS = 12
_LONGEST = 400


@dataclass
class Absent:
    """A run that was to be reported on, and can't be."""

    run: str
    label: str
    reason: str


@dataclass
class Report:
    """A page and its figures.

    Args:
        title: of the page.
        runs: what is reported, with a label each.
        absent: runs of which there is nothing to report.
        runs_dir: where judgements are found.
    """

    title: str
    runs: Sequence[tuple[str, RunData]]
    absent: Sequence[Absent] = ()
    runs_dir: Path | None = None
    figures: dict[str, Figure] = field(default_factory=dict)
    """By name: those of the page, once it was made."""

    def html(self) -> str:
        """The page."""
        page = Environment(
            autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
        ).from_string(resources.files("populace.report").joinpath("page.html").read_text())
        shown = [self._run(label, data) for label, data in self.runs]
        columns, rows, comparisons = self._overview(shown)
        return page.render(
            title=self.title,
            style=STYLE,
            runs=shown,
            absent=self.absent,
            columns=columns,
            overview=rows,
            comparisons=comparisons,
            resamples=f"{RESAMPLES:,}",
            version=__version__,
        )

    def save_figures(self, folder: Path, kind: str) -> list[Path]:
        """Write the figures as files (after ``html``).

        Args:
            folder: where to; made if it isn't there.
            kind: "png" or "pdf".
        """
        folder.mkdir(parents=True, exist_ok=True)
        made = []
        for name, figure in self.figures.items():
            path = folder / f"{_NOT_IN_NAMES.sub('-', name)}.{kind}"
            figure.savefig(path, dpi=150)
            made.append(path)
        return made

    def _draw(self, name: str, figure: Figure | None) -> str:
        if figure is None:
            return ""
        self.figures[name] = figure
        return svg(figure)

    # One run
    def _run(self, label: str, data: RunData) -> dict[str, Any]:
        manifest = data.manifest
        scenario = manifest.get("scenario", {})
        lines = data.lines()
        drawn = [
            (
                "Over the rounds",
                self._draw(f"{data.run}-rounds", figures.over_rounds(lines)),
            ),
            *((name, self._series(data, name)) for name in data.spec.series),
        ]
        return {
            "run": data.run,
            "label": label,
            "data": data,
            "spec": data.spec,
            "scripted": (manifest.get("scripted") or []) if data.scripted else [],
            "state": manifest.get("state", "finished"),
            "reason": manifest.get("reason", ""),
            "agents": scenario.get("agents", {}).get("count", 0),
            "seed": manifest.get("seed"),
            "models": _models(manifest),
            "rounds": data.rounds,
            "parts": [self._part(data, variable) for variable in data.spec.variables],
            "lines": [(name, text) for name, text in drawn if text],
            "failures": _failures(data),
            "slips": all_slips(data.texts()),
            "judged": self._judged(data),
            "money": any((row.get("usage") or {}).get("money") for row in data.rounds),
            "lengths": _lengths(data),
            "settings": _settings(manifest),
        }

    def _series(self, data: RunData, name: str) -> str:
        """A recorded dict's entries: lines over the rounds, or bars if there is but one."""
        entries = data.series(name)
        drawn = figures.over_rounds(entries)
        if drawn is None and entries:
            last = {key: int(list(points.values())[-1]) for key, points in entries.items()}
            drawn = figures.bars(last, name)
        return self._draw(f"{data.run}-{name}", drawn)

    def _judged(self, data: RunData) -> Judged | None:
        return None if self.runs_dir is None else find_judged(self.runs_dir, data)

    def _part(self, data: RunData, variable: Variable) -> dict[str, Any]:
        part: dict[str, Any] = {
            "variable": variable,
            **dict.fromkeys(("histograms", "others", "levels", "bars"), ""),
            **{name: [] for name in ("rows", "references", "shares", "groups", "texts")},
        }
        if variable.kind == "number":
            self._numbers(data, variable, part)
        elif variable.kind == "category":
            self._categories(data, variable, part)
        else:
            texts = data.words(variable)
            step = max(1, len(texts) // _TEXTS)
            part["texts"] = [text[:_LONGEST] for text in texts[::step][:_TEXTS]]
        return part

    def _numbers(self, data: RunData, variable: Variable, part: dict[str, Any]) -> None:
        stem = f"{data.run}-{variable.name}"
        part["histograms"] = self._draw(stem, figures.histograms(data, variable))
        marks = data.recorded(variable.mark) if variable.mark else {}
        described: dict[int, Described] = {}
        for number in data.played:
            values = data.numbers(variable, number)
            found = describe(values)
            if found is None:
                continue
            described[number] = found
            part["rows"].append({"round": number, "d": found, "mark": marks.get(number)})
            if variable.shares:
                part["shares"].append((number, [_share(values, s) for s in variable.shares]))
        part["references"] = [
            r for r in variable.references if r.round is None or r.round in described
        ]
        ours = {n: (d.mean, d.mean_interval) for n, d in described.items()}
        part["others"] = self._draw(f"{stem}-others", figures.against_others(data, variable, ours))
        if not described:
            return
        if variable.levels:
            first = part["level_round"] = min(described)
            counts = classify(data.numbers(variable, first), variable.levels, variable.level_width)
            drawn = figures.bars(counts, "share of answers")
            part["levels"] = self._draw(f"{stem}-levels", drawn)
        last = max(described)
        for column in data.by:
            for number in dict.fromkeys((min(described), last)):
                groups = data.groups(variable, column, number)
                drawn = figures.by_group(groups, variable, f"round {number}, by {column}")
                name = f"{stem}-{column}-{number}"
                told = f"{column.replace('_', ' ')}, round {number}"
                part["groups"].append((self._draw(name, drawn), told, compare_groups(groups)))

    def _categories(self, data: RunData, variable: Variable, part: dict[str, Any]) -> None:
        stem = f"{data.run}-{variable.name}"
        counts = Counter(data.words(variable))
        order = [*variable.categories, *(n for n, _ in counts.most_common())]
        order = list(dict.fromkeys(order))
        drawn = figures.bars({name: counts[name] for name in order}, variable.label)
        part["bars"] = self._draw(stem, drawn)
        column_values = data.column(variable).to_pylist()
        for column in data.by:
            shares: dict[str, Counter[str]] = {}
            for group, value in zip(data.table[column].to_pylist(), column_values, strict=True):
                if group is not None and value is not None:
                    shares.setdefault(str(group), Counter())[value] += 1
            drawn = figures.stacked(dict(sorted(shares.items())), order, f"by {column}")
            part["groups"].append((self._draw(f"{stem}-{column}", drawn), column, None))

    # All runs
    def _overview(
        self, shown: list[dict[str, Any]]
    ) -> tuple[list[str], list[dict[str, Any]], list[tuple[str, str, Any]]]:
        if len(shown) + len(self.absent) < 2:
            return [], [], []
        rows = []
        columns: list[str] = []
        for run in shown:
            told: dict[str, str] = {}
            for part in run["parts"]:
                if part["rows"]:
                    first, last = part["rows"][0], part["rows"][-1]
                    label = part["variable"].label
                    told[f"{label}: mean, round 1"] = _with_interval(first["d"])
                    if last is not first:
                        told[f"{label}: mean, last round"] = _with_interval(last["d"])
                    if first["mark"] is not None:
                        told[part["variable"].mark_label] = f"{first['mark']:.2f}"
            columns += [name for name in told if name not in columns]
            rows.append(
                {
                    "run": run["run"],
                    "label": run["label"],
                    "there": True,
                    "state": "" if run["state"] == "finished" else run["state"],
                    "agents": run["agents"],
                    "rounds": len(run["rounds"]),
                    "answers": sum(r["answers"] for r in run["rounds"]),
                    "failed": sum(r["failed"] for r in run["rounds"]),
                    "tokens": sum(r["tokens"] for r in run["rounds"]),
                    "seconds": sum(r["seconds"] for r in run["rounds"]),
                    "figures": told,
                }
            )
        rows += [
            {"run": a.run, "label": a.label, "there": False, "reason": a.reason}
            for a in self.absent
        ]
        return columns, rows, self._comparisons(shown)

    def _comparisons(self, shown: list[dict[str, Any]]) -> list[tuple[str, str, Any]]:
        """Each variable that several runs share, compared over them, by its first round."""
        found = []
        names = dict.fromkeys(v.name for run in shown for v in run["spec"].variables)
        for name in names:
            held: list[tuple[str, Described, Any]] = []
            label = name
            for run in shown:
                for part in run["parts"]:
                    if part["variable"].name == name and part["rows"]:
                        first = part["rows"][0]
                        label = part["variable"].label
                        values = run["data"].numbers(part["variable"], first["round"])
                        held.append((run["label"], first["d"], values))
            means = [(told, d.mean, d.mean_interval) for told, d, _ in held]
            drawn = self._draw(f"all-{name}", figures.overview(means, f"{label}, first round"))
            if drawn:
                groups: dict[str, Any] = {}
                for told, _, values in held:
                    groups[told if told not in groups else f"{told} ({len(groups) + 1})"] = values
                test = compare_groups(groups)
                found.append((label, drawn, test))
        return found


def _share(values: Any, share: Any) -> dict[str, float]:
    count = int(np.count_nonzero((values >= share.low) & (values <= share.high)))
    low, high = share_interval(count, len(values))
    return {"share": count / len(values), "low": low, "high": high}


def _with_interval(found: Described) -> str:
    low, high = found.mean_interval
    return f"{found.mean:.2f} [{low:.2f}, {high:.2f}]"


def _failures(data: RunData) -> list[dict[str, Any]]:
    counts = Counter(data.table["error"].drop_null().to_pylist())
    found = []
    for kind, count in counts.most_common():
        place = pc.index(data.table["error"], kind).as_py()
        example = str(data.table["message"][place].as_py() or "")
        found.append(
            {
                "kind": kind,
                "count": count,
                "share": count / data.table.num_rows,
                "example": example[:_LONGEST],
            }
        )
    return found


def _lengths(data: RunData) -> Described | None:
    held = data.table["tokens_out"].drop_null().to_numpy().astype(np.float64)
    return describe(held[held > 0])


def _models(manifest: dict[str, Any]) -> str:
    told = []
    for name, model in (manifest.get("models") or {}).items():
        what = model_name(model)
        told.append(f"{name}: {what}" if what != name else name)
    return "; ".join(told)


def _settings(manifest: dict[str, Any]) -> str:
    names = ("scenario", "scenario_sha256", "versions", "machine", "workers", "models", "code")
    return json.dumps({n: manifest.get(n) for n in names}, indent=2, ensure_ascii=False)
