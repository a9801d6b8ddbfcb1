"""Any endpoints that speak OpenAI's chat API: vLLM, llama.cpp, Ollama, hosted providers."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from populace.models.backends.base import Admit, Backend, let_in
from populace.models.backends.endpoint import RETRY, Endpoint
from shared.errors import InvalidInputError, PopulaceError
from shared.messages.model import ModelRequest, ModelResponse
from shared.settings import Settings

_ATTEMPTS = 5
_LIMITED_ATTEMPTS = 10
"""Of requests that end with a 429 while nobody else is answered either."""
_LIMITED_FOR = 120.0
"""Seconds of nothing but 429 after which prompts fail at once: limits are by the minute."""
_SLOW_ATTEMPTS = 2
"""Of requests that end with a time-out: each may have taken minutes."""
_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_LONGEST_WAIT = 600.0
"""Seconds that one attempt waits for an endpoint that asks again and again to be left alone, and
after which a request is given up that got nothing but 429."""
_PREFIX = 2000
_UNEVEN = 1.25
"""Times its fair share of requests that an endpoint may have, for the sake of a prefix that it
holds already (consistent hashing with bounded loads, Mirrokni et al. 2016)."""


_OTHERS = re.compile("SECRET|PRIVATE|ACCESS_KEY")
"""In names of keys that are hardly for models: these must be allowed by their whole names."""


def api_key(variable: str | None, settings: Settings) -> str | None:
    """The key in an environment variable that a scenario names.

    Raises:
        InvalidInputError: scenarios may not name this variable, or it isn't set.
    """
    if variable is None:
        return None
    patterns = [p.strip() for p in settings.api_key_env_allow.split(",")]
    allowed = any(fnmatch.fnmatchcase(variable, p) for p in patterns if p)
    if not allowed or (_OTHERS.search(variable) and variable not in patterns):
        raise InvalidInputError(
            f"api_key_env names {variable!r}, which scenarios may not read; allowed are "
            f"{settings.api_key_env_allow} (POPULACE_API_KEY_ENV_ALLOW)"
        )
    key = os.environ.get(variable)
    if not key:
        raise InvalidInputError(
            f"api_key_env names {variable!r}, which is not set where the model service runs"
        )
    return key


class OpenAIBackend(Backend):
    """Sends each prompt to one of some equal endpoints; passing faults are tried again.

    Args:
        base_url: one address, or several, without ``/v1``.
        model: the model's name there.
        key: sent as a bearer token; never logged.
        timeout: seconds that one request may take.
        patience: seconds for which an endpoint that can't be reached is waited for.
        name: how results name this back end.
        extra: what requests hold besides; None: what they don't hold.
    """

    def __init__(
        self,
        base_url: str | list[str],
        model: str,
        *,
        key: str | None = None,
        timeout: float = 120.0,
        patience: float = 60.0,
        name: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name or f"openai:{model}"
        self._model = model
        self._patience = patience
        urls = [base_url] if isinstance(base_url, str) else base_url
        self.endpoints = [
            Endpoint(u.rstrip("/"), model, key, timeout, self.name, extra) for u in urls
        ]
        self.on_pressure: Callable[[str, float], None] = lambda kind, seconds: None
        """Told of "rate_limit" and "timeout", whenever an attempt ends so, and of the seconds for
        which the endpoint wants to be left alone."""

    async def start(self) -> None:
        """Open connection pools; no endpoint is asked yet."""
        for endpoint in self.endpoints:
            endpoint.open()

    async def close(self) -> None:
        """Close the connections."""
        for endpoint in self.endpoints:
            await endpoint.close()

    async def check(self) -> dict[str, Any]:
        """Ask each endpoint for one token; one that answers is enough.

        Raises:
            PopulaceError: none answers.
        """
        request = ModelRequest(
            0,
            (0, "check", 0, 0, 0),
            [{"role": "user", "content": "Say yes."}],
            temperature=0.0,
            max_tokens=1,
        )
        responses = await asyncio.gather(*(e.ask(request) for e in self.endpoints))
        # One that asks for less is there.
        answering = [r.error_kind in ("", "rate_limit") for r in responses]
        if not any(answering):
            raise PopulaceError("; ".join(dict.fromkeys(r.error for r in responses)))
        found = await asyncio.gather(*(e.find_context() for e in self.endpoints))
        known = [c for c in found if c is not None]
        self.context = min(known) if known else None
        return {
            "model": self._model,
            "endpoint": ", ".join(e.url for e in self.endpoints),
            "answering": sum(answering),
            "context": self.context,
        }

    async def count(self, messages: list[dict[str, Any]]) -> int | None:
        """Tokens of a conversation by an endpoint's own tokenizer."""
        return await self._choose(messages).count(messages)

    async def timed_answer(self, request: ModelRequest, admit: Admit = let_in) -> ModelResponse:
        """See ``Backend.timed_answer``; it is admitted once its endpoint may be asked."""
        return await self._answer(request, admit, admitted=False)

    async def answer(self, request: ModelRequest, admit: Admit = let_in) -> ModelResponse:
        """Answer one prompt; passing faults are tried again a few times, elsewhere if there is.

        One that can't be reached at all is waited for, as long as ``patience`` says; when none
        could be reached for that long, prompts fail at once until one is back.
        """
        return await self._answer(request, admit, admitted=True)

    async def _answer(
        self, request: ModelRequest, admit: Admit, *, admitted: bool
    ) -> ModelResponse:
        began = time.monotonic()
        asked_at: float | None = None
        attempt = tokens_in = tokens_out = 0
        while True:
            attempt += 1
            endpoint = self._choose(request.messages)
            hopeless = self._hopeless(endpoint)
            if hopeless is not None and not endpoint.may_probe:
                response = endpoint.failed(request, *hopeless)
                response.details["attempts"] = attempt - 1
                response.tokens_in, response.tokens_out = tokens_in, tokens_out
                return response
            await self._admitted(request, endpoint, None if admitted and attempt == 1 else admit)
            asked_at = asked_at or time.monotonic()
            response = await endpoint.ask(request)
            # Also of attempts that came to nothing, where the endpoint has counted.
            response.tokens_in += tokens_in
            response.tokens_out += tokens_out
            tokens_in, tokens_out = response.tokens_in, response.tokens_out
            if attempt > 1:
                response.details["attempts"] = attempt
            pause = response.details.pop(RETRY, None)
            if response.error_kind in ("rate_limit", "timeout"):
                self.on_pressure(response.error_kind, pause or 0.0)
            if pause is None or self._enough(response, endpoint, attempt, began):
                break
            if endpoint.away_for <= 0:
                spread = random.uniform(_PAUSE / 5, _PAUSE * 2 ** min(attempt - 1, 6))  # noqa: S311
                await asyncio.sleep(max(min(pause, 2 * _LONGEST_PAUSE), spread))
        response.seconds = time.monotonic() - asked_at
        if response.error_kind == "context" and endpoint.context is not None:
            self.context = endpoint.context
        return response

    async def _admitted(
        self, request: ModelRequest, endpoint: Endpoint, admit: Admit | None
    ) -> None:
        """Wait until an endpoint may be asked, and limits allow it, both in the same moment.

        What is admitted while the endpoint is to be left alone would leave in a crowd later.
        """
        until = time.monotonic() + _LONGEST_WAIT
        while True:
            if (away := endpoint.away_for) > 0 and time.monotonic() < until:
                # Jitter keeps those who wait from arriving together.
                await asyncio.sleep(away + random.uniform(0.0, min(1.0, 0.3 * away)))  # noqa: S311
                continue
            if admit is not None:
                await admit(request)
            if endpoint.away_for <= 0 or time.monotonic() > until:
                return

    def _enough(
        self, response: ModelResponse, endpoint: Endpoint, attempt: int, began: float
    ) -> bool:
        """Whether a request was tried often enough."""
        if endpoint.down_for > 0:
            return time.monotonic() - began > self._patience
        slow = response.error_kind == "timeout" and attempt >= _SLOW_ATTEMPTS
        if response.error_kind != "rate_limit":
            return slow or attempt >= _ATTEMPTS
        now = time.monotonic()
        # As long as it answers others, this one's turn comes too.
        serves = now - endpoint.answered_at < self._patience and now - began < _LONGEST_WAIT
        tried = attempt >= _LIMITED_ATTEMPTS and not serves
        return tried or self._hopeless(endpoint) is not None

    def _hopeless(self, endpoint: Endpoint) -> tuple[str, str] | None:
        """Why there is no use in asking an endpoint, but now and then: kind and sentence."""
        if endpoint.down_for > self._patience:
            return "unreachable", (
                f"the model endpoint {endpoint.url} can't be reached for "
                f"{endpoint.down_for:.0f} s now"
            )
        if endpoint.limited_for > _LIMITED_FOR:
            return "rate_limit", (
                f"the model endpoint {endpoint.url} has answered nothing but 429 for "
                f"{endpoint.limited_for:.0f} s now"
            )
        return None

    def _choose(self, messages: list[dict[str, Any]]) -> Endpoint:
        """The endpoint that has seen how this prompt begins, unless it is busy or away."""
        if len(self.endpoints) == 1:
            return self.endpoints[0]
        for endpoint in self.endpoints:
            if self._hopeless(endpoint) and endpoint.may_probe:
                return endpoint  # one prompt, now and then: it may be back
        there = [e for e in self.endpoints if e.away_for <= 0 and not self._hopeless(e)]
        if not there:
            return min(self.endpoints, key=lambda e: (bool(self._hopeless(e)), e.away_for))
        share = (sum(e.in_flight for e in there) + 1) / len(there)
        free = [e for e in there if e.in_flight < share * _UNEVEN]
        begins = str(messages[0].get("content") or "")[:_PREFIX] if messages else ""
        return max(free, key=lambda e: _weight(begins, e.url))


def _weight(prefix: str, url: str) -> bytes:
    """Rendezvous hashing: each prefix ranks the endpoints in an order of its own."""
    return hashlib.blake2b(f"{url}\0{prefix}".encode(), digest_size=8).digest()
