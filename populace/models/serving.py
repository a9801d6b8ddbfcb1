"""What happens to a prompt once it has a slot: kept answers, budget, limits, the model, accounts.

The model service and local mode serve with the same code; they differ in where things are kept.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import copy
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from populace.models.accounts import Accounts, BudgetKeeper, Spent, money_of
from populace.models.answering import Answerer
from populace.models.backends.base import Admit, Backend, NotWantedError, SpentError, let_in
from populace.models.context import estimate_messages
from populace.models.limits import RateLimiter
from shared.messages.model import Handling, ModelRequest, ModelResponse, Terms
from shared.messages.scenario import ModelSpec

_SLOWLY = 0.1
_AS_USUAL = Handling()
FINAL = ("", "schema", "refused", "context")
"""Kinds of responses that asking again would not change: answers, and failures of the prompt's own.
Others (an endpoint that was away, a budget that was spent) may be answered at another time."""


class Cache(abc.ABC):
    """Answers across runs, by what was asked."""

    @abc.abstractmethod
    async def get(self, key: str) -> ModelResponse | None:
        """The answer that was kept, or None."""

    @abc.abstractmethod
    async def put(self, key: str, response: ModelResponse) -> None:
        """Keep an answer."""


class OwnCache(Cache):
    """Answers kept in this process's memory."""

    def __init__(self) -> None:
        self._held: dict[str, list[Any]] = {}

    async def get(self, key: str) -> ModelResponse | None:
        """See ``Cache.get``."""
        row = self._held.get(key)
        return None if row is None else ModelResponse.from_columns(copy.deepcopy(row))

    async def put(self, key: str, response: ModelResponse) -> None:
        """See ``Cache.put``."""
        self._held[key] = copy.deepcopy(response.columns())  # whoever has it may change it


