"""One pool: takes prompts from its queue as it has slots, has them answered, keeps the answers.

The order is: answered, kept by the broker, counted, sent to whoever asked, acknowledged. So
whatever dies, an answer that was paid for is either kept or still under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from populace.models.accounts import Accounts
from populace.models.backends import Backend
from populace.models.backends.base import NotWantedError
from populace.models.backends.openai import OpenAIBackend
from populace.models.gate import Gate
from populace.models.kept import Key, asks_the_same
from populace.models.serving import Serving
from shared.bus import Consumer, Delivery, keep_alive
from shared.codec import from_public, pack_plain
from shared.errors import BusError, CodecError, PopulaceError
from shared.logs import get_logger
from shared.messages.model import ModelRequest, ModelResponse, Terms
from shared.messages.scenario import ModelSpec
from shared.streams import append_patiently

if TYPE_CHECKING:
    from services.models.server import ModelServer

_log = get_logger(__name__)

ACK_WAIT = 6.0
"""Seconds after which prompts of a service that has died are given to another. A broker that was
away for as long gives out again what is still in hand, so others are asked about it first."""
STILL_AT_WORK = 2.0
_GIVEN_UP = 180.0
"""Seconds after which answers that are not stored yet never will be: longer than a broker is given
for that."""
_MAX_DELIVERIES = 5
_EXAMPLE = 500
"""Characters of a failure that are shown as an example of its kind."""
_MOST_MESSAGES = 64
_DROPPED_RUNS = 1000
_PLACE_KEPT_FOR = 86_400.0
"""Seconds for which the broker keeps the place of a pool that nobody serves."""
_PER_MESSAGE = 8
_REMEMBER = 30.0
"""Seconds for which answers that were sent are sent again, should the connection have broken."""
_REMEMBER_BYTES = 64 << 20
_LATENCIES = 2000
_HAND_ON_AFTER = 0.1
_READ_AGAIN, _READ_TRIES = 1.0, 20
_FETCH_WITHIN = 0.5
"""Seconds that one look into the queue may take; a service that is to stop waits for it."""


_UnderWay = tuple[ModelRequest, asyncio.Future[ModelResponse | None]]


class _Lot:
    """A message of prompts, and how many of them are not answered yet."""

    __slots__ = (
        "alive",
        "asked",
        "asked_until",
        "deadline",
        "delivery",
        "inbox",
        "left",
        "life",
        "repeated",
        "run",
        "terms",
        "turned_away",
    )

    def __init__(
        self,
        delivery: Delivery,
        inbox: str,
        run: str,
        terms: Terms,
        deadline: float,
        life: int,
        left: int,
        repeated: bool,
    ) -> None:
        self.life = life
        """Which life of the run asks."""
        self.repeated = repeated
        """Whether another process, or this one, had it before."""
        self.delivery = delivery
        self.inbox = inbox
        self.run = run
        self.terms = terms
        self.deadline = deadline
        """Unix time from which on nobody waits for answers."""
        self.left = left
        self.asked = 0
        """How many were let in, or answered otherwise."""
        self.alive: asyncio.Task[None] | None = None
        """Tells the broker that it is still at work, until it is done with."""
        self.asked_until = float("inf")
        """When the last was answered (monotonic): from then on answers are kept and sent."""
        self.turned_away: list[ModelRequest] = []
        """Those that are for another process."""


class Pool:
    """A model and its queue, as served by this process.

    Args:
        server: whose it is.
        name: the pool's.
        spec: of the model.
        backend: what answers; started.
        serving: what a prompt goes through.
    """

    def __init__(
        self, server: ModelServer, name: str, spec: ModelSpec, backend: Backend, serving: Serving
    ) -> None:
        self._server = server
        self.name = name
        self.spec = spec
        self.backend = backend
        self.serving = serving
        most = spec.concurrency or backend.slots or server.settings.model_concurrency
        known = spec.concurrency is not None or backend.slots is not None
        self.gate = Gate(most, fixed=known)
        if isinstance(backend, OpenAIBackend):
            backend.on_pressure = self._pressed
        self.answered = 0
        self.failed = 0
        self.tokens_in = self.tokens_out = 0
        self.failures: dict[str, dict[str, Any]] = {}
        """By kind: how many, what the last one said, and when."""
        self.pressed = 0
        """Attempts that ended with a 429 or a time-out."""
        self.busy = False
        """Whether it takes part where slots are shared."""
        self.queued, self.oldest = 0, 0.0
        """Messages of prompts that wait or are under way, in all services, and the oldest's age in
        seconds."""
        self.latencies: deque[float] = deque(maxlen=_LATENCIES)
        """Seconds that the last answers took."""
        self._kept = server.kept
        self._tasks: set[asyncio.Task[None]] = set()
        self._out: list[tuple[_Lot, ModelRequest, ModelResponse]] = []
        self._stored: list[tuple[_Lot, ModelRequest, ModelResponse]] = []
        """Answers that are kept, and not given out yet."""
        self._flushing = self._giving = False
        self._under_way: dict[tuple[str, Key], _UnderWay] = {}
        """Prompts that an engine answers, by run and key."""
        self._in_hand: dict[int, _Lot] = {}
        """Messages of prompts under way, by their numbers in the stream."""
        self._newest = 0
        """Number of the last message that was taken; the queue gives them out in order."""
        self._closing = False
        self._dropped: dict[str, int] = {}
        """Prompts by run that came when nobody waited for them any more."""
        self._counting = asyncio.Lock()
        self._sent: deque[tuple[float, str, bytes]] = deque()
        self._sent_bytes = 0
        self.used_at = time.monotonic()
        """When it last took prompts, or was asked for."""

    @property
    def idle_for(self) -> float:
        """Seconds for which there was nothing to do."""
        return 0.0 if self._tasks or self.queued else time.monotonic() - self.used_at

    @property
    def _is_scripted(self) -> bool:
        return self.backend.name == "scripted"

    def under_way_of(self, run: str) -> int:
        """Prompts of a run that are not answered, counted and sent yet."""
        return sum(lot.left for lot in self._in_hand.values() if lot.run == run)

    def _pressed(self, kind: str, seconds: float) -> None:
        self.pressed += 1
        self.gate.pressure()
        if seconds > 0 and self.serving.limiter is not None:
            self._start(self.serving.limiter.pause(seconds))  # nobody sends meanwhile

    # Taking
    async def pull(self) -> None:
        """Take prompts for as long as this process lives."""
        server = self._server
        consumer: Consumer = await server.bus.consumer(
            server.subjects.stream_models,
            durable=f"pool-{self.name}",
            subjects=(server.subjects.model_queue(self.name),),
            ack_wait=ACK_WAIT,
            max_waiting_acks=100_000,
            kept_for=_PLACE_KEPT_FOR,
        )
        try:
            while free := await self.gate.wait():
                # A message holds a few prompts; taking one at a time near the limit keeps this
                # worker from hoarding what others could answer.
                wanted = max(1, min(_MOST_MESSAGES, free // _PER_MESSAGE))
                for delivery in await consumer.fetch(wanted, timeout=_FETCH_WITHIN):
                    self._take(delivery)
        finally:
            await consumer.close()

    def _take(self, delivery: Delivery) -> None:
        try:
            inbox, run, rows, terms_, deadline_, life_ = from_public(delivery.data)
            deadline, life = float(deadline_), int(life_)
            terms = Terms.from_plain(terms_)
            requests = [ModelRequest.from_columns(row) for row in rows]
        except (CodecError, ValueError, TypeError) as error:
            _log.error("a prompt can't be read and is dropped", error=str(error))
            self._start(delivery.term())
            return
        self._server.hear_of(run, life)
        if self._server.is_over(run, life) or time.time() > deadline:
            self._drop(delivery, run, len(requests))
            return
        if self.holds(delivery.sequence):
            return  # this process was too slow to say that it is still at work
        self.gate.take(len(requests))
        self.used_at = time.monotonic()
        # A broker that was killed may have forgotten that it has given this out.
        repeated = delivery.attempt > 1 or delivery.sequence <= self._newest
        self._newest = max(self._newest, delivery.sequence)
        lot = _Lot(delivery, inbox, run, terms, deadline, life, len(requests), repeated)
        self._in_hand[delivery.sequence] = lot
        self._start(self._answer_lot(lot, requests))

    def _drop(self, delivery: Delivery, run: str, count: int) -> None:
        """Nobody waits for these prompts any more."""
        if run not in self._dropped:
            _log.info("prompts that nobody waits for are dropped", pool=self.name, run=run)
        self._dropped[run] = self._dropped.get(run, 0) + count
        while len(self._dropped) > _DROPPED_RUNS:
            del self._dropped[next(iter(self._dropped))]
        self._start(delivery.ack())

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_lot(self, lot: _Lot, requests: list[ModelRequest]) -> None:
        lot.alive = asyncio.ensure_future(self._keep_alive(lot))
        try:
            left = await self._not_answered(lot, requests)
            if left is None:
                self.gate.release(len(requests))
                self._let_go(lot)
                return
            requests = left
            if lot.delivery.attempt > _MAX_DELIVERIES:
                text = f"its model worker died {lot.delivery.attempt - 1} times while answering it"
                _log.error("prompts are given up", pool=self.name, run=lot.run, error=text)
                for request in requests:
                    response = ModelResponse(request.number, error_kind="internal", error=text)
                    self._note_failure(response)
                    self._answered_unasked(lot, request, response)
                return
            if len(requests) == 1:
                await self._answer(lot, requests[0])
            else:
                await asyncio.gather(*(self._answer(lot, r) for r in requests))
        finally:
            lot.asked_until = time.monotonic()

    async def _not_answered(
        self, lot: _Lot, requests: list[ModelRequest]
    ) -> list[ModelRequest] | None:
        """What is to be asked of a lot; None: nothing, it is in other hands or comes again."""
        server = self._server
        try:
            if not self._is_scripted:
                await server.late.ready()
            asks = lot.repeated or server.late.doubts(lot.delivery.stored_at)
            if asks and await server.peers.hold(self.name, lot.delivery.sequence, lot.repeated):
                _log.info("prompts came again that are in other hands", pool=self.name)
                return None
            for _ in range(_READ_TRIES * lot.repeated):
                try:
                    return await self._without_kept(lot, requests)
                except BusError as error:
                    # Given back, it would seem to have cost another process its life.
                    _log.warning("kept answers can't be read", run=lot.run, error=str(error))
                if not self._wanted(lot, 0, paid=False):
                    return None
                await asyncio.sleep(_READ_AGAIN)
            if lot.repeated:
                return None  # it comes again, perhaps to another; others need its slots
        except Exception:  # whatever it was, its slots must not stay taken
            _log.exception("prompts can't be looked after", pool=self.name, run=lot.run)
            return None
        return requests

    async def _keep_alive(self, lot: _Lot) -> None:
        """Have the broker leave a message here until its answers are stored and sent."""
        while not self._is_given_up(lot):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GIVEN_UP):
                    await keep_alive(lot.delivery, STILL_AT_WORK)

    @staticmethod
    def _is_given_up(lot: _Lot) -> bool:
        return time.monotonic() - lot.asked_until > _GIVEN_UP

    def holds(self, sequence: int) -> bool:
        """Whether a message of prompts is in hand here, and has not been given up."""
        lot = self._in_hand.get(sequence)
        return lot is not None and not self._is_given_up(lot)

    def _let_go(self, lot: _Lot) -> None:
        if lot.alive is not None:
            lot.alive.cancel()
        if self._in_hand.get(lot.delivery.sequence) is lot:
            del self._in_hand[lot.delivery.sequence]

    async def _without_kept(self, lot: _Lot, requests: list[ModelRequest]) -> list[ModelRequest]:
        """Answer from what was kept before another process died; gives what is left to ask."""
        found = await self._server.late.find(lot.run, requests)
        left = []
        for request in requests:
            response = found.get(request.key)
            if response is None:
                left.append(request)
                continue
            lot.asked += 1
            self._answered_before(lot, request, response)
        return left

    def _over(self, lot: _Lot, number: int = 0) -> bool:
        """Whether nobody waits for a lot's answers any more, or for that to one of its prompts."""
        gone = (lot.inbox, number) in self._server.gone
        return gone or self._server.is_over(lot.run, lot.life) or time.time() > lot.deadline

    def _wanted(self, lot: _Lot, number: int, paid: bool) -> bool:
        """Whether to ask; at its end a service still mends answers that were paid for."""
        return (paid or not self._closing) and not self._over(lot, number)

    async def _answer(self, lot: _Lot, request: ModelRequest) -> None:
        if not await self.gate.enter():
            self._turned_away(lot, request)
            return
        lot.asked += 1
        late = self._server.late.get(lot.run, request)
        if late is not None:
            self.gate.leave()
            self._answered_before(lot, request, late)
            return
        under_way = self._under_way.get((lot.run, request.key))
        if under_way is not None and asks_the_same(under_way[0], request):
            # Another life of the run has asked this, and is being answered: that is the answer.
            self.gate.leave()
            response = await asyncio.shield(under_way[1])
            if response is not None:
                self._answered_before(lot, request, response)
                return
            if not await self.gate.enter():
                lot.asked -= 1
                self._turned_away(lot, request)
                return
        response = await self._ask_alone(lot, request)
        if response is None:
            if self._over(lot, request.number):
                self.gate.release(1)
                await self._done(lot, 1)
            else:
                lot.asked -= 1
                self._turned_away(lot, request)
            return
        if response.error_kind:
            self._note_failure(response)
        else:
            self.answered += 1
            self.tokens_in += response.tokens_in
            self.tokens_out += response.tokens_out
            if response.seconds:
                self.latencies.append(response.seconds)
        self._remember_late(lot, request, response)
        self._answered(lot, request, response)

    def _remember_late(self, lot: _Lot, request: ModelRequest, response: ModelResponse) -> None:
        """Answers to what an earlier life asked may come when the next has looked for them."""
        late = self._server.late
        stale = lot.repeated or late.watchful or self._server.is_over(lot.run, lot.life)
        if stale and lot.terms.keep and not self._is_scripted:
            late.put(lot.run, request, response)

    async def _ask_alone(self, lot: _Lot, request: ModelRequest) -> ModelResponse | None:
        """``_ask``, in the slot that was entered; others with the same prompt can wait for it."""
        key = lot.run, request.key
        future: asyncio.Future[ModelResponse | None] = asyncio.get_running_loop().create_future()
        mine = self._under_way[key] = request, future
        response = None
        try:
            response = await self._ask(lot, request)
        finally:
            self.gate.leave(answered=response is not None)
            if self._under_way.get(key) is mine:
                del self._under_way[key]
            future.set_result(response)
        return response

    async def _ask(self, lot: _Lot, request: ModelRequest) -> ModelResponse | None:
        """Have the engine answer; None: it was not asked, as nobody here wants it any more."""
        try:
            return await self.serving.serve(
                request, lot.run, lot.terms, partial(self._wanted, lot, request.number)
            )
        except NotWantedError:
            return None
        except Exception as error:
            _log.exception("a back end raised", pool=self.name)
            text = f"{type(error).__name__}: {error}"
            return ModelResponse(
                request.number, backend=self.backend.name, error_kind="internal", error=text
            )

    def _note_failure(self, response: ModelResponse) -> None:
        self.failed += 1
        kind = response.error_kind
        before = self.failures.get(kind, {"count": 0})
        self.failures[kind] = {
            "count": before["count"] + 1,
            "example": response.error[:_EXAMPLE],
            "time": time.time(),
        }

    # Handing on what can't be asked here
    def _turned_away(self, lot: _Lot, request: ModelRequest) -> None:
        lot.turned_away.append(request)
        if len(lot.turned_away) == 1:
            self._start(self._hand_on(lot))  # begins after all of this moment were turned away

    async def _hand_on(self, lot: _Lot) -> None:
        """Give the prompts that were turned away to another process."""
        requests, lot.turned_away = lot.turned_away, []
        try:
            whole = lot.asked == 0 and lot.left == len(requests)
            if whole and lot.delivery.attempt < _MAX_DELIVERIES - 1:
                self._let_go(lot)
                await lot.delivery.nak(_HAND_ON_AFTER)
                return
            rows = [request.columns() for request in requests]
            data = pack_plain([lot.inbox, lot.run, rows, lot.terms.plain(), lot.deadline, lot.life])
            numbers = repr([request.number for request in requests]).encode()
            rest = hashlib.blake2b(numbers, digest_size=8).hexdigest()
            name = f"{self._server.bus.process}/rest/{lot.delivery.sequence}/{rest}"
            await append_patiently(
                self._server.bus,
                self._server.subjects.model_queue(self.name, lot.run),
                data,
                headers={},
                message_id=name,
            )
            await self._done(lot, len(requests))
        except BusError as error:
            # Not acknowledged: all of it comes again, what was answered from the kept answers.
            _log.warning("prompts can't be handed on", pool=self.name, error=str(error))
            self._let_go(lot)
        finally:
            self.gate.release(len(requests))

    async def _done(self, lot: _Lot, count: int) -> None:
        """So many of a lot need nothing more; the last has it acknowledged."""
        lot.left -= count
        if lot.left == 0:
            await lot.delivery.ack()
            self._let_go(lot)

    def _answered_before(self, lot: _Lot, request: ModelRequest, response: ModelResponse) -> None:
        """Answer with what another request has got: nothing is charged for it."""
        details = {**response.details, "kept": True}
        response = replace(response, number=request.number, details=details)
        self._answered_unasked(lot, request, response)

    def _answered_unasked(self, lot: _Lot, request: ModelRequest, response: ModelResponse) -> None:
        self.gate.unkept += 1
        self._answered(lot, request, response)

    def _answered(self, lot: _Lot, request: ModelRequest, response: ModelResponse) -> None:
        self.gate.give_back()
        self._out.append((lot, request, response))
        if not self._flushing:
            self._flushing = True
            self._start(self._flush())

    # Giving back
    async def _flush(self) -> None:
        """Keep answers; what gathers meanwhile goes with the next lot."""
        try:
            while self._out:
                out, self._out = self._out, []
                try:
                    await self._keep(out)
                except CodecError:  # one of them can't be packed
                    out = [(lot, request, _passable(response)) for lot, request, response in out]
                    with contextlib.suppress(CodecError):
                        await self._keep(out)
                except Exception:
                    _log.exception("answers could not be kept", pool=self.name)
                finally:
                    self.gate.kept(len(out))
                self._stored += out
                if not self._giving:
                    self._giving = True
                    self._start(self._give_out())
        finally:
            self._flushing = False

    async def _give_out(self) -> None:
        """Count, send and acknowledge what is kept, while the next lot is being kept."""
        try:
            while self._stored:
                out, self._stored = self._stored, []
                try:
                    await self._count({lot.run for lot, _, _ in out})
                except Exception:
                    _log.exception("answers could not be counted", pool=self.name)
                try:
                    self._send(out)
                except CodecError:  # what of the others went out twice is ignored
                    self._send([(lot, asked, _passable(response)) for lot, asked, response in out])
                for lot, _, _ in out:
                    await self._done(lot, 1)
        finally:
            self._giving = False

    async def _keep(self, out: list[tuple[_Lot, ModelRequest, ModelResponse]]) -> None:
        by_run: dict[str, list[tuple[ModelRequest, ModelResponse]]] = {}
        for lot, request, response in out:
            wanted = lot.terms.keep and not self._is_scripted
            if wanted and response.error_kind != "not_kept" and not response.details.get("kept"):
                by_run.setdefault(lot.run, []).append((request, response))

        async def keep(run: str, pairs: list[tuple[ModelRequest, ModelResponse]]) -> None:
            try:
                await self._kept.keep(run, pairs)
            except BusError as error:
                # Not kept, but not lost either: it is handed out all the same.
                _log.error("answers could not be kept", run=run, error=str(error))

        if len(by_run) == 1:
            await keep(*next(iter(by_run.items())))
        else:
            keeping = (keep(run, pairs) for run, pairs in by_run.items())
            for raised in await asyncio.gather(*keeping, return_exceptions=True):
                if raised is not None:  # once all have ended
                    raise raised

    async def _count(self, runs: set[str]) -> None:
        """Write the accounts down before the answers leave: whoever has one finds it counted."""
        async with self._counting:  # of two at once the older might be written last
            for run in runs:
                if run in self._server.over:
                    # Stragglers: what was written before is more, and must not be replaced.
                    self.serving.accounts.pop(run, None)
                elif (accounts := self.serving.accounts.get(run)) is not None:
                    await self._write(run, accounts)

    async def _write(self, run: str, accounts: Accounts) -> None:
        for block, data in accounts.changed().items():
            try:
                key = f"{run}.{self._server.bus.process}-{accounts.name}.{block}"
                await self._server.usage.put(key, data)
            except BusError as error:
                accounts.again(block)
                _log.warning("accounts can't be written", run=run, error=str(error))

    async def count_rest(self) -> None:
        """Write what could not be written of the accounts when answers left."""
        if not self._giving:
            await self._count(set(self.serving.accounts))

    def _send(self, out: list[tuple[_Lot, ModelRequest, ModelResponse]]) -> None:
        by_inbox: dict[str, list[Any]] = {}
        for lot, _, response in out:
            by_inbox.setdefault(lot.inbox, []).append(response.columns())
        for inbox, rows in by_inbox.items():
            self._reply(inbox, rows)

    def _reply(self, inbox: str, rows: list[Any]) -> None:
        bus = self._server.bus
        data = pack_plain(rows)
        if len(data) > bus.max_payload and len(rows) > 1:
            half = len(rows) // 2
            self._reply(inbox, rows[:half])
            self._reply(inbox, rows[half:])
            return
        if len(data) > bus.max_payload:
            text = f"the answer is longer than a message may be ({len(data):,} bytes)"
            short = ModelResponse(rows[0][0], error_kind="internal", error=text)
            data = pack_plain([short.columns()])
        self._remember(inbox, data)
        try:
            bus.send(inbox, data)
        except BusError as error:
            _log.error("models' answers could not be sent", inbox=inbox, error=str(error))

    def _remember(self, inbox: str, data: bytes) -> None:
        now = time.monotonic()
        self._sent.append((now, inbox, data))
        self._sent_bytes += len(data)
        while self._sent and (
            now - self._sent[0][0] > _REMEMBER or self._sent_bytes > _REMEMBER_BYTES
        ):
            self._sent_bytes -= len(self._sent.popleft()[2])

    def send_again(self) -> None:
        """The connection broke and is back: what was sent of late may be lost."""
        for _, inbox, data in list(self._sent):
            try:
                self._server.bus.send(inbox, data)
            except BusError as error:
                _log.error("models' answers could not be sent again", error=str(error))
                return

    # Looking, ending
    def stats(self) -> dict[str, Any]:
        """What there is to say of it."""
        ordered = sorted(self.latencies)
        limiter = self.serving.limiter
        return {
            "backend": self.backend.name,
            "slots": self.gate.slots,
            "under_way": self.gate.used,
            "queued": self.queued,
            "oldest": round(self.oldest, 3),
            "answered": self.answered,
            "failed": self.failed,
            "pressed": self.pressed,
            "latency": {
                f"p{p}": round(ordered[int(len(ordered) * p / 100)], 4) for p in (50, 90, 99)
            }
            if ordered
            else {},
            "waited_for_limits": round(limiter.waited, 3) if limiter is not None else 0.0,
            "model": self.spec.model or "",
            "endpoints": self.spec.endpoints,
            "limits": self.spec.limits.model_dump(exclude_none=True) if self.spec.limits else {},
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "failures": self.failures,
        }

    async def finish(self, within: float) -> None:
        """Hand on what has not left for the engine, and wait for what has, for so many seconds."""
        self._closing = True
        self.gate.close()
        if self.serving.limiter is not None:
            self.serving.limiter.close()
        until = time.monotonic() + within
        while self._tasks and (left := until - time.monotonic()) > 0:
            # One after the other ends, and has others started: answers are still to be kept.
            await asyncio.wait(self._tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Give up what is still under way (the broker will give it to another), and close."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)
        lots, self._in_hand = list(self._in_hand.values()), {}  # others are told that they may
        for lot in lots:
            if lot.alive is not None:
                lot.alive.cancel()
            with contextlib.suppress(BusError):  # then it comes again after a while
                await lot.delivery.nak()
        try:
            await self.backend.close()
        except PopulaceError as error:
            _log.warning("a back end could not be closed", pool=self.name, error=str(error))


def _passable(response: ModelResponse) -> ModelResponse:
    """The response, or a failure if its text is no text (half of a surrogate pair, say)."""
    try:
        pack_plain(response.columns())
    except CodecError as error:
        return ModelResponse(
            response.number,
            tokens_in=response.tokens_in,
            tokens_out=response.tokens_out,
            backend=response.backend,
            error_kind="schema",
            error=f"the answer can't be passed on: {error}",
        )
    return response
