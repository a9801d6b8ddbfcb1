"""The figures of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from populace.report.drawing import plain, tidy
from populace.report.statistics import Interval, Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from populace.report.data import RunData
    from populace.report.spec import Reference, Variable

_WIDTH = 9.0
_BINS = 40
_MOST_ROUNDS = 12
"""Rounds that get a histogram each; of more, the first, the last, and some between."""
_MOST_BARS = 30
_COLOURS = {"human": "#c44e52", "paper": "#8172b3", "theory": "#555555"}
_MARKS = {"human": "s", "paper": "D", "theory": "X"}
_OURS = "#4c72b0"
_WINNING = "#dd8452"


def shown_rounds(rounds: Sequence[int]) -> list[int]:
    """The rounds that are drawn apart."""
    if len(rounds) <= _MOST_ROUNDS:
        return list(rounds)
    places = np.linspace(0, len(rounds) - 1, _MOST_ROUNDS).round().astype(int)
    return [rounds[i] for i in dict.fromkeys(places.tolist())]


def edges_of(values: Numbers, variable: Variable) -> Numbers:
    """Ends of a histogram's bins, the same for all rounds."""
    low = variable.low if variable.low is not None else float(values.min())
    high = variable.high if variable.high is not None else float(values.max())
    if high <= low:
        low, high = low - 0.5, high + 0.5
    if np.all(values == np.round(values)) and high - low < _BINS:
        return np.arange(np.floor(low) - 0.5, np.ceil(high) + 1.0)
    return np.linspace(low, high, _BINS + 1)


