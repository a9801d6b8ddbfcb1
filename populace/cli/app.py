"""The commands.

Exit codes: 0 done; 1 the run or the command failed; 2 input that can't be used; 3 no broker
or service answers; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError

from populace.cli import personas, records, reporting, show, talking
from populace.cli.playing import finish, follow_run, play
from populace.cli.session import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    NO_SERVICE,
    Json,
    print_json,
    quiet_settings,
    services_up,
    with_bus,
)
from populace.errors import ScenarioError
from populace.models.accounts import PriceTable
from populace.models.mixture import mixture_notes
from populace.personas.people import find_people, known_attributes
from populace.retention import retention_notes
from populace.runs import (
    Outcome,
    control,
    find_run,
    find_spec,
    manage,
    submit,
)
from populace.scenario_file import ScenarioFile, load_class, overrides_from, read_scenario
from populace.stack import stack
from populace.stack.doctor import examine
from populace.stack.state import page_address, token_file
from shared import __version__
from shared.bus import NatsBus
from shared.code import CodeLoader
from shared.errors import (
    BusUnavailableError,
    InvalidInputError,
    NoRespondersError,
    PopulaceError,
)
from shared.ids import check_token
from shared.messages.scenario import Budget, ManageRequest
from shared.problems import first_problem
from shared.settings import Settings

if TYPE_CHECKING:
    from populace.recorded import RecordedRun

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run very large populations of LLM-driven agents.",
)

File = Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario file (YAML).")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name.")]
Agents = Annotated[int | None, typer.Option(help="Number of agents, instead of the file's.")]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds, instead of the file's.")]
Workers = Annotated[int | None, typer.Option(help="Worker processes, instead of the file's.")]
Seed = Annotated[int | None, typer.Option(help="Seed, instead of the file's.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of the file, such as params.x=3."),
]


app.add_typer(personas.app, name="personas")
app.add_typer(records.app, name="runs")
app.command()(reporting.report)
app.command()(reporting.judge)
app.command()(talking.inject)
app.command()(talking.interview)

Profile = Annotated[
    bool, typer.Option("--profile", help="Measure where the run's time goes, and show it.")
]


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        # Without click's standalone mode, an Exit comes back as the call's value.
        return int(app(standalone_mode=False) or 0)
    except typer.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except InvalidInputError as error:
        show.complain(str(error))
        return BAD_INPUT
    except (BusUnavailableError, NoRespondersError) as error:
        show.complain(str(error))
        return NO_SERVICE
    except PopulaceError as error:
        show.complain(str(error))
        return FAILED
    except Exception as error:
        return _usage_error(error)


def _usage_error(error: Exception) -> int:
    """Typer's own complaints (a missing argument, say) as one sentence."""
    text = getattr(error, "format_message", None)
    if text is None:
        raise error
    show.complain(f"{text()} (see 'populace --help')")
    return BAD_INPUT


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _read(
    path: Path,
    agents: int | None,
    rounds: int | None,
    workers: int | None,
    seed: int | None,
    pairs: list[str] | None,
) -> ScenarioFile:
    overrides = overrides_from(pairs or [])
    for key, value in (
        ("agents.count", agents),
        ("rounds", rounds),
        ("agents.workers", workers),
        ("seed", seed),
    ):
        if value is not None:
            overrides[key] = value
    return read_scenario(path, overrides)


def _check(settings: Settings, file: ScenarioFile) -> None:
    """Everything about a scenario that can be wrong before anything starts.

    Raises:
        ScenarioError: one sentence with file, line and key.
    """
    roots = [*settings.roots, Path(file.spec.folder or ".").resolve()]
    load_class(file.spec, CodeLoader(settings.prefixes, roots), file)
    if file.spec.agents.personas is not None:
        try:
            folder = Path(file.spec.folder or ".")
            source = find_people(file.spec.agents.personas, folder, settings.personas_dir)
            attributes = known_attributes(source, file.spec.agents.count)
        except InvalidInputError as error:
            place = file.where(("agents", "personas"))
            raise ScenarioError(f"{place}: agents.personas: {error}") from None
        for note in mixture_notes(file.spec.models, attributes):
            show.complain(f"note: {note}")
    PriceTable(settings.prices).check_budget(file.spec)
    for note in retention_notes(file.spec, settings):
        show.complain(f"note: {note}")


@app.command()
def up(
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Whether to start the manager's web page.")
    ] = True,
) -> None:
    """Start the broker (unless POPULACE_NATS_URL is set) and all services on this machine."""
    settings = quiet_settings()
    wanted = page and stack.has_page()
    record = stack.up(settings, page=wanted)
    kind = "embedded broker" if record.embedded_broker else "broker"
    typer.echo(f"Populace is up; {kind} on {record.nats_url}. Stop it with 'populace down'.")
    if wanted:
        made = settings.manager_token is None
        where = f"in {token_file(settings)}" if made else "as POPULACE_MANAGER_TOKEN says"
        typer.echo(f"Its page: {page_address(settings)} (token: {where})")
    elif page:
        typer.echo("No page: it needs pip install 'populace[manager]'", err=True)


