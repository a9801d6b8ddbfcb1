"""What the command line prints: progress while a run goes on, tables at its end."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from populace.models.accounts import Usage
from populace.runs import Outcome
from populace.stack.stack import StackStatus
from shared.messages.scenario import RunInfo, Status

if TYPE_CHECKING:
    from populace.estimate import Estimate
    from populace.interviews import InterviewAnswers
    from populace.recorded import Comparison
    from populace.stack.doctor import Finding

_PLAIN_WIDTH = 160

out = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
err = Console(stderr=True, highlight=False)


def complain(text: str) -> None:
    """One sentence on standard error."""
    sys.stderr.write(f"populace: {text}\n")


def show_description(found: dict[str, Any]) -> None:
    """What a scenario is."""
    spec, params = found["spec"], found["params"]
    out.print(f"{spec['name']}: {found['about']}", markup=False, highlight=False)
    agents = f"{spec['agents']['count']:,} agents, {spec['rounds']} rounds"
    out.print(agents, markup=False, highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("parameter", "value", "what it is"):
        table.add_column(name)
    for name, value in params["values"].items():
        table.add_row(*map(Text, (name, str(value), params["about"].get(name, ""))))
    if params["values"]:
        out.print(table)


def number(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".") if abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return escape(str(value))


class Live:
    """One live line per round on a terminal; a plain line per event elsewhere.

    Args:
        quiet: show nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._tty = err.is_terminal and not quiet
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=err,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Live:
        if self._tty:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tty:
            self._progress.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._quiet:
            return
        if self._tty:
            self._progress.console.print(text, markup=False, soft_wrap=True)
        else:
            err.print(text, markup=False, soft_wrap=True)

    def take(self, status: Status) -> None:
        """Show a status event."""
        if self._quiet:
            return
        if status.kind == "started":
            workers = sum((status.manifest or {}).get("workers", {}).values())
            self.say(
                f"run {status.run}: {status.name}, {status.agents:,} agents on {workers} workers"
            )
        elif status.kind == "restored":
            where = f"the end of round {status.round}" if status.round else "the beginning"
            self.say(f"run {status.run}: taken up again from {where}")
        elif self._tty:
            self._show_live(status)
        elif status.kind == "round_finished" and status.row is not None:
            row = status.row
            self.say(
                f"round {row.round}/{status.rounds}: {row.answers:,} answers, {row.failed:,} "
                f"failed, {row.seconds:.1f} s"
            )

    def _show_live(self, status: Status) -> None:
        if status.kind == "round_started":
            self._task = self._progress.add_task(
                f"round {status.round}/{status.rounds}", total=status.agents, note=""
            )
        elif status.kind == "progress" and self._task is not None:
            self._progress.update(
                self._task,
                completed=status.done,
                total=status.agents,
                note=_note(status.failed, status.mean, status.tokens),
            )
        elif status.kind == "round_finished" and status.row and self._task is not None:
            row = status.row
            asked = row.answers + row.failed
            mean = row.values.get("mean")
            self._progress.update(
                self._task,
                completed=asked,
                total=asked,
                note=_note(row.failed, mean if isinstance(mean, float) else None, row.tokens),
            )


def _note(failed: int | None, mean: float | None, tokens: int | None) -> str:
    parts = [f"{failed or 0:,} failed"]
    if mean is not None:
        parts.append(f"mean {mean:.2f}")
    if tokens:
        parts.append(f"{tokens:,} tokens")
    return ", ".join(parts)


def outcome_table(outcome: Outcome) -> Table:
    """The table of rounds."""
    keys: list[str] = []
    for row in outcome.rows:
        keys.extend(key for key in row.values if key not in keys)
    # Lists and mappings have no place in a table; they stand in rounds.json.
    rows = [row.values for row in outcome.rows]
    keys = [k for k in keys if not any(isinstance(r.get(k), (dict, list)) for r in rows)]
    table = Table(title=f"{escape(outcome.name)} ({outcome.run})", box=box.SIMPLE_HEAD)
    for heading in ("round", "answers", "failed", *keys, "tokens", "seconds"):
        table.add_column(heading.replace("_", " "), justify="right")
    for row in outcome.rows:
        table.add_row(
            str(row.round),
            number(row.answers),
            number(row.failed),
            *(number(row.values.get(key)) for key in keys),
            number(row.tokens),
            number(row.seconds),
        )
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:,.2f} {unit}"
    return f"{value * 1e6:,.1f} µs"