def histograms(data: RunData, variable: Variable) -> Figure | None:
    """A histogram per round, with the recorded mark and what others have found."""
    everything = data.numbers(variable)
    if not len(everything):
        return None
    rounds = shown_rounds(data.played)
    if not rounds:
        return None
    columns = min(3, len(rounds))
    lines = -(-len(rounds) // columns)
    figure = Figure(figsize=(_WIDTH, 0.6 + 2.1 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True)
    edges = edges_of(everything, variable)
    marks = data.recorded(variable.mark) if variable.mark else {}
    for axes, number in zip(grid.flat, rounds, strict=False):
        values = data.numbers(variable, number)
        axes.hist(values, bins=edges.tolist(), color=_OURS)
        if number in marks:
            axes.axvline(marks[number], color=_WINNING, linewidth=1.6)
        for reference in references_of(variable, number):
            if reference.of == "mean":
                colour = _COLOURS[reference.kind]
                axes.axvline(reference.value, color=colour, linewidth=1, linestyle="--")
        axes.set_title(f"round {number} (n = {len(values):,})", fontsize=9)
        tidy(axes)
    for axes in list(grid.flat)[len(rounds) :]:
        axes.set_visible(False)
    figure.supxlabel(plain(variable.label), fontsize=9)
    return figure


def references_of(variable: Variable, number: int) -> list[Reference]:
    """What is known of a round."""
    return [r for r in variable.references if r.round is None or r.round == number]


def against_others(
    data: RunData, variable: Variable, ours: Mapping[int, tuple[float, Interval]]
) -> Figure | None:
    """Our mean in each round, with its interval, beside what others have found.

    Args:
        data: of the run.
        variable: what was asked.
        ours: mean and interval by round.
    """
    rounds = [n for n in ours if any(r.round == n for r in variable.references)]
    if not rounds:
        return None
    rows: list[tuple[str, float, Interval | None, str]] = []
    marks = data.recorded(variable.mark) if variable.mark else {}
    for number in rounds:
        mean, interval = ours[number]
        rows.append((f"round {number}: this run, mean", mean, interval, "ours"))
        of_mark = [r for r in variable.references if r.round == number and r.of == "mark"]
        if of_mark and number in marks:
            rows.append(
                (f"round {number}: this run, {variable.mark_label}", marks[number], None, "ours")
            )
        for reference in references_of(variable, number):
            kind: str = reference.kind
            rows.append(
                (f"round {number}: {reference.label} ({kind})", reference.value, None, kind)
            )
    figure = Figure(figsize=(_WIDTH, 0.7 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, (_, value, bounds, kind) in enumerate(rows):
        colour = _COLOURS.get(kind, _OURS)
        if bounds is not None:
            axes.plot(bounds, [place, place], color=colour, linewidth=2)
        axes.plot([value], [place], _MARKS.get(kind, "o"), color=colour, clip_on=False)
    axes.set_yticks(range(len(rows)), [plain(row[0]) for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(plain(variable.label))
    axes.set_xlim(variable.low, variable.high)
    axes.grid(axis="x", alpha=0.3)
    tidy(axes)
    return figure


def over_rounds(lines: Mapping[str, Mapping[int, float]], label: str = "") -> Figure | None:
    """Lines over the rounds."""
    drawn = {name: points for name, points in lines.items() if len(points) > 1}
    if not drawn:
        return None
    figure = Figure(figsize=(_WIDTH, 2.8), layout="constrained")
    axes = figure.subplots()
    for name, points in drawn.items():
        axes.plot(list(points), list(points.values()), marker="o", markersize=3, label=plain(name))
    axes.set_xlabel("round")
    axes.set_ylabel(plain(label))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8, loc="best")
    tidy(axes)
    return figure


def by_group(groups: Mapping[str, Numbers], variable: Variable, title: str) -> Figure | None:
    """Box and violin of each group."""
    held = {name: values for name, values in groups.items() if len(values)}
    if len(held) < 2:
        return None
    figure = Figure(figsize=(_WIDTH, 0.9 + 0.5 * len(held)), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(held)))
    for place, values in zip(places, held.values(), strict=True):
        if len(values) > 2 and np.ptp(values) > 0:
            parts = axes.violinplot([values], [place], orientation="horizontal", widths=0.8)
            for body in parts["bodies"]:  # type: ignore[attr-defined]
                body.set_alpha(0.25)
            for name in ("cbars", "cmins", "cmaxes"):
                parts[name].set_visible(False)
    axes.boxplot(
        list(held.values()),
        positions=places,
        orientation="horizontal",
        widths=0.3,
        showmeans=True,
        flierprops={"markersize": 2},
    )
    axes.set_yticks(places, [plain(f"{n} ({len(v):,})") for n, v in held.items()], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(plain(variable.label))
    axes.set_title(plain(title), fontsize=9)
    tidy(axes)
    return figure


def bars(counts: Mapping[str, int], label: str) -> Figure | None:
    """How many gave each answer, in the order given."""
    total = sum(counts.values())
    if not total:
        return None
    names = list(counts)[:_MOST_BARS]
    figure = Figure(figsize=(_WIDTH, 0.7 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(names)))
    axes.barh(places, [100 * counts[n] / total for n in names], color=_OURS)
    for place, name in zip(places, names, strict=True):
        axes.annotate(
            f" {counts[name]:,}", (100 * counts[name] / total, place), fontsize=8, va="center"
        )
    axes.set_yticks(places, [plain(name[:60]) for name in names], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(plain(f"{label}, per cent of {total:,}"))
    tidy(axes)
    return figure


def stacked(shares: Mapping[str, Counter[str]], order: Sequence[str], label: str) -> Figure | None:
    """Shares of each answer by group, one bar a group."""
    held = {name: counts for name, counts in shares.items() if sum(counts.values())}
    if len(held) < 2:
        return None
    figure = Figure(figsize=(_WIDTH, 1.1 + 0.35 * len(held)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(held))
    left = np.zeros(len(held))
    for answer in list(order)[:_MOST_BARS]:
        widths = np.array([100 * c[answer] / sum(c.values()) for c in held.values()])
        axes.barh(places, widths, left=left, label=plain(answer[:40]))
        left += widths
    axes.set_yticks(places, [plain(name) for name in held], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("per cent")
    axes.set_title(plain(label), fontsize=9)
    figure.legend(frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    tidy(axes)
    return figure


def overview(rows: Sequence[tuple[str, float, Interval]], label: str) -> Figure | None:
    """A mean with its interval for each run."""
    if len(rows) < 2:
        return None
    figure = Figure(figsize=(_WIDTH, 0.7 + 0.26 * len(rows)), layout="constrained")
    axes: Axes = figure.subplots()
    for place, (_, mean, bounds) in enumerate(rows):
        axes.plot(bounds, [place, place], color=_OURS, linewidth=2)
        axes.plot([mean], [place], "o", color=_OURS, markersize=4)
    axes.set_yticks(range(len(rows)), [plain(row[0]) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(plain(label))
    axes.grid(axis="x", alpha=0.3)
    tidy(axes)
    return figure
