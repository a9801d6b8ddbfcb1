"""How a worker asks models: through the pools' work queues, or directly in local mode."""

from __future__ import annotations

import abc
import asyncio
from typing import TYPE_CHECKING

from populace.models.backends import Backend, make_backend
from shared.bus import Bus, Message, Subscription
from shared.codec import from_public, pack_plain
from shared.errors import BusError, CodecError, InvalidInputError, PopulaceError
from shared.logs import get_logger
from shared.messages.model import ModelRequest, ModelResponse, pool_name
from shared.messages.scenario import ModelSpec
from shared.settings import Settings
from shared.subjects import Subjects

if TYPE_CHECKING:
    from populace.agent import Agent
    from populace.models.handle import ModelHandle

_log = get_logger(__name__)

_PER_MESSAGE = 8
"""Prompts in one message: few, so that model workers can share them out evenly."""
_PER_MESSAGE_SCRIPTED = 250
_PUBLISHING = 32
_FULL_PAUSE = 0.5


class ModelClient(abc.ABC):
    """Sends requests to models and awaits their answers.

    Args:
        models: the models of this run by name.
    """

    def __init__(self, models: dict[str, ModelSpec]) -> None:
        self.models = models
        self._numbers = 0

    def handle(self, agent: Agent) -> ModelHandle:
        """What an agent asks through."""
        from populace.models.handle import ModelHandle

        return ModelHandle(agent, self)

    def spec(self, name: str) -> ModelSpec:
        """The model of a name.

        Raises:
            InvalidInputError: the run has none of that name.
        """
        try:
            return self.models[name]
        except KeyError:
            known = ", ".join(sorted(self.models)) or "none"
            raise InvalidInputError(
                f"the scenario has no model named {name!r} (it has: {known})"
            ) from None

    def next_number(self) -> int:
        """A number for the next request of this process."""
        self._numbers += 1
        return self._numbers

    async def start(self) -> None:  # noqa: B027 - most need nothing
        """Get ready."""

    async def close(self) -> None:  # noqa: B027
        """Let go."""

    @abc.abstractmethod
    async def request(self, model: str, request: ModelRequest) -> ModelResponse:
        """Have a model answer; failures are responses with an error kind."""


class DirectModels(ModelClient):
    """Asks back ends in this very process."""

    def __init__(self, models: dict[str, ModelSpec], settings: Settings) -> None:
        super().__init__(models)
        self._settings = settings
        self._pools: dict[str, tuple[Backend, asyncio.Semaphore]] = {}
        self._starting = asyncio.Lock()

    async def backend(self, model: str) -> tuple[Backend, asyncio.Semaphore]:
        """The started back end of a model, and its slots.

        Raises:
            PopulaceError: it can't be started.
        """
        spec = self.spec(model)
        name = pool_name(spec)
        async with self._starting:
            held = self._pools.get(name)
            if held is None:
                backend = make_backend(spec, self._settings)
                await backend.start()
                slots = spec.concurrency or backend.slots or self._settings.model_concurrency
                held = self._pools[name] = (backend, asyncio.Semaphore(slots))
        return held

    async def request(self, model: str, request: ModelRequest) -> ModelResponse:
        """See ``ModelClient.request``."""
        try:
            backend, slots = await self.backend(model)
        except PopulaceError as error:
            return ModelResponse(request.number, error_kind="unreachable", error=str(error))
        async with slots:
            return await backend.timed_answer(request)

    async def close(self) -> None:
        """Close all back ends."""
        for backend, _ in self._pools.values():
            await backend.close()
        self._pools.clear()


class QueuedModels(ModelClient):
    """Puts prompts into the work queue of the model's pool; answers come to an inbox.

    Args:
        bus: this worker's connection.
        subjects: the installation's subjects.
        models: the models of this run by name.
        run: the run's name; prompts of a run that is over are dropped unanswered.
        timeout: seconds that a prompt may wait for its answer.
        box: name of the inbox for answers, where one process has several clients.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        models: dict[str, ModelSpec],
        run: str,
        *,
        timeout: float,
        box: str = "m",
    ) -> None:
        super().__init__(models)
        self._bus = bus
        self._subjects = subjects
        self._run = run
        self._timeout = timeout
        self._inbox = subjects.inbox(bus.process, box)
        self._subscription: Subscription | None = None
        self._waiting: dict[int, asyncio.Future[ModelResponse]] = {}
        self._queues: dict[str, list[ModelRequest]] = {}
        self._scheduled = False
        self._publishing = asyncio.Semaphore(_PUBLISHING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool_of = {name: pool_name(spec) for name, spec in models.items()}
        self._per_message = {
            pool_name(spec): (_PER_MESSAGE_SCRIPTED if spec.backend == "scripted" else _PER_MESSAGE)
            for spec in models.values()
        }

    async def start(self) -> None:
        """Begin to receive answers."""
        self._subscription = await self._bus.subscribe(self._inbox, self._receive)

    async def close(self) -> None:
        """Fail what still waits."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        for number in list(self._waiting):
            self._fail(number, "internal", "the worker was stopped")
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)

    async def request(self, model: str, request: ModelRequest) -> ModelResponse:
        """See ``ModelClient.request``."""
        self.spec(model)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ModelResponse] = loop.create_future()
        self._waiting[request.number] = future
        self._queues.setdefault(self._pool_of[model], []).append(request)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)
        timer = loop.call_later(
            self._timeout,
            self._fail,
            request.number,
            "timeout",
            f"no model answered within {self._timeout:g} s; is a model service running?",
        )
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(request.number, None)

    def _flush(self) -> None:
        self._scheduled = False
        queues, self._queues = self._queues, {}
        for pool, requests in queues.items():
            step = self._per_message[pool]
            for start in range(0, len(requests), step):
                task = asyncio.ensure_future(self._publish(pool, requests[start : start + step]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _publish(self, pool: str, requests: list[ModelRequest]) -> None:
        rows = [r.columns() for r in requests if r.number in self._waiting]
        if not rows:
            return
        try:
            data = pack_plain([self._inbox, self._run, rows])
        except CodecError as error:
            for request in requests:
                self._fail(request.number, "internal", str(error))
            return
        if len(data) > self._bus.max_payload and len(requests) > 1:
            half = len(requests) // 2
            await self._publish(pool, requests[:half])
            await self._publish(pool, requests[half:])
            return
        subject = self._subjects.model_queue(pool)
        name = f"{self._inbox}/{requests[0].number}"
        async with self._publishing:
            deadline = asyncio.get_running_loop().time() + self._timeout
            while True:
                try:
                    await self._bus.append(subject, data, message_id=name)
                    return
                except BusError as error:
                    # A full queue is back-pressure; a broker that is away comes back.
                    _log.warning("prompts wait to be queued", pool=pool, error=str(error))
                    last = str(error)
                if (
                    asyncio.get_running_loop().time() > deadline
                    or len(data) > self._bus.max_payload
                ):
                    break
                await asyncio.sleep(_FULL_PAUSE)
        for request in requests:
            self._fail(request.number, "unreachable", f"the model queue takes no prompt: {last}")

    def _fail(self, number: int, kind: str, text: str) -> None:
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(ModelResponse(number, error_kind=kind, error=text))

    def _receive(self, message: Message) -> None:
        for row in from_public(message.data):
            response = ModelResponse.from_columns(row)
            future = self._waiting.get(response.number)
            if future is not None and not future.done():
                future.set_result(response)
