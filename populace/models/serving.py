"""What happens to a prompt once it has a slot: kept answers, budget, limits, the model, accounts.

The model service and local mode serve with the same code; they differ in where things are kept.
"""

from __future__ import annotations

import abc
import copy
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from populace.models.accounts import Accounts, BudgetKeeper, Spent, money_of
from populace.models.answering import Answerer, attempts_of
from populace.models.backends.base import Backend
from populace.models.context import estimate_messages
from populace.models.limits import RateLimiter
from shared.messages.model import Handling, ModelRequest, ModelResponse, Terms
from shared.messages.scenario import ModelSpec

_SLOWLY = 0.1


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


def cache_key(spec: ModelSpec, request: ModelRequest) -> str:
    """What an answer depends on: model, parameters, messages, schema, tools, and the draw.

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
    ]
    text = json.dumps(told, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


BudgetOf = Callable[[str, dict[str, Any]], Awaitable[BudgetKeeper]]


class NotWantedError(Exception):
    """Nobody waits for the answer to a prompt any more."""


Wanted = Callable[[], bool]


def always() -> bool:
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
        response = await self._serve(request, run, terms, wanted)
        accounts = self.accounts.get(run)
        if accounts is None:
            accounts = self.accounts[run] = Accounts()
        accounts.add(request.key[3], request.model, response, terms.prices.get(request.model))
        return response

    async def _serve(
        self, request: ModelRequest, run: str, terms: Terms, wanted: Wanted
    ) -> ModelResponse:
        key = ""
        if terms.cache != "off":
            key = cache_key(self.spec, request)
            held = await self._cache.get(key)
            if held is not None:
                return replace(held, number=request.number, details={**held.details, "kept": True})
            if terms.cache == "replay":
                return ModelResponse(
                    request.number,
                    backend=self.backend.name,
                    error_kind="not_kept",
                    error="no answer to this prompt was kept; it differs from what was asked then",
                    details={"attempts": 0},
                )
        if terms.budget is None:
            response = await self._ask(request, terms, wanted)
        else:
            response = await self._ask_within(request, run, terms, wanted)
        if key and not response.error_kind:
            await self._cache.put(key, response)
        return response

    async def _ask_within(
        self, request: ModelRequest, run: str, terms: Terms, wanted: Wanted
    ) -> ModelResponse:
        assert terms.budget is not None
        budget = await self._budget_of(run, terms.budget)
        price = terms.prices.get(request.model, (0.0, 0.0))
        presumed_in, presumed_out = self._presume(request)
        presumed = Spent(presumed_in + presumed_out, money_of(presumed_in, presumed_out, price), 1)
        over = await budget.admit(presumed)
        if over is not None:
            return ModelResponse(
                request.number,
                backend=self.backend.name,
                error_kind="budget",
                error=f"the run's budget of {over} is spent",
            )
        actual = Spent()
        try:
            response = await self._ask(request, terms, wanted)
            actual.requests = attempts_of(response)
            actual.tokens = response.tokens_in + response.tokens_out
            actual.money = money_of(response.tokens_in, response.tokens_out, price)
        finally:
            budget.pay(presumed, actual)
        return response

    async def _ask(self, request: ModelRequest, terms: Terms, wanted: Wanted) -> ModelResponse:
        limiter = self.limiter
        presumed = taken = 0

        async def admit(asked: ModelRequest) -> None:
            nonlocal presumed
            if limiter is not None and wanted():
                tokens = sum(self._presume(asked))
                presumed += tokens
                await limiter.admit(tokens)
            if not wanted():
                raise NotWantedError

        try:
            response = await self._answerer.answer(
                request, terms.handling.get(request.model, Handling()), admit
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