def show_profile(profile: dict[str, Any]) -> None:
    """Where a run's time went."""
    parts = ("agents' own code", "serialisation", "engine", "idle")
    table = Table(title="where the processes' time went", box=box.SIMPLE_HEAD)
    for heading in ("process", "seconds", *parts):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for name, row in profile["processes"].items():
        shares = (_share(row[part], row["seconds"]) for part in parts)
        table.add_row(name, number(row["seconds"]), *shares)
    out.print(table)
    call = dict(profile["call"])
    title = f"an average call, of {call.pop('calls'):,}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    whole = sum(call.values())
    for part, value in call.items():
        table.add_row(part, _seconds(value), _share(value, whole))
    out.print(table)


def show_outcome(outcome: Outcome) -> None:
    """The end of a run, for a person."""
    if outcome.rows:
        out.print(outcome_table(outcome))
    if outcome.profile:
        show_profile(outcome.profile)
    failures: dict[str, int] = {}
    for row in outcome.rows:
        for kind, count in row.failures.items():
            failures[kind] = failures.get(kind, 0) + count
    if failures:
        listed = ", ".join(f"{kind} {count:,}" for kind, count in failures.items())
        out.print(f"failures: {listed}", markup=False)
        example = next(row.example for row in outcome.rows if row.failures)
        out.print(f"          such as {' '.join(example.split())[:200]}", markup=False)
    usage = usage_line([row.usage for row in outcome.rows])
    if usage:
        out.print(f"models:   {usage}", markup=False)
    if outcome.scripted:
        out.print(
            f"scripted: no language model answered ({', '.join(outcome.scripted)})", markup=False
        )
    if outcome.folder:
        out.print(f"results:  {outcome.folder}", markup=False, soft_wrap=True)


def usage_line(parts: list[dict[str, Any]]) -> str:
    """What models were asked, in one line; empty if they were asked nothing."""
    total = Usage()
    for part in parts:
        total.merge(part)
    if not total.requests and not total.kept:
        return ""
    told = [
        f"{total.requests:,} requests",
        f"{total.tokens_in:,} tokens in, {total.tokens_out:,} out",
    ]
    for count, words in (
        (total.kept, "answers from kept ones"),
        (max(0, total.attempts - total.requests), "more attempts"),
        (total.failed, "failed"),
        (total.refused, "not asked: the budget was spent"),
        (total.repaired, "repaired"),
        (total.ended_early, "ended by the token limit"),
        (total.shortened, "prompts shortened"),
        (total.cut, "prompts cut"),
    ):
        if count:
            told.append(f"{count:,} {words}")
    if total.cached:
        told.append(f"{total.cached / max(1, total.tokens_in):.0%} of prompt tokens at hand")
    if total.money:
        told.append(f"{total.money:,.4g} of money")
    return "; ".join(told)