@app.command()
def down() -> None:
    """Stop everything that was started in this working directory."""
    count = stack.down(quiet_settings())
    typer.echo(f"stopped {count} processes" if count else "nothing was running here")


@app.command()
def status(as_json: Json = False) -> None:
    """Show broker, services, hosts and runs."""
    settings = quiet_settings()
    found = asyncio.run(stack.look(settings))
    if as_json:
        print_json(show.status_json(found))
    else:
        show.show_status(found)
    if not all(found.services.values()):
        raise typer.Exit(NO_SERVICE)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Look for what may be wrong with this machine, the broker and the services."""
    found = asyncio.run(examine(quiet_settings()))
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in found])
    else:
        show.show_findings(found)
    if any(finding.level == "bad" for finding in found):
        raise typer.Exit(FAILED)


@app.command()
def check(
    scenario: File,
    agents: Agents = None,
    rounds: Rounds = None,
    workers: Workers = None,
    seed: Seed = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Check a scenario file and import its class; nothing is started."""
    file = _read(scenario, agents, rounds, workers, seed, set_)
    _check(quiet_settings(), file)
    if as_json:
        print_json(file.spec.model_dump(mode="json", exclude_none=True))
    else:
        spec = file.spec
        asked = dict.fromkeys(m.backend for m in spec.models.values() if m.mixture is None)
        typer.echo(
            f"{scenario}: good; {spec.agents.count:,} agents, {spec.rounds} rounds, "
            f"{'model' if len(asked) == 1 else 'models'} {', '.join(asked)}"
        )


