"""``populace report`` and ``populace judge``: what came of runs, as a page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError

from populace.cli import show
from populace.cli.playing import finish, play
from populace.cli.session import FAILED, Json, print_json, quiet_settings, services_up, with_bus
from populace.recorded import RecordedRun, results
from populace.report.judged import note_judged
from populace.scenario_file import overrides_from
from shared.errors import InvalidInputError
from shared.ids import new_id
from shared.messages.scenario import AgentsSpec, ModelSpec, ScenarioSpec
from shared.problems import first_problem
from shared.settings import Settings

if TYPE_CHECKING:
    from populace.report.page import Report

_VERDICT_TOKENS = 400
_JUDGING = "populace.report.judging:Judging"


def make_report(
    title: str,
    runs: Sequence[tuple[str, str]],
    settings: Settings,
    *,
    absent: dict[str, str] | None = None,
) -> Report:
    """A report of recorded runs.

    Args:
        title: of the page.
        runs: names, with labels.
        settings: of the installation.
        absent: why there is nothing of some of them.

    Raises:
        InvalidInputError: one is not recorded, or the extra ``report`` isn't installed.
    """
    try:
        from populace.report.data import load
        from populace.report.page import Absent, Report
    except ImportError as error:
        raise InvalidInputError(
            f"reports need matplotlib, jinja2 and scipy ({error}): pip install 'populace[report]'"
        ) from None
    missing = absent or {}
    loaded = [(label, load(results(run, settings))) for run, label in runs if run not in missing]
    gone = [Absent(run, label, missing[run]) for run, label in runs if run in missing]
    return Report(title, loaded, gone, settings.runs_dir)


def write_report(report: Report, path: Path) -> None:
    """Write the page.

    Raises:
        InvalidInputError: it can't be written.
    """
    text = report.html()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"the report can't be written to {path}: {error}") from None


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, or a sweep's name.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write the page; default: with the run.")
    ] = None,
    figures: Annotated[
        Literal["png", "pdf"] | None,
        typer.Option("--figures", help="Write the figures as files too, beside the page."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page on recorded runs, or on all runs of a sweep."""
    settings = quiet_settings()
    named, absent, title = _named(runs, settings)
    made = make_report(title, named, settings, absent=absent)
    path = out or _usual_place(runs, settings)
    write_report(made, path)
    drawn: list[Path] = []
    if figures is not None:
        drawn = made.save_figures(path.with_suffix(".figures"), figures)
    if as_json:
        print_json({"page": str(path), "figures": [str(one) for one in drawn]})
        return
    typer.echo(f"report: {path}")
    if drawn:
        typer.echo(f"figures: {len(drawn)} in {drawn[0].parent}")


def _named(
    runs: Sequence[str], settings: Settings
) -> tuple[list[tuple[str, str]], dict[str, str], str]:
    """The runs that are meant, with labels; why some can't be shown; a title."""
    named: list[tuple[str, str]] = []
    absent: dict[str, str] = {}
    for name in runs:
        sweep = settings.runs_dir / f"{name}.sweep.json"
        if not sweep.is_file() or (settings.runs_dir / name).is_dir():
            named.append((name, name))
            continue
        try:
            rows = json.loads(sweep.read_text())
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"{sweep} can't be read: {error}") from None
        found, gone = sweep_runs(rows, settings)
        named += found
        absent.update(gone)
    return named, absent, runs[0] if len(runs) == 1 else f"{len(named)} runs"


def sweep_runs(
    rows: Sequence[dict[str, Any]], settings: Settings
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """A sweep's runs with labels, and why there is nothing to report of some."""
    named, absent = [], {}
    for row in rows:
        cell = ", ".join(f"{k.rpartition('.')[2]}={v}" for k, v in row["cell"].items())
        label = ", ".join(part for part in (row["variant"], cell) if part)
        named.append((row["run"], label or row["run"]))
        if not (settings.runs_dir / row["run"] / "manifest.json").is_file():
            absent[row["run"]] = f"{row['state'] or 'not played'} {row['reason']}".strip()
    return named, absent


def _usual_place(runs: Sequence[str], settings: Settings) -> Path:
    folder = settings.runs_dir / runs[0]
    if len(runs) > 1:
        return settings.runs_dir / "report.html"
    return folder / "report.html" if folder.is_dir() else folder.with_suffix(".html")


def judge(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run whose agents have personas.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="KEY=VALUE",
            help="The judge, such as backend=openai; default: the model that was asked.",
        ),
    ] = None,
    sample: Annotated[int, typer.Option("--sample", min=1, help="Answers that are judged.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="Of the sample.")] = 0,
    as_json: Json = False,
) -> None:
    """Ask a model which answers of a run contradict the persona of who gave them.

    The verdicts are a run of their own; the report of the first shows them, with the judge named.
    """
    settings = quiet_settings()
    recorded = results(run, settings)
    spec = judging(recorded, model, sample, seed)
    with services_up(settings, [], quiet=as_json):
        outcome = asyncio.run(with_bus(settings, lambda bus: play(bus, settings, spec, as_json)))
    if outcome.state == "finished":
        note_judged(recorded.folder, outcome.run)
    finish(outcome, as_json)
    if not as_json and outcome.state == "finished":
        show.out.print(f"see it by 'populace report {run}'", markup=False)
    if outcome.state != "finished":
        raise typer.Exit(FAILED)


def judging(recorded: RecordedRun, model: list[str] | None, sample: int, seed: int) -> ScenarioSpec:
    """The scenario in which a model judges a run.

    Raises:
        InvalidInputError: the run can't be judged, or the model can't be used.
    """
    from populace.report.judging import judgeable

    count = min(sample, judgeable(recorded))
    models = recorded.manifest.get("scenario", {}).get("models", {})
    fields = dict(models.get("default", {}))
    if model:
        fields = overrides_from(model)
    if not model:
        # The run's own answers may be a number; a verdict is a sentence.
        fields["temperature"] = 0.0
        fields["max_tokens"] = max(_VERDICT_TOKENS, int(fields.get("max_tokens") or 0))
    fields.setdefault("temperature", 0.0)
    try:
        judge_model = ModelSpec.model_validate(fields)
    except ValidationError as error:
        raise InvalidInputError(f"--model: {first_problem(error)}") from None
    if judge_model.mixture is not None:
        raise InvalidInputError("the run mixes models; name the judge by --model")
    return ScenarioSpec(
        name=f"judging {recorded.run}",
        scenario=_JUDGING,
        seed=seed,
        agents=AgentsSpec(count=count),
        models={"default": judge_model},
        params={"run": recorded.run, "folder": str(recorded.folder.resolve())},
        run=new_id(f"{recorded.run[:40]}-judged"),
    )
