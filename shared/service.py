"""Control requests: pydantic models asked and answered over the bus; services' common main.

A reply is either the answer's fields, or ``{"error": sentence}``. Requests may be JSON or
msgpack; the reply is written as the request was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from shared import __version__
from shared.bus import Bus, Message, NatsBus, Subscription
from shared.codec import (
    CONTENT_TYPE,
    JSON_TYPE,
    MSGPACK_TYPE,
    from_public,
    is_json,
    pack_plain,
    to_json,
)
from shared.errors import (
    BusDisconnectedError,
    BusError,
    BusUnavailableError,
    InvalidInputError,
    NoRespondersError,
    PopulaceError,
    RemoteError,
)
from shared.logs import configure_logs, get_logger
from shared.problems import first_problem
from shared.settings import Settings, load_settings

_log = get_logger(__name__)

Request = TypeVar("Request", bound=BaseModel)
Reply = TypeVar("Reply", bound=BaseModel)

DEFAULT_URL = "nats://127.0.0.1:4222"
_FIRST_WORD, _QUIET = 2.0, 0.15
"""Seconds in which the first of many answers, and in which another one does after the last."""


async def ask(
    bus: Bus,
    subject: str,
    request: BaseModel,
    reply: type[Reply],
    *,
    timeout: float = 10.0,
    patience: float = 0.0,
) -> Reply:
    """Send a control request and await its answer.

    Args:
        bus: the connection.
        subject: where the service listens.
        request: what is asked.
        reply: model of the answer.
        timeout: seconds that one attempt may take.
        patience: seconds for which to try again while nobody listens there.

    Raises:
        RemoteError: the service refused; the text is its own.
        BusError: no answer.
    """
    data = pack_plain(request.model_dump(mode="json"))
    deadline = time.monotonic() + patience
    while True:
        try:
            answer = await bus.request(
                subject, data, timeout=timeout, headers={CONTENT_TYPE: MSGPACK_TYPE}
            )
            break
        except (NoRespondersError, BusDisconnectedError):
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(0.05)
    fields = from_public(answer.data, answer.header(CONTENT_TYPE))
    if isinstance(fields, dict) and fields.get("error") and "error" not in reply.model_fields:
        raise RemoteError(str(fields["error"]))
    return reply.model_validate(fields)


async def everybody(bus: Bus, subject: str, inbox: str) -> list[dict[str, Any]]:
    """What all say who are asked at once, such as the instances of a service; one word of each.

    It waits a while for the first, and then until nobody says anything for a moment.

    Args:
        bus: a connection.
        subject: where they listen; each answers with a JSON object that holds its ``id``.
        inbox: where the answers shall come; nobody else's.

    Raises:
        BusError: the broker is away.
    """
    found: dict[str, dict[str, Any]] = {}
    heard = asyncio.Event()
    nobody = False

    def take(message: Message) -> None:
        nonlocal nobody
        nobody |= not message.data  # the broker's word that nobody listens
        with contextlib.suppress(ValueError):
            told = json.loads(message.data)
            found[str(told.get("id"))] = told
        heard.set()

    subscription = await bus.subscribe(inbox, take)
    try:
        bus.send(subject, b"", reply=inbox)
        await bus.flush()
        with contextlib.suppress(TimeoutError):
            while not nobody:
                heard.clear()
                async with asyncio.timeout(_QUIET if found else _FIRST_WORD):
                    await heard.wait()
    finally:
        await subscription.unsubscribe()
    return [found[key] for key in sorted(found)]


async def serve(
    bus: Bus,
    subject: str,
    request: type[Request],
    handler: Callable[[Request], Awaitable[BaseModel]],
    *,
    queue: str = "",
) -> Subscription:
    """Answer control requests on a subject; several are handled at once."""
    running: set[asyncio.Task[None]] = set()

    def take(message: Message) -> None:
        task = asyncio.ensure_future(answer_request(bus, message, request, handler))
        running.add(task)
        task.add_done_callback(running.discard)

    return await bus.subscribe(subject, take, queue=queue)


async def answer_request(
    bus: Bus,
    message: Message,
    request: type[Request],
    handler: Callable[[Request], Awaitable[BaseModel]],
) -> None:
    """Validate, handle and answer one control request; every error becomes a reply."""
    as_json = is_json(message.data, message.header(CONTENT_TYPE))
    fields: dict[str, Any]
    try:
        raw = from_public(message.data, message.header(CONTENT_TYPE)) if message.data else {}
        fields = (await handler(request.model_validate(raw))).model_dump(mode="json")
    except ValidationError as error:
        fields = {"error": first_problem(error)}
    except PopulaceError as error:
        fields = {"error": str(error)}
    except Exception as error:
        _log.exception("a control request failed", subject=message.subject)
        fields = {"error": f"internal error: {type(error).__name__}: {error}"}
    if message.reply:
        data = to_json(fields) if as_json else pack_plain(fields)
        kind = JSON_TYPE if as_json else MSGPACK_TYPE
        try:
            bus.send(message.reply, data, headers={CONTENT_TYPE: kind})
        except BusError as error:  # whoever asked finds that there is no answer
            _log.warning("an answer was not sent", subject=message.subject, error=str(error))


class ServiceContext:
    """What a running service has: settings, a connection, and a word when to stop."""

    def __init__(self, name: str, settings: Settings, bus: NatsBus) -> None:
        self.name = name
        self.settings = settings
        self.bus = bus
        self.stopping = asyncio.Event()
        self._micro: Any = None

    async def announce(
        self,
        description: str,
        *,
        metadata: dict[str, str] | None = None,
        stats: Callable[[], dict[str, Any]] | None = None,
        endpoints: dict[str, tuple[str, Callable[[Message], Awaitable[None]]]] | None = None,
    ) -> None:
        """Show the service through NATS's service protocol (``$SRV.PING/INFO/STATS``).

        Args:
            description: one sentence.
            metadata: text by name, shown in INFO.
            stats: gives the data shown in STATS, and answered on the service's state subject.
            endpoints: name to (subject, handler) of the requests that it answers.
        """
        import nats.micro
        from nats.micro.request import Request as MicroRequest

        def data() -> dict[str, Any]:
            return stats() if stats is not None else {}

        async def state(message: Message) -> None:
            self.bus.send(message.reply, to_json(data()), headers={CONTENT_TYPE: JSON_TYPE})

        self._micro = await nats.micro.add_service(
            self.bus._client,
            name=self.name,
            version=__version__,
            description=description,
            metadata=metadata or {},
            stats_handler=lambda _: data(),
        )
        subjects = self.settings.subjects
        everything = {
            "state": (subjects.service_state(self.bus.process), state),
            **(endpoints or {}),
        }
        for name, (subject, handler) in everything.items():

            async def handle(request: MicroRequest, handler: Any = handler) -> None:
                message = request._msg
                await handler(
                    Message(message.subject, message.data, message.reply, message.headers)
                )

            await self._micro.add_endpoint(
                name=name, subject=subject, handler=handle, queue_group=self.name
            )


def run_service(name: str, main: Callable[[ServiceContext], Coroutine[Any, Any, None]]) -> int:
    """Run a service until SIGTERM or SIGINT; returns the process's exit code.

    ``main`` sets up, waits on ``context.stopping``, and tidies up; the bus is drained after.
    """
    try:
        settings = load_settings()
    except InvalidInputError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    configure_logs(settings, service=name)

    async def everything() -> int:
        try:
            bus = await NatsBus.connect(settings, settings.nats_url or DEFAULT_URL)
        except BusUnavailableError as error:
            _log.error(str(error))
            return 3
        context = ServiceContext(name, settings, bus)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, context.stopping.set)
        bus.on_event(lambda event, _: context.stopping.set() if event == "closed" else None)
        try:
            await main(context)
            return 0
        except PopulaceError as error:
            _log.error(str(error))
            return 1
        finally:
            await bus.drain()
            _log.info("stopped")

    return run_loop(everything())


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run to the end on uvloop where there is one, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
