"""How a worker asks models: through the pools' work queues, or directly in local mode."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from populace.models.accounts import Accounts, BudgetKeeper, OwnBudget, PriceTable
from populace.models.backends import make_backend
from populace.models.kept import EVERYBODY, KeptAnswers, Key, Part, fingerprint
from populace.models.limits import OwnPace, RateLimiter
from populace.models.serving import OwnCache, Serving
from shared.bus import Bus, Message, Subscription
from shared.codec import from_public, pack_plain
from shared.errors import BusError, CodecError, InvalidInputError, PopulaceError
from shared.logs import get_logger
from shared.messages.model import Handling, ModelRequest, ModelResponse, Terms, pool_name
from shared.messages.scenario import ModelSpec
from shared.settings import Settings
from shared.streams import patiently
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
_STORED_WITHIN = 3.0
_REGISTER_EVERY = 120.0
_LOOKS, _LOOK_AFTER = 5, 2.0
"""How often, and after how many seconds, answers are looked for that a broken connection lost."""
_NEWEST = 1000
"""Messages of kept answers for each second in which some may have been lost; there are hardly as
many."""
_GONE_AT_ONCE = 10_000
_STALLED = 30.0
"""Seconds without any answer after which those that are kept are looked for."""


class ModelClient(abc.ABC):
    """Sends requests to models and awaits their answers.

    Args:
        models: the models of this run by name.
    """

    def __init__(self, models: dict[str, ModelSpec]) -> None:
        self.models = models
        self.part: Callable[[], Part] = lambda: EVERYBODY
        """Gives whose answers of an earlier life, or an earlier run, may be asked for here."""
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

    def context(self, name: str) -> int | None:
        """Tokens that a model can take, where that is known."""
        return self.spec(name).context

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


def _handling(models: dict[str, ModelSpec]) -> dict[str, Handling]:
    return {name: Handling.of(spec) for name, spec in models.items()}


class DirectModels(ModelClient):
    """Asks back ends in this very process.

    Args:
        models: the models of this run by name.
        settings: of this process.
        terms: what the run asks beside its prompts.
    """

    def __init__(
        self, models: dict[str, ModelSpec], settings: Settings, terms: Terms | None = None
    ) -> None:
        super().__init__(models)
        self._settings = settings
        terms = terms or Terms(prices=PriceTable(settings.prices).of_all(models))
        self._terms = replace(terms, handling=_handling(models))
        self._pools: dict[str, tuple[Serving, asyncio.Semaphore]] = {}
        self._cache = OwnCache()
        self._budget: BudgetKeeper | None = None
        self._starting = asyncio.Lock()

    async def pool(self, model: str) -> tuple[Serving, asyncio.Semaphore]:
        """What serves a model, its back end started, and its slots.

        Raises:
            PopulaceError: the back end can't be started.
        """
        spec = self.spec(model)
        name = pool_name(spec)
        async with self._starting:
            held = self._pools.get(name)
            if held is None:
                backend = make_backend(spec, self._settings)
                await backend.start()
                limiter = None if spec.limits is None else RateLimiter(spec.limits, OwnPace())
                serving = Serving(backend, spec, limiter, self._cache, self._budget_of)
                slots = spec.concurrency or backend.slots or self._settings.model_concurrency
                if spec.limits is not None and spec.limits.concurrency is not None:
                    slots = min(slots, spec.limits.concurrency)
                held = self._pools[name] = (serving, asyncio.Semaphore(slots))
        return held

    def context(self, name: str) -> int | None:
        """See ``ModelClient.context``."""
        held = self._pools.get(pool_name(self.spec(name)))
        return self.spec(name).context or (held[0].backend.context if held is not None else None)

    async def _budget_of(self, run: str, budget: dict[str, Any]) -> BudgetKeeper:
        if self._budget is None:
            self._budget = BudgetKeeper(budget, OwnBudget(), "local")
        return self._budget

    async def request(self, model: str, request: ModelRequest) -> ModelResponse:
        """See ``ModelClient.request``."""
        try:
            serving, slots = await self.pool(model)
        except PopulaceError as error:
            return ModelResponse(request.number, error_kind="unreachable", error=str(error))
        async with slots:
            return await serving.serve(request, "", self._terms)

    @property
    def accounts(self) -> Accounts:
        """What was asked and what it cost, of all models."""
        found = Accounts()
        for serving, _ in self._pools.values():
            for accounts in serving.accounts.values():
                found.merge(accounts)
        return found

    async def close(self) -> None:
        """Close all back ends."""
        for serving, _ in self._pools.values():
            await serving.backend.close()
        self._pools.clear()


class QueuedModels(ModelClient):
    """Puts prompts into the work queue of the model's pool; answers come to an inbox.

    Args:
        bus: this worker's connection.
        subjects: the installation's subjects.
        models: the models of this run by name.
        run: the run's name; prompts of a run that is over are dropped unanswered.
        timeout: seconds that a prompt may wait for its answer.
        terms: what the run asks beside its prompts.
        box: name of the inbox for answers, where one process has several clients.
        recall: rounds that may have been played in part before; what was kept of their answers is
            not asked again.
        life: which life of the run asks; services drop what earlier ones have asked.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        models: dict[str, ModelSpec],
        run: str,
        *,
        timeout: float,
        terms: Terms | None = None,
        box: str = "m",
        recall: Sequence[int] = (),
        life: int = 1,
    ) -> None:
        super().__init__(models)
        self._life = life
        self._first_recall = min(recall, default=0)
        self._recall = {number: asyncio.Lock() for number in recall}
        self._recalled: dict[int, tuple[Part, dict[Key, dict[bytes, ModelResponse]]]] = {}
        self._warned = False
        self._closed = False
        self._gone: list[int] = []
        """Numbers of prompts that services are to be told nobody waits for."""
        self._bus = bus
        self._subjects = subjects
        self._run = run
        self._timeout = timeout
        self._terms = replace(terms or Terms(), handling=_handling(models)).plain()
        self._contexts = terms.contexts if terms is not None else {}
        self._kept = KeptAnswers(bus, subjects)
        self._inbox = subjects.inbox(bus.process, box)
        self._subscription: Subscription | None = None
        self._waiting: dict[int, asyncio.Future[ModelResponse]] = {}
        self._asked: dict[int, tuple[str, ModelRequest]] = {}
        """Model and request of those that wait."""
        self._queued: set[int] = set()
        """Those of them that the broker has taken."""
        self._queues: dict[str, list[ModelRequest]] = {}
        self._scheduled = False
        self._heard_at = time.monotonic()
        """When an answer came last, or the first was asked for."""
        self._away_since: float | None = None
        """Since when the connection is broken."""
        self._again = 0
        """Times that prompts were asked again; part of their messages' names."""
        self._publishing = asyncio.Semaphore(_PUBLISHING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool_of = {
            name: pool_name(spec) for name, spec in models.items() if spec.mixture is None
        }
        self._specs = {pool_name(spec): spec for spec in models.values() if spec.mixture is None}
        self._registered: dict[str, float] = {}
        """When a pool was last said to be in use; whoever made the run said so first."""
        self._per_message = {
            pool_name(spec): (_PER_MESSAGE_SCRIPTED if spec.backend == "scripted" else _PER_MESSAGE)
            for spec in models.values()
            if spec.mixture is None
        }

    async def start(self) -> None:
        """Begin to receive answers."""
        self._subscription = await self._bus.subscribe(self._inbox, self._receive)
        self._bus.on_event(self._event)
        self._begin(self._watch())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def context(self, name: str) -> int | None:
        """See ``ModelClient.context``."""
        return self.spec(name).context or self._contexts.get(name)

    async def close(self) -> None:
        """Fail what still waits."""
        self._closed = True
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        if self._waiting:
            self._gone += self._waiting
            self._tell_gone()
        for number in list(self._waiting):
            self._fail(number, "internal", "the worker was stopped")
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)

    async def request(self, model: str, request: ModelRequest) -> ModelResponse:
        """See ``ModelClient.request``."""
        self.spec(model)
        if self._closed:
            text = "the worker was stopped"
            return ModelResponse(request.number, error_kind="internal", error=text)
        if self._recalled and request.key[3] > self._first_recall:
            self._forget(request.key[3])
        if request.key[3] in self._recall:
            known = await self._known(request)
            if known is not None:
                return known
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ModelResponse] = loop.create_future()
        if not self._asked:
            self._heard_at = time.monotonic()
        self._waiting[request.number] = future
        self._asked[request.number] = (model, request)
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
        except asyncio.CancelledError:
            self._give_up([request.number])
            raise
        finally:
            timer.cancel()
            self._waiting.pop(request.number, None)
            self._asked.pop(request.number, None)
            self._queued.discard(request.number)

    def _give_up(self, numbers: list[int]) -> None:
        """Nobody waits for these answers any more: services need not ask for them."""
        if not self._gone:
            asyncio.get_running_loop().call_soon(self._tell_gone)
        self._gone += numbers

    def _tell_gone(self) -> None:
        while self._gone:
            told, self._gone = self._gone[:_GONE_AT_ONCE], self._gone[_GONE_AT_ONCE:]
            try:
                self._bus.send(self._subjects.model_gone, pack_plain([self._inbox, told]))
            except BusError as error:  # then they are asked for nobody
                _log.warning("prompts can't be called off", count=len(told), error=str(error))

    def _forget(self, now: int) -> None:
        """Let go of answers to rounds that are over."""
        for number in [n for n in self._recalled if n < now]:
            del self._recalled[number]
            self._recall.pop(number, None)

    async def _known(self, request: ModelRequest) -> ModelResponse | None:
        """The answer that was had when this round was played before, if there was one.

        To this very prompt: where what agents do follows from clocks, or from who was first, it may
        have been another one.
        """
        number = request.key[3]
        async with self._recall[number]:
            if number not in self._recalled or request.key not in self._recalled[number][0]:
                part = self.part()
                try:
                    self._recalled[number] = (
                        part,
                        await patiently(
                            lambda: self._kept.of_round(self._run, number, part),
                            "answers that were kept",
                        ),
                    )
                except BusError as error:
                    text = f"the answers that were kept can't be read: {error}"
                    return ModelResponse(request.number, error_kind="unreachable", error=text)
        answers = self._recalled[number][1].get(request.key)
        if answers is None:
            return None
        try:
            found = answers.get(fingerprint(request))
        except CodecError:
            return None  # it will fail where it is sent
        if found is None:
            if not self._warned:
                self._warned = True
                _, population, agent, _, question = request.key
                who = f"{population}/{agent} in round {number}, question {question + 1}"
                _log.warning("prompts differ from those that were answered, and are asked", who=who)
            return None
        details = {**found.details, "kept": True}
        return replace(found, number=request.number, details=details)

    def _event(self, event: str, _: str) -> None:
        if event == "disconnected":
            self._away_since = self._away_since or time.monotonic()
        elif event == "reconnected":
            away = time.monotonic() - (self._away_since or time.monotonic())
            self._away_since = None
            if not self._asked:
                return
            self._begin(self._recover(away))

    async def _recover(self, away: float) -> None:
        """The connection broke and is back: answers that came meanwhile are lost, but kept."""
        before = dict(self._asked)
        for _ in range(_LOOKS):
            await asyncio.sleep(_LOOK_AFTER)
            left = {n: held for n, held in before.items() if n in self._asked}
            # Not kept, since they cost nothing: they are asked again.
            scripted = {n: before.pop(n) for n, held in left.items() if self._is_scripted(held[0])}
            self._ask_again(scripted)
            left = {n: held for n, held in left.items() if n not in scripted}
            if not left:
                return
            # Those that were lost are among the newest; _watch looks further if need be.
            newest = int(_NEWEST * (1 + away + _LOOKS * _LOOK_AFTER))
            await self._look_for(left, newest)

    def _ask_again(self, asked: dict[int, tuple[str, ModelRequest]]) -> None:
        if not asked:
            return
        for number, (model, request) in asked.items():
            self._queued.discard(number)
            self._queues.setdefault(self._pool_of[model], []).append(request)
        self._again += 1
        self._flush()

    async def _look_for(self, asked: dict[int, tuple[str, ModelRequest]], newest: int = 0) -> bool:
        """Take what was kept of answers that have not come; gives whether it could be read."""
        by_key = {request.key: number for number, (_, request) in asked.items()}
        try:
            found = await self._kept.find(self._run, [r for _, r in asked.values()], newest)
        except PopulaceError as error:
            _log.warning("kept answers can't be read", error=str(error))
            return False
        for key, response in found.items():
            future = self._waiting.get(by_key[key])
            if future is not None and not future.done():
                response.number = by_key[key]
                future.set_result(response)
        return True

    async def _watch(self) -> None:
        """Look for what was lost where nothing has come for long.

        A node of a cluster may die with an answer that it was to pass on, and neither who sent it
        nor who waits for it was connected to that one.
        """
        while True:
            await asyncio.sleep(_STALLED / 4)
            for pool in {self._pool_of[model] for model, _ in self._asked.values()}:
                if self._registered.get(pool) == float("-inf"):  # it could not be said
                    await self._register(pool)
            if self._asked and time.monotonic() - self._heard_at > _STALLED:
                self._heard_at = time.monotonic()  # again after as long
                await self._find_lost()

    async def _find_lost(self) -> None:
        """Take answers that are kept; ask again what nobody has in hand.

        A prompt stays in its queue until its answer is kept and sent. So one that is neither in the
        queue, nor then among the kept answers, is lost, or its answer is and can't be had again.
        """
        asked = {n: held for n, held in self._asked.items() if n in self._queued}
        empty = set()
        for pool in {self._pool_of[model] for model, _ in asked.values()}:
            await self._register(pool, at_once=True)  # perhaps nobody serves it
            try:
                queue = self._subjects.model_queue(pool, self._run)
                waiting, _ = await self._bus.held(self._subjects.stream_models, queue)
            except BusError as error:
                _log.warning("a queue can't be looked at", pool=pool, error=str(error))
                continue
            if not waiting:
                empty.add(pool)
        if asked and not await self._look_for(asked):
            return
        lost = {
            number: held
            for number, held in asked.items()
            if self._pool_of[held[0]] in empty
            and (future := self._waiting.get(number)) is not None
            and not future.done()
        }
        if lost:
            _log.warning("prompts were lost, and are asked again", count=len(lost))
            self._ask_again(lost)

    def _is_scripted(self, model: str) -> bool:
        return self.models[model].backend == "scripted"

    def _flush(self) -> None:
        self._scheduled = False
        queues, self._queues = self._queues, {}
        for pool, requests in queues.items():
            step = self._per_message[pool]
            for start in range(0, len(requests), step):
                self._begin(self._publish(pool, requests[start : start + step]))

    async def _publish(self, pool: str, requests: list[ModelRequest]) -> None:
        rows = [r.columns() for r in requests if r.number in self._waiting]
        if not rows:
            return
        deadline = time.time() + self._timeout  # afterwards nobody waits any more
        try:
            data = pack_plain([self._inbox, self._run, rows, self._terms, deadline, self._life])
        except CodecError as error:
            if len(requests) > 1:  # the others are not to suffer
                await self._publish_halves(pool, requests)
            else:
                self._fail(requests[0].number, "internal", str(error))
            return
        if len(data) > self._bus.max_payload and len(requests) > 1:
            await self._publish_halves(pool, requests)
            return
        if len(data) > self._bus.max_payload:
            text = f"the prompt takes {len(data):,} bytes, more than a message may hold"
            self._fail(requests[0].number, "context", text)
            return
        subject = self._subjects.model_queue(pool, self._run)
        name = f"{self._inbox}/{requests[0].number}/{self._again}"
        async with self._publishing:
            await self._register(pool)
            while True:
                try:
                    await self._bus.append(subject, data, message_id=name, timeout=_STORED_WITHIN)
                    self._queued.update(r.number for r in requests if r.number in self._waiting)
                    return
                except BusError as error:
                    # A full queue is back-pressure; a broker that is away comes back.
                    _log.warning("prompts wait to be queued", pool=pool, error=str(error))
                    last = str(error)
                if time.time() > deadline:
                    break
                await asyncio.sleep(_FULL_PAUSE)
        for request in requests:
            self._fail(request.number, "unreachable", f"the model queue takes no prompt: {last}")

    async def _publish_halves(self, pool: str, requests: list[ModelRequest]) -> None:
        half = len(requests) // 2
        await self._publish(pool, requests[:half])
        await self._publish(pool, requests[half:])

    async def _register(self, pool: str, at_once: bool = False) -> None:
        """Say now and then that a pool is in use: services close those that are not."""
        now = time.monotonic()
        if at_once:
            self._registered[pool] = float("-inf")
        if now - self._registered.setdefault(pool, now) < _REGISTER_EVERY:
            return
        self._registered[pool] = now
        try:
            bucket = await self._bus.bucket(self._subjects.bucket_pools)
            await bucket.put(pool, self._specs[pool].model_dump_json().encode())
        except BusError as error:
            self._registered[pool] = float("-inf")
            _log.warning("a pool can't be registered again", pool=pool, error=str(error))

    def _fail(self, number: int, kind: str, text: str) -> None:
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(ModelResponse(number, error_kind=kind, error=text))

    def _receive(self, message: Message) -> None:
        self._heard_at = time.monotonic()
        for row in from_public(message.data):
            response = ModelResponse.from_columns(row)
            future = self._waiting.get(response.number)
            if future is not None and not future.done():
                future.set_result(response)
