"""A worker process: its host's nursery forks it to serve one run.

When its lifeline closes, its host is gone and it ends. What agents print goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable

from populace._runtime.profile import TimedCodec
from populace._runtime.worker import Worker
from populace.models.client import ModelClient, QueuedModels
from populace.models.kept import KeptAnswers
from populace.models.replayed import ReplayedModels
from populace.workers.lifeline import die_with_parent
from shared.bus import NatsBus
from shared.code import CodeLoader
from shared.codec import use_plain_codec
from shared.collector import settle_collector
from shared.errors import PopulaceError
from shared.messages.control import Assignment
from shared.service import DEFAULT_URL, run_loop
from shared.settings import Settings, load_settings

SERVICE = "worker"


def _watch_lifeline(lifeline: int, on_end: Callable[[], None]) -> None:
    """Wait, in a thread of its own, until the other end of the pipe closes."""
    while os.read(lifeline, 4096):
        pass
    on_end()


async def _serve(
    settings: Settings, assignment: Assignment, lifeline: int, say: Callable[[str], None]
) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    def host_gone() -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stopping.set)

    threading.Thread(target=_watch_lifeline, args=(lifeline, host_gone), daemon=True).start()
    bus = await NatsBus.connect(
        settings, settings.nats_url or DEFAULT_URL, process=assignment.worker
    )
    bus.on_event(lambda event, _: stopping.set() if event == "closed" else None)
    loader = CodeLoader.from_settings(settings)
    for folder in assignment.folders:
        loader.add_folder(folder)
    subjects = settings.subjects
    models: ModelClient
    models = queued = QueuedModels(
        bus,
        subjects,
        assignment.models,
        assignment.run,
        timeout=settings.model_queue_timeout,
        terms=assignment.terms,
        recall=assignment.recall,
        life=assignment.life,
    )
    if assignment.replay is not None:
        models = ReplayedModels(queued, KeptAnswers(bus, subjects), assignment.replay)
    worker = Worker(
        bus,
        subjects,
        assignment,
        loader,
        models,
        call_timeout=assignment.call_timeout or settings.call_timeout,
    )
    models.part = queued.part = worker.part
    worker.give_up = lambda: os._exit(70)
    if worker.profile is not None:
        use_plain_codec(TimedCodec(None, worker.profile))
    await worker.start()
    settle_collector()
    say("")
    await stopping.wait()
    await worker.stop()
    await bus.drain(timeout=5)
    return 0


def live(order: str, lifeline: int, say: Callable[[str], None]) -> int:
    """Serve one run until it is over, see ``nursery.Child``; the order is an ``Assignment``."""
    die_with_parent()
    settings = load_settings()
    assignment = Assignment.model_validate_json(order)
    try:
        return run_loop(_serve(settings, assignment, lifeline, say))
    except PopulaceError as error:
        say(str(error))
        return 1