@app.command("describe")
def describe_(
    scenario: File,
    agents: Agents = None,
    rounds: Rounds = None,
    seed: Seed = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Say what a scenario is, and which parameters it takes; nothing is started."""
    from populace.describing import describe

    settings = quiet_settings()
    file = _read(scenario, agents, rounds, None, seed, set_)
    roots = [*settings.roots, Path(file.spec.folder or ".").resolve()]
    cls, params = load_class(file.spec, CodeLoader(settings.prefixes, roots), file)
    found = describe(file.spec, cls, params)
    if as_json:
        print_json(found)
    else:
        show.show_description(found)


@app.command("estimate")
def estimate_(
    scenario: File,
    agents: Agents = None,
    rounds: Rounds = None,
    seed: Seed = None,
    set_: Set = None,
    sample: Annotated[
        int, typer.Option("--sample", min=1, help="Agents that are played, without a model.")
    ] = 24,
    answer: Annotated[
        int, typer.Option("--answer-tokens", min=1, help="How long answers are taken to be.")
    ] = 60,
    as_json: Json = False,
) -> None:
    """Estimate calls, tokens and money of a scenario beforehand; no model is asked."""
    from populace.estimate import as_json as plain
    from populace.estimate import estimate

    settings = quiet_settings()
    file = _read(scenario, agents, rounds, None, seed, set_)
    _check(settings, file)
    roots = [*settings.roots, Path(file.spec.folder or ".").resolve()]
    cls, params = load_class(file.spec, CodeLoader(settings.prefixes, roots), file)
    found = asyncio.run(
        estimate(file.spec, cls, params, settings, sample=sample, answer_tokens=answer)
    )
    if as_json:
        print_json(plain(found))
    else:
        show.show_estimate(found)


@app.command()
def publish(
    scenario: File,
    agents: Agents = None,
    rounds: Rounds = None,
    workers: Workers = None,
    seed: Seed = None,
    set_: Set = None,
    run: Annotated[str | None, typer.Option(help="A name for the run.")] = None,
    as_json: Json = False,
) -> None:
    """Hand a scenario to the running services; prints the run's name."""
    settings = quiet_settings()
    file = _read(scenario, agents, rounds, workers, seed, set_)
    _check(settings, file)
    if run:
        file.spec.run = check_token(run, "the run's name")
    name = asyncio.run(with_bus(settings, lambda bus: submit(bus, settings, file.spec)))
    if as_json:
        print_json({"run": name})
    else:
        typer.echo(name)


@app.command()
def watch(run: Run, as_json: Json = False) -> None:
    """Follow a run until it is recorded, then show its rounds."""
    settings = quiet_settings()
    outcome = asyncio.run(with_bus(settings, lambda bus: follow_run(bus, settings, run, as_json)))
    finish(outcome, as_json)


@app.command("cancel")
def cancel_(run: Run) -> None:
    """End a run; what it has so far is kept."""
    settings = quiet_settings()

    async def work(bus: NatsBus) -> None:
        info = await find_run(bus, settings, run)
        if info is None:
            raise InvalidInputError(f"there is no run named {run!r}; see 'populace runs'")
        if info.over:
            raise InvalidInputError(f"the run {run!r} is over already: it has {info.state}")
        if info.state == "paused":
            await manage(bus, settings, ManageRequest(run=run, action="cancel"))
        else:
            await control(bus, settings, run, "cancel")

    asyncio.run(with_bus(settings, work))
    typer.echo(f"{run}: cancellation asked for")


def _tell_player(run: str, action: Literal["pause", "spread"], done: str) -> None:
    """Ask something of a run that is under way."""
    settings = quiet_settings()

    async def work(bus: NatsBus) -> None:
        info = await find_run(bus, settings, run)
        if info is None:
            raise InvalidInputError(f"there is no run named {run!r}; see 'populace runs'")
        if info.state not in ("accepted", "running"):
            raise InvalidInputError(f"the run {run!r} can't be {done}: it is {info.state}")
        await control(bus, settings, run, action)

    asyncio.run(with_bus(settings, work))


@app.command()
def pause(run: Run) -> None:
    """Stop a run where it is; 'populace resume' goes on from the last finished round."""
    _tell_player(run, "pause", "paused")
    typer.echo(f"{run}: asked to pause; go on with 'populace resume {run}'")


@app.command()
def spread(run: Run) -> None:
    """Give a run workers anew, on the hosts that there are now; its round is begun again."""
    _tell_player(run, "spread", "spread anew")
    typer.echo(f"{run}: it takes workers anew")


@app.command()
def resume(
    run: Run,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How many rounds the run is to have now.")
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            metavar="KEY=VALUE",
            help="What the run may spend now, such as tokens=5000, with what it has spent before.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Don't follow the run.")] = False,
    as_json: Json = False,
) -> None:
    """Go on with a run that is paused, failed, cancelled, or (with --rounds) finished."""
    settings = quiet_settings()
    check_token(run, "the run's name")
    may_spend = _budget(overrides_from(budget)) if budget else None

    async def work(bus: NatsBus) -> Outcome | None:
        info = await find_run(bus, settings, run)
        if info is None:
            raise InvalidInputError(f"there is no run named {run!r}; see 'populace runs'")
        life = info.life
        if info.state != "running":  # or a director has taken it up by itself
            request = ManageRequest(run=run, action="resume", rounds=rounds, budget=may_spend)
            await manage(bus, settings, request)
            life += 1
        elif rounds is not None or may_spend is not None:
            raise InvalidInputError(f"the run {run!r} is running; it can't be changed now")
        if detach:
            return None
        return await follow_run(bus, settings, run, as_json, life=life if life > 1 else None)

    outcome = asyncio.run(with_bus(settings, work))
    if outcome is None:
        typer.echo(f"{run}: resumed")
    else:
        finish(outcome, as_json)


