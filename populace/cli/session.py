"""What commands share: settings, a connection, services that are started if need be, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from populace.cli import show
from populace.stack import stack
from populace.stack.state import broker_url
from shared.bus import NatsBus
from shared.errors import BusError, BusUnavailableError
from shared.logs import configure_logs
from shared.settings import Settings, load_settings

FAILED, BAD_INPUT, NO_SERVICE, INTERRUPTED = 1, 2, 3, 130

_CONNECT_WITHIN = 3.0

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def quiet_settings() -> Settings:
    """Settings for a command: logs of errors alone, and a short patience with the broker."""
    settings = load_settings()
    quiet = settings.model_copy(update={"log_level": "error"})
    configure_logs(quiet, service="populace")
    if "connect_timeout" in settings.model_fields_set:
        return settings
    # A person waits; services, which may start before their broker, have the longer default.
    return settings.model_copy(update={"connect_timeout": _CONNECT_WITHIN})


def print_json(value: Any) -> None:
    """One JSON object on a line of its own."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")


def services_answer(settings: Settings) -> bool:
    """Whether services that others started serve the broker that is set."""
    if settings.nats_url is None:
        return False
    try:
        found = asyncio.run(stack.look(settings))
    except BusUnavailableError:
        raise
    except BusError:
        return False
    return all(found.services.values())


@contextlib.contextmanager
def stop_signals_as_interrupts() -> Iterator[None]:
    """Have SIGTERM and SIGHUP tidy up as Ctrl-C does."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupts(event: asyncio.Event) -> Iterator[None]:
    """Have Ctrl-C, SIGTERM and SIGHUP set an event, within a running loop."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, event.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what is not done, and wait for its end."""
    for task in tasks:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.contextmanager
def services_up(settings: Settings, folders: Iterable[Path], *, quiet: bool) -> Iterator[None]:
    """Services for one command: those that run, or else a stack of its own, stopped at the end.

    Args:
        settings: of the command.
        folders: from which a stack that is started may read as well.
        quiet: say nothing.
    """
    started = False
    with stop_signals_as_interrupts():
        try:
            if not stack.is_up(settings) and not services_answer(settings):
                if not quiet:
                    show.err.print("starting the services", markup=False)
                roots = os.pathsep.join([settings.code_roots, *map(str, folders)])
                stack.up(settings.model_copy(update={"code_roots": roots}))
                started = True
            yield
        finally:
            if started:
                stack.down(settings)


async def with_bus(settings: Settings, work: Callable[[NatsBus], Coroutine[Any, Any, Any]]) -> Any:
    """Do something with a connection to the broker that runs here, or is set."""
    bus = await NatsBus.connect(settings, broker_url(settings))
    try:
        return await work(bus)
    finally:
        await bus.drain()