def show_estimate(found: Estimate) -> None:
    """An estimate, for a person."""
    title = f"{found.agents:,} agents, {found.rounds:,} rounds; from {found.sampled:,} agents"
    if found.played < found.rounds:
        title += f" and {found.played} rounds"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in ("model", "requests", "tokens in", "tokens out", "money"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, one in found.models.items():
        table.add_row(escape(name), *(number(value) for value in one.values()))
    if len(found.models) > 1:
        parts = (found.requests, found.tokens_in, found.tokens_out, found.money)
        table.add_row("all", *(number(value) for value in parts))
    out.print(table)
    if found.growing:
        names = ", ".join(found.growing)
        out.print(f"note:     prompts of {names} grow with the number of agents", markup=False)
    if not found.models:
        out.print("no model is asked", markup=False)
    elif found.money is None:
        out.print(
            "money:    not known; give prices in the file that POPULACE_PRICES names, or as price: "
            "{input, output} of the model",
            markup=False,
        )


def show_groups(by: str, groups: list[dict[str, Any]]) -> None:
    """Answers by a column."""
    table = Table(title=f"answers by {escape(by)}", box=box.SIMPLE_HEAD)
    for heading in ("round", by, "answers", "failed", "mean", "deviation", "tokens"):
        table.add_column(heading, justify="left" if heading == by else "right")
    for row in groups:
        table.add_row(*(number(value) for value in row.values()))
    out.print(table)


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The end of a run, for a program."""
    fields = dataclasses.asdict(outcome)
    fields["rows"] = [row.model_dump() for row in outcome.rows]
    return fields


def status_json(status: StackStatus) -> dict[str, Any]:
    """A look at the installation, for a program."""
    return {
        "nats_url": status.nats_url,
        "embedded_broker": status.embedded_broker,
        "processes": [
            {"name": record.name, "pid": record.pid, "alive": alive}
            for record, alive in status.processes
        ],
        "services": status.services,
        "page": status.page,
        "hosts": [host.model_dump() for host in status.hosts],
        "runs": [run.model_dump() for run in status.runs],
    }


def show_status(status: StackStatus) -> None:
    """A look at the installation, for a person."""
    kind = {True: "embedded", False: "yours", None: "not started here"}[status.embedded_broker]
    out.print(f"{'broker':<17}{status.nats_url} ({kind})", markup=False)
    for name, count in status.services.items():
        state = f"{count} up" if count else "down"
        dead = [r.pid for r, alive in status.processes if r.name == name and not alive]
        note = f" (process {dead[0]} of this stack has ended)" if dead else ""
        out.print(f"{name:<17}{state}{note}", markup=False)
    for host in status.hosts:
        out.print(
            f"{'host':<17}{host.host}: {host.cores} cores, load {host.load:.0%}, {host.workers} "
            f"workers at work, room for {host.free}{', draining' if host.draining else ''}",
            markup=False,
        )
    if status.page:
        out.print(f"{'page':<17}{status.page}", markup=False)
    if status.runs:
        out.print(runs_table(status.runs[:10]))


def show_findings(findings: list[Finding]) -> None:
    """What the doctor found, for a person."""
    marks = {"good": "[green]+[/green]", "note": "[yellow]·[/yellow]", "bad": "[red]![/red]"}
    for finding in findings:
        mend = f" → {finding.mend}" if finding.mend else ""
        said = escape(f"{finding.about:<17}{finding.said}{mend}")
        out.print(f"{marks[finding.level]} {said}", soft_wrap=True)


def show_manifest(manifest: dict[str, Any]) -> None:
    """A run's manifest, a line per key."""
    for name, value in manifest.items():
        shown = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value
        if shown not in (None, "", "{}", "[]"):
            out.print(f"{name + ':':<18}{shown}", markup=False, soft_wrap=True)


def show_interviews(found: InterviewAnswers) -> None:
    """What agents said."""
    for answer in found.answers:
        person = answer.persona or {}
        who = ", ".join(f"{name}: {value}" for name, value in person.items())
        out.print(f"{answer.agent}{f' ({who})' if who else ''}", style="bold", markup=False)
        out.print(f"  {answer.text or answer.error}", markup=False, soft_wrap=True)


def show_comparison(first: str, second: str, found: Comparison) -> None:
    """How the answers of two runs differ."""
    if found.identical:
        out.print(f"{first} and {second}: all {found.equal:,} answers are the same", markup=False)
        return
    out.print(
        f"{first} and {second}: {found.equal:,} answers are the same, {found.differing:,} differ, "
        f"{found.only_first:,} and {found.only_second:,} are in one alone",
        markup=False,
    )
    for row in found.different:
        where = f"round {row['round']}, {row['population']}/{row['agent']}.{row['method']}"
        out.print(f"  {where}: {row['first']!r} / {row['second']!r}", markup=False, soft_wrap=True)


def runs_table(runs: list[RunInfo]) -> Table:
    """Runs and their states."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("run", "scenario", "state", "rounds", "agents", "started", "reason"):
        table.add_column(heading)
    for run in runs:
        table.add_row(
            run.run,
            escape(run.name),
            run.state,
            f"{run.rounds_done}/{run.rounds}",
            number(run.agents),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created)),
            escape(run.reason),
        )
    return table