def cache_key(
    spec: ModelSpec, request: ModelRequest, handling: Handling = _AS_USUAL, weights: str = ""
) -> str:
    """What an answer depends on: model, parameters, messages, schema, tools, and the draw.

    Also what becomes of a prompt that would not fit, and of an answer that does not.

    The draw follows from (seed, population, agent, round, question), so that many agents who ask
    the same still get an answer each; at temperature 0 there is only one, except of a script, which
    knows no temperature.
    """
    alone = request.temperature == 0 and spec.backend != "scripted"
    told = [
        spec.backend,
        spec.model or "",
        spec.script.model_dump(mode="json") if spec.script is not None else None,
        request.temperature,
        request.top_p,
        request.max_tokens,
        request.messages,
        request.schema,
        request.tools,
        0 if alone else request.draw,
        request.spare,
        [handling.policy, handling.repair, handling.context],
        spec.engine,
        spec.extra,
        weights,
    ]
    text = json.dumps(told, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


BudgetOf = Callable[[str, dict[str, Any]], Awaitable[BudgetKeeper]]


Wanted = Callable[[bool], bool]
"""Whether a prompt is still to be asked; told whether an answer to it was paid for already, that is
to be mended."""


def always(paid: bool) -> bool:
    """The ``Wanted`` of prompts that are wanted whatever happens."""
    return True


class Serving:
    """Serves the prompts of one pool.

    Args:
        backend: what answers.
        spec: the pool's specification.
        limiter: of the endpoint.
        cache: answers across runs.
        budget_of: gives the keeper of a run's budget.
    """

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        limiter: RateLimiter | None,
        cache: Cache,
        budget_of: BudgetOf,
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.limiter = limiter
        self._answerer = Answerer(backend)
        self._cache = cache
        self._budget_of = budget_of
        self._usual_out = 0.0
        self._flights: dict[str, tuple[asyncio.Lock, int]] = {}
        """By what is asked, at temperature 0: one asks, others wait for it; and how many do."""
        self.accounts: dict[str, Accounts] = {}
        """By run."""

    async def serve(
        self, request: ModelRequest, run: str, terms: Terms, wanted: Wanted = always
    ) -> ModelResponse:
        """Answer one prompt, or say why not; it is counted.

        Args:
            request: the prompt.
            run: whose it is.
            terms: of the run.
            wanted: asked before each request leaves for an engine.

        Raises:
            NotWantedError: the answer isn't wanted any more, and none was had.
        """
        try:
            response = await self._serve(request, run, terms, wanted)
        except NotWantedError:
            raise
        except Exception as error:  # what it may have cost is not known, but that it was
            text = f"{type(error).__name__}: {error}"
            failed = ModelResponse(request.number, error_kind="internal", error=text)
            self._count(request, run, terms, failed)
            raise
        self._count(request, run, terms, response)
        return response

    def _count(
        self, request: ModelRequest, run: str, terms: Terms, response: ModelResponse
    ) -> None:
        accounts = self.accounts.get(run)
        if accounts is None:
            accounts = self.accounts[run] = Accounts()
        accounts.add(request.key[3], request.model, response, terms.prices.get(request.model))

    async def _serve(
        self, request: ModelRequest, run: str, terms: Terms, wanted: Wanted
    ) -> ModelResponse:
        key = ""
        if terms.cache != "off":
            handling = terms.handling.get(request.model, _AS_USUAL)
            key = cache_key(self.spec, request, handling, self.backend.weights)
            held = await self._held(key, request, failures=terms.cache == "replay")
            if held is not None:
                return held
            if terms.cache == "replay":
                return ModelResponse(
                    request.number,
                    backend=self.backend.name,
                    error_kind="not_kept",
                    error="no answer to this prompt was kept; it differs from what was asked then",
                    details={"attempts": 0},
                )
        if key and request.temperature == 0:  # all who ask the same get one answer
            async with self._one_at_a_time(key):
                held = await self._held(key, request)
                return held or await self._ask_and_keep(key, request, run, terms, wanted)
        return await self._ask_and_keep(key, request, run, terms, wanted)

    async def _held(
        self, key: str, request: ModelRequest, *, failures: bool = False
    ) -> ModelResponse | None:
        """A kept answer; of failures that are kept, too, only where nothing may be asked."""
        held = await self._cache.get(key)
        if held is None or (held.error_kind and not failures):
            return None
        return replace(held, number=request.number, details={**held.details, "kept": True})

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self, key: str) -> AsyncIterator[None]:
        lock, waiting = self._flights.get(key, (asyncio.Lock(), 0))
        self._flights[key] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._flights[key]
            self._flights[key] = lock, waiting - 1
            if waiting == 1:
                del self._flights[key]

    async def _ask_and_keep(
        self, key: str, request: ModelRequest, run: str, terms: Terms, wanted: Wanted
    ) -> ModelResponse:
        if terms.budget is None:
            response = await self._ask(request, terms, wanted)
        else:
            response = await self._ask_within(request, run, terms, wanted)
        if not key or response.error_kind not in FINAL:
            return response
        await self._cache.put(key, response)
        if request.temperature == 0 and not response.error_kind:
            # Another process may have been quicker: what it kept is the answer.
            held = await self._cache.get(key)
            if held is not None and not held.error_kind and held.text != response.text:
                response.text, response.data = held.text, held.data
        return response

    async def _ask_within(
        self, request: ModelRequest, run: str, terms: Terms, wanted: Wanted
    ) -> ModelResponse:
        assert terms.budget is not None
        budget = await self._budget_of(run, terms.budget)
        price = terms.prices.get(request.model, (0.0, 0.0))
        promised: Spent | None = None
        left = 0

        async def afford(asked: ModelRequest) -> None:
            """Each request that leaves is promised by itself; what it was before is paid then."""
            nonlocal promised, left
            if promised is not None:
                budget.pay(promised, Spent(requests=1))
                promised = None
            tokens_in, tokens_out = self._presume(asked)
            presumed = Spent(tokens_in + tokens_out, money_of(tokens_in, tokens_out, price), 1)
            over = await budget.admit(presumed)
            if over is not None:
                raise SpentError(over)
            promised = presumed
            left += 1

        actual = Spent()
        try:
            response = await self._ask(request, terms, wanted, afford)
            actual.requests = int(left > 0)
            actual.tokens = response.tokens_in + response.tokens_out
            actual.money = money_of(response.tokens_in, response.tokens_out, price)
        except SpentError as spent:
            response = ModelResponse(
                request.number,
                backend=self.backend.name,
                error_kind="budget",
                error=f"the run's budget of {spent} is spent",
                details={"attempts": left},
            )
        except NotWantedError:
            raise  # the last that was promised has not left
        except Exception:
            # What it has cost is not known; that it cost something is.
            actual = replace(promised, requests=1) if promised is not None else actual
            raise
        finally:
            if promised is not None:
                budget.pay(promised, actual)
        return response

    async def _ask(
        self, request: ModelRequest, terms: Terms, wanted: Wanted, afford: Admit = let_in
    ) -> ModelResponse:
        limiter = self.limiter
        presumed = taken = 0

        async def admit(asked: ModelRequest, paid: bool = False) -> None:
            nonlocal presumed
            await afford(asked)
            if limiter is not None and wanted(paid):
                tokens = sum(self._presume(asked))
                presumed += tokens
                await limiter.admit(tokens, partial(wanted, paid))
            if not wanted(paid):
                raise NotWantedError

        try:
            response = await self._answerer.answer(
                request,
                terms.handling.get(request.model, _AS_USUAL),
                admit,
                partial(admit, paid=True),
            )
            taken = response.tokens_in + response.tokens_out
        finally:
            if limiter is not None:
                limiter.settle(presumed, taken)
        if not response.error_kind:
            usual = self._usual_out or float(response.tokens_out)
            self._usual_out = usual + _SLOWLY * (response.tokens_out - usual)
        return response

    def _presume(self, request: ModelRequest) -> tuple[int, int]:
        """Tokens that a request will take, in and out: answers are as long as they were."""
        out = min(request.max_tokens, int(self._usual_out) or request.max_tokens)
        return estimate_messages(request.messages), out
