"""``populace runs``: the runs that there are, and what to do with them afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from typing import Annotated

import typer

from populace.cli import show
from populace.cli.session import FAILED, Json, print_json, quiet_settings, with_bus
from populace.recorded import compare, deleted_folder, put_away, results
from populace.runs import find_run, forget_run, list_runs
from shared.bus import NatsBus
from shared.errors import InvalidInputError
from shared.ids import check_token

app = typer.Typer(help="List, show, compare and delete runs.")

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name.")]


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, as_json: Json = False) -> None:
    if context.invoked_subcommand is None:
        list_(as_json)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the runs that the installation knows."""
    settings = quiet_settings()
    found = asyncio.run(with_bus(settings, lambda bus: list_runs(bus, settings)))
    if as_json:
        print_json([info.model_dump() for info in found])
    elif found:
        show.out.print(show.runs_table(found))
    else:
        typer.echo("no runs")


@app.command("show")
def show_(run: Run, as_json: Json = False) -> None:
    """Show what a run was: its state, scenario, versions, models, costs."""
    recorded = results(run, quiet_settings())
    if as_json:
        print_json(recorded.manifest)
    else:
        show.show_manifest(recorded.manifest)


@app.command("compare")
def compare_(
    first: Run,
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Another run's name.")],
    as_json: Json = False,
) -> None:
    """Compare the answers of two runs, call by call; ends with 1 if they differ."""
    settings = quiet_settings()
    found = compare(results(first, settings), results(second, settings))
    if as_json:
        print_json({**dataclasses.asdict(found), "identical": found.identical})
    else:
        show.show_comparison(first, second, found)
    if not found.identical:
        raise typer.Exit(FAILED)


@app.command("delete")
def delete(
    run: Run,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Delete a run: its files, and all that the broker keeps of it. It can't be undone."""
    settings = quiet_settings()
    check_token(run, "the run's name")
    folder = settings.runs_dir / run

    async def work(bus: NatsBus) -> None:
        info = await find_run(bus, settings, run)
        if info is None and not folder.exists() and not deleted_folder(folder).exists():
            raise InvalidInputError(f"there is no run named {run!r}; see 'populace runs'")
        if info is not None and info.state in ("accepted", "running"):
            raise InvalidInputError(f"the run {run!r} is {info.state}; cancel it first")
        if not yes:
            typer.confirm(f"Delete {folder} and all that is kept of {run}?", abort=True)
        away = put_away(folder)
        await forget_run(bus, settings, run)
        if away.exists():
            shutil.rmtree(away)

    asyncio.run(with_bus(settings, work))
    typer.echo(f"{run}: deleted")
