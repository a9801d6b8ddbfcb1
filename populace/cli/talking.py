"""``populace inject`` and ``populace interview``: talking to a run that is under way."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from pydantic import ValidationError

from populace.cli import show
from populace.cli.session import FAILED, Json, print_json, quiet_settings, with_bus
from populace.interviews import InterviewAnswers, InterviewRequest
from populace.runs import control, find_run
from populace.scenario_file import overrides_from
from shared.bus import NatsBus
from shared.errors import InvalidInputError
from shared.ids import check_token
from shared.messages.scenario import PlannedEvent
from shared.problems import first_problem
from shared.service import ask

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name.")]


def inject(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="EVENT", help="'params', or what it knows.")],
    data: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="What belongs to the event.")
    ] = None,
    round_: Annotated[
        int | None, typer.Option("--round", min=1, help="Before this round; default: the next.")
    ] = None,
) -> None:
    """Bring something into a run before its next round, such as news or other parameters."""
    settings = quiet_settings()
    try:
        event = PlannedEvent(name=name, data=overrides_from(data or []), round=round_)
    except ValidationError as error:
        raise InvalidInputError(first_problem(error)) from None

    async def work(bus: NatsBus) -> None:
        await _check_running(bus, run)
        await control(bus, settings, run, "inject", event=event)

    asyncio.run(with_bus(settings, work))
    when = f"before round {round_}" if round_ else "before the next round"
    typer.echo(f"{run}: {name} comes {when}")


async def _check_running(bus: NatsBus, run: str) -> None:
    info = await find_run(bus, quiet_settings(), check_token(run, "the run's name"))
    if info is None:
        raise InvalidInputError(f"there is no run named {run!r}; see 'populace runs'")
    if info.state != "running":
        raise InvalidInputError(f"the run {run!r} is {info.state}; it must be running")


def interview(
    run: Run,
    agents: Annotated[
        list[str], typer.Argument(metavar="AGENT...", help="Such as players/17; one or more.")
    ],
    question: Annotated[str, typer.Option("--question", "-q", help="What they are asked.")],
    remember: Annotated[
        bool, typer.Option("--remember", help="Have them remember question and answer.")
    ] = False,
    model: Annotated[str, typer.Option("--model", help="Which of the run's models.")] = "default",
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Ask some agents of a run that is under way; it goes on as if nobody had asked."""
    settings = quiet_settings()
    try:
        request = InterviewRequest(agents=agents, question=question, remember=remember, model=model)
    except ValidationError as error:
        raise InvalidInputError(first_problem(error)) from None

    async def work(bus: NatsBus) -> InterviewAnswers:
        await _check_running(bus, run)
        subject = settings.subjects.run_owner(run, "interview")
        return await ask(bus, subject, request, InterviewAnswers, timeout=timeout, patience=10)

    found: InterviewAnswers = asyncio.run(with_bus(settings, work))
    if as_json:
        print_json(found.model_dump())
    else:
        show.show_interviews(found)
    if any(answer.error for answer in found.answers):
        raise typer.Exit(FAILED)
