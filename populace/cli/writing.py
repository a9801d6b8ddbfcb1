"""``populace personas write``: have a model write a population's people."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from populace.cli import show
from populace.cli.session import (
    FAILED,
    INTERRUPTED,
    Json,
    end,
    interrupts,
    print_json,
    quiet_settings,
    services_up,
    with_bus,
)
from populace.personas.jobs import people_job, write_people
from populace.personas.people import find_people
from populace.personas.spec import PopulationFile
from populace.personas.writing.template import load_template
from populace.scenario_file import overrides_from
from shared.bus import NatsBus
from shared.errors import BusError, InvalidInputError, RemoteError
from shared.messages.persona import EnrichRequest, JobInfo
from shared.messages.scenario import ModelSpec
from shared.problems import first_problem
from shared.settings import Settings

_STOP_WITHIN = 10.0


def write(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PEOPLE", help="A population file, rows, a stored population, or a template."
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="Under which it is stored; default: its own.")
    ] = None,
    size: Annotated[int | None, typer.Option("--size", min=1, help="Number of people.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="What all draws follow from.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="KEY=VALUE",
            help="Of the model, as in a scenario: backend=openai, base_url=..., model=... "
            "Default: the embedded model.",
        ),
    ] = None,
    language: Annotated[
        str, typer.Option("--language", help="Of the prompts: en, zh, or a template file.")
    ] = "en",
    names: Annotated[
        str | None, typer.Option("--names", metavar="LOCALE", help="Give names, such as en_US.")
    ] = None,
    attempts: Annotated[
        int, typer.Option("--attempts", min=1, max=20, help="Versions of each, at most.")
    ] = 4,
    judge: Annotated[
        bool, typer.Option("--judge", help="Ask the model too if a text contradicts its row.")
    ] = False,
    alike: Annotated[
        float,
        typer.Option(
            "--alike", min=0, max=1, help="Similarity from which texts are too alike; 0: any may."
        ),
    ] = 0.8,
    again: Annotated[
        bool, typer.Option("--again", help="Write those anew who were written before.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Have a model write the people, and store them under a name.

    What was begun goes on where it stopped; who failed is tried again. Ctrl-C stops it.
    """
    settings = quiet_settings()
    path = find_people(source, Path(), settings.personas_dir)
    own = Path(source).stem
    if path.endswith((".yaml", ".yml")):
        own = PopulationFile(path).spec.name
    request = _request(
        people=source if path.startswith("template:") else path,
        name=name or own,
        size=size,
        seed=seed,
        model=_model(model or []),
        names=names,
        attempts=attempts,
        judge=judge,
        alike=alike or None,
        again=again,
        template=load_template(language).model_dump(),
    )
    with services_up(settings, [Path(path).parent], quiet=as_json):
        info = asyncio.run(with_bus(settings, lambda bus: _write(bus, settings, request, as_json)))
    _finish(info, as_json)


def _model(pairs: list[str]) -> ModelSpec:
    told = [f"backend={p}" if "=" not in p else p for p in pairs]
    try:
        return ModelSpec.model_validate(overrides_from(told))
    except ValidationError as error:
        raise InvalidInputError(f"--model: {first_problem(error)}") from None


def _request(**fields: Any) -> EnrichRequest:
    try:
        return EnrichRequest(**fields)
    except ValidationError as error:
        raise InvalidInputError(first_problem(error)) from None


async def _write(bus: NatsBus, settings: Settings, request: EnrichRequest, quiet: bool) -> JobInfo:
    stopped = asyncio.Event()
    with interrupts(stopped):
        following = asyncio.ensure_future(_follow(bus, settings, request, quiet))
        signalled = asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait({following, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                return await following
            return await _stop(bus, settings, request.name)
        finally:
            await end(following, signalled)


async def _stop(bus: NatsBus, settings: Settings, name: str) -> JobInfo:
    """Cancel the writing, also if it is only just being asked for."""
    deadline = time.monotonic() + _STOP_WITHIN
    while True:
        try:
            async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                info = await people_job(bus, settings, name, cancel=True)
            if info.state == "cancelled" or time.monotonic() > deadline:
                return info
        except (RemoteError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise BusError(
                    f"the writing of {name} may go on: it could not be stopped ({error})"
                ) from None
        await asyncio.sleep(0.2)


async def _follow(bus: NatsBus, settings: Settings, request: EnrichRequest, quiet: bool) -> JobInfo:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
        console=show.err,
        disable=quiet or not show.err.is_terminal,
        transient=True,
    ) as progress:
        line = progress.add_task(request.name, total=None, told="")
        try:
            async for info in write_people(bus, settings, request):
                progress.update(
                    line,
                    total=info.to_write or None,
                    completed=info.written + info.failed,
                    told=f"{info.failed} failed, {info.requests} requests, "
                    f"{info.tokens_in + info.tokens_out:,} tokens",
                )
        except RemoteError as error:
            raise InvalidInputError(str(error)) from None
    return info


def _finish(info: JobInfo, as_json: bool) -> None:
    if as_json:
        print_json(info.model_dump())
    else:
        show_job(info)
    if info.state == "failed":
        show.complain(f"{info.name} could not be written: {info.reason}")
        raise typer.Exit(FAILED)
    if info.state == "cancelled":
        show.complain(
            f"the writing of {info.name} was stopped; the same command goes on with whoever is "
            "missing"
        )
        raise typer.Exit(INTERRUPTED)


def show_job(info: JobInfo) -> None:
    """What became of a population's writing, for a person."""
    kept = info.total - info.to_write
    told = f"{info.written:,} of {info.to_write:,} people written by {info.backend or 'nobody'}"
    show.out.print(
        told + (f", {kept:,} had been before (--again writes them anew)" if kept else ""),
        markup=False,
    )
    show.out.print(
        f"{info.requests:,} requests, {info.tokens_in:,} tokens in, {info.tokens_out:,} out; "
        f"{info.rewritten:,} versions thrown away, {info.anew:,} people written anew for "
        f"being nearly the same as another, {info.alike:,} still are",
        markup=False,
    )
    if info.failed:
        show.out.print(f"{info.failed:,} failed, such as:", markup=False)
        for example in info.examples:
            show.out.print(f"  {example}", markup=False)
    if info.file:
        show.out.print(f"stored in {info.file}", markup=False)