def _budget(values: dict[str, Any]) -> Budget:
    try:
        return Budget.model_validate(values)
    except ValidationError as error:
        raise InvalidInputError(f"--budget: {first_problem(error)}") from None


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep's file (YAML).")],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Play this variant; may be repeated.")
    ] = None,
    agents: Agents = None,
    rounds: Rounds = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Play a scenario with many seeds and parameters; those that were finished are not repeated.

    Ctrl-C pauses the runs under way; the same command goes on.
    """
    from populace.cli.sweeping import Sweep, table
    from populace.sweep import read_sweep

    settings = quiet_settings()
    overrides = overrides_from(set_ or [])
    for key, value in (("agents.count", agents), ("rounds", rounds)):
        if value is not None:
            overrides[key] = value
    spec, planned = read_sweep(file, overrides, only)
    for one in planned:
        _check(settings, one.file)
    folders = {Path(one.file.spec.folder or ".") for one in planned}
    with services_up(settings, folders, quiet=as_json):

        async def work(bus: NatsBus) -> tuple[bool, list[dict[str, Any]], Path]:
            playing = Sweep(bus, settings, spec, planned, quiet=as_json)
            done = await playing.play()
            return done, playing.rows(), playing.write()

        done, rows, written = asyncio.run(with_bus(settings, work))
    page = _sweep_report(spec.name, rows, settings) if done else None
    if as_json:
        print_json({"runs": rows, "file": str(written), "report": page and str(page)})
    else:
        show.out.print(table(rows))
        show.out.print(f"runs:     {written}", markup=False)
        if page is not None:
            show.out.print(f"report:   {page}", markup=False)
    if not done:
        raise typer.Exit(INTERRUPTED)
    if any(row["state"] != "finished" for row in rows):
        raise typer.Exit(FAILED)


def _sweep_report(name: str, rows: list[dict[str, Any]], settings: Settings) -> Path | None:
    """Write a page on all runs of a sweep; None if there is nothing to write, or to write with."""
    named, absent = reporting.sweep_runs(rows, settings)
    path = settings.runs_dir / f"{name}.html"
    try:
        made = reporting.make_report(name, named, settings, absent=absent)
        reporting.write_report(made, path)
    except InvalidInputError as error:
        show.complain(f"no report was written: {error}")
        return None
    return path


@app.command()
def replay(
    run: Run,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Fail on any prompt that differs from the one of then."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Play a run again from the answers that were kept of it; no model is asked.

    Of a run that was not finished, the rounds that were. Ends with 1 if an answer differs from what
    was recorded then.
    """
    from populace.cli.replaying import FinishedRounds, replay_of
    from populace.recorded import compare, results

    settings = quiet_settings()
    recorded = results(run, settings)
    with services_up(settings, [], quiet=as_json):

        async def work(bus: NatsBus) -> tuple[Outcome, int]:
            info = await find_run(bus, settings, run)
            rounds = 0 if info is None else info.rounds_done
            spec = replay_of(await find_spec(bus, settings, run), run, rounds, strict=strict)
            return await play(bus, settings, spec, as_json), rounds

        outcome, rounds = asyncio.run(with_bus(settings, work))
    if outcome.unrecorded or (outcome.state != "finished" and not outcome.records):
        finish(outcome, as_json)
        return
    found = compare(FinishedRounds(recorded, rounds), results(outcome.run, settings))
    if as_json:
        told = {**show.outcome_json(outcome), "replay_of": run, "identical": found.identical}
        print_json({**told, "different": found.different})
    else:
        show.show_comparison(run, outcome.run, found)
        if outcome.state != "finished":
            why = f": {outcome.reason}" if outcome.reason else ""
            show.complain(f"the run {outcome.run} is {outcome.state}{why}")
    if outcome.state == "cancelled":
        raise typer.Exit(INTERRUPTED)
    if outcome.state != "finished" or not found.identical:
        raise typer.Exit(FAILED)


@app.command("run")
def run_(
    scenario: File,
    agents: Agents = None,
    rounds: Rounds = None,
    workers: Workers = None,
    seed: Seed = None,
    set_: Set = None,
    profile: Profile = False,
    as_json: Json = False,
) -> None:
    """All of it: start services if needed, publish, watch, show results, stop what it started.

    Ctrl-C cancels the run and keeps what is there.
    """
    settings = quiet_settings()
    if profile:
        set_ = [*(set_ or []), "profile=true"]
    file = _read(scenario, agents, rounds, workers, seed, set_)
    _check(settings, file)
    with services_up(settings, [Path(file.spec.folder or ".")], quiet=as_json):
        outcome = asyncio.run(
            with_bus(settings, lambda bus: play(bus, settings, file.spec, as_json))
        )
    finish(outcome, as_json)


@app.command()
def results(
    run: Run,
    by: Annotated[
        str | None, typer.Option("--by", help="Group answers by this column, such as education.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write all answers to this file ('-': print them).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a recorded run's rounds, and where its files are."""
    from populace.recorded import results as find_results

    recorded = find_results(run, quiet_settings())
    folder = recorded.folder
    if csv is not None:
        _write_csv(recorded, csv)
        return
    manifest, rows = recorded.manifest, recorded.rounds
    groups = None
    if by is not None:
        from populace.cli.groups import grouped  # pyarrow is slow to import, and few need it

        groups = grouped(folder / "answers.parquet", by)
    if as_json:
        found = {"manifest": manifest, "rounds": rows, "folder": str(folder.resolve())}
        print_json(found if groups is None else {**found, "groups": groups})
        return
    if groups is not None:
        show.show_groups(by or "", groups)
        return
    from shared.messages.scenario import RoundRow

    outcome = Outcome(
        run,
        name=manifest["name"],
        state=manifest["state"],
        reason=manifest["reason"] or "",
        rows=[RoundRow.model_validate(row) for row in rows],
        folder=str(folder.resolve()),
        scripted=manifest.get("scripted", []),
    )
    show.show_outcome(outcome)
    if outcome.state != "finished":
        show.out.print(f"state:    {outcome.state} {outcome.reason}".rstrip(), markup=False)


def _write_csv(recorded: RecordedRun, path: Path) -> None:
    try:
        if str(path) == "-":
            recorded.write_csv(sys.stdout.buffer)
        else:
            count = recorded.write_csv(path)
            typer.echo(f"{path}: {count:,} answers")
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise InvalidInputError(f"the answers can't be written to {path}: {error}") from None
