"""Playing a run at the command line: handing it in, following it, showing how it ended."""

from __future__ import annotations

import asyncio
import contextlib

import typer

from populace.cli import show
from populace.cli.session import FAILED, INTERRUPTED, end, interrupts, print_json
from populace.runs import Outcome, control, follow, submit
from shared.bus import NatsBus
from shared.errors import PopulaceError
from shared.ids import check_token
from shared.messages.scenario import ScenarioSpec
from shared.settings import Settings


async def play(bus: NatsBus, settings: Settings, spec: ScenarioSpec, quiet: bool) -> Outcome:
    """Hand a scenario to the services and follow it; Ctrl-C cancels it.

    Raises:
        PopulaceError: it was refused, or nobody answers.
    """
    run = await submit(bus, settings, spec)
    interrupted = asyncio.Event()
    with interrupts(interrupted):
        watching = asyncio.ensure_future(follow_run(bus, settings, run, quiet, submitted=True))
        signalled = asyncio.ensure_future(interrupted.wait())
        try:
            await asyncio.wait({watching, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                interrupted.clear()
                again = asyncio.ensure_future(interrupted.wait())
                show.complain(f"cancelling {run}; once more to leave at once")
                with contextlib.suppress(PopulaceError):
                    await control(bus, settings, run, "cancel")
                await asyncio.wait(
                    {watching, again}, timeout=60, return_when=asyncio.FIRST_COMPLETED
                )
                again.cancel()
                if not watching.done():
                    raise KeyboardInterrupt
            return await watching
        finally:
            await end(watching, signalled)


async def follow_run(
    bus: NatsBus,
    settings: Settings,
    run: str,
    quiet: bool,
    *,
    submitted: bool = False,
    life: int | None = None,
) -> Outcome:
    """Follow a run until it is recorded, with a live line for each round.

    Args:
        bus: a connection.
        settings: of the installation.
        run: its name.
        quiet: show nothing.
        submitted: whether it was handed in just now.
        life: the life to wait for, of a run that was taken up again.
    """
    check_token(run, "the run's name")
    outcome = Outcome(run)
    with show.Live(quiet=quiet) as live:
        async for told in follow(bus, settings, run, submitted=submitted, life=life):
            if told is not None:
                outcome.take(told)
                live.take(told)
    return outcome


def finish(outcome: Outcome, as_json: bool) -> None:
    """Show a run's end, and turn its state into an exit code."""
    if as_json:
        print_json(show.outcome_json(outcome))
    else:
        show.show_outcome(outcome)
    if outcome.unrecorded:
        show.complain(
            f"the run's files could not be written ({outcome.unrecorded}); what was written "
            f"before is in {outcome.folder}"
        )
        raise typer.Exit(FAILED)
    for count, what in ((outcome.missing, "answers"), (outcome.events_missing, "events")):
        if count:
            show.complain(
                f"{count:,} {what} of the run {outcome.run} are missing: the broker had dropped "
                "them before the recorder took them (see 'What the broker keeps' in "
                "docs/durability.md)"
            )
    if outcome.state == "failed":
        show.complain(f"the run {outcome.run} failed: {outcome.reason}")
        raise typer.Exit(FAILED)
    if outcome.state == "paused":
        show.complain(
            f"the run {outcome.run} is paused: {outcome.reason}. Go on with "
            f"'populace resume {outcome.run}'"
        )
        raise typer.Exit(FAILED)
    if outcome.state == "cancelled":
        why = f" ({outcome.reason})" if outcome.reason else ""
        show.complain(
            f"the run {outcome.run} was cancelled{why}; the {outcome.records or 0:,} answers and "
            f"failures that it had recorded are kept in {outcome.folder}. Go on with "
            f"'populace resume {outcome.run}', which asks nothing again that was answered (with a "
            "spent budget, --budget gives it a larger one)"
        )
        raise typer.Exit(INTERRUPTED)
    if outcome.missing or outcome.events_missing:
        raise typer.Exit(FAILED)
