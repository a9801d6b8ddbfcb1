"""One prompt's way through a back end: made to fit, asked, parsed, repaired once."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from populace.models.backends.base import Admit, Backend, let_in
from populace.models.context import estimate_messages, fit_prompt
from populace.models.structured import fit
from shared.messages.model import Handling, ModelRequest, ModelResponse

_THOUGHT = re.compile(r"^\s*<think(?:ing)?>(.*?)</think(?:ing)?>\s*", re.DOTALL | re.IGNORECASE)
_USUAL = Handling()
_REFITS = 3
_SMALLER = 0.8


class Answerer:
    """Has prompts answered.

    Args:
        backend: what answers.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    async def answer(
        self, request: ModelRequest, handling: Handling = _USUAL, admit: Admit = let_in
    ) -> ModelResponse:
        """Answer one prompt. Failures are responses with an error kind.

        Args:
            request: the prompt.
            handling: what is done where prompt or answer don't fit.
            admit: awaited before each request that leaves.
        """
        response = await self._fitting(request, handling, admit)
        response = fit(_apart(response), request.schema)
        if response.error_kind != "schema" or not handling.repair:
            return response
        return await self._repaired(request, response, handling, admit)

    async def _fitting(
        self, request: ModelRequest, handling: Handling, admit: Admit
    ) -> ModelResponse:
        """Ask with a prompt that the model can take; smaller ones if it says that it can't."""
        limit = handling.context or self.backend.context
        before = 0
        if limit is None:
            response = await self.backend.timed_answer(request, admit)
            if response.error_kind != "context":
                return response
            before = attempts_of(response)
            limit = int(_SMALLER * (response.details.get("limit") or _guess(request)))
        policy = handling.policy
        for _ in range(_REFITS):
            fitted = await fit_prompt(
                request.messages,
                request.max_tokens,
                limit,
                spare=request.spare,
                policy=policy,
                count=self.backend.count,
            )
            if not fitted.fits:
                return ModelResponse(
                    request.number,
                    backend=self.backend.name,
                    error_kind="context",
                    error=f"prompt and answer would take more than the {limit:,} tokens that the "
                    "model can take, and the policy of its memory is 'none'",
                    details={"attempts": before},
                )
            asked = request
            if fitted.messages is not request.messages or fitted.max_tokens != request.max_tokens:
                asked = replace(request, messages=fitted.messages, max_tokens=fitted.max_tokens)
            response = await self.backend.timed_answer(asked, admit)
            before += attempts_of(response)
            if before > 1:
                response.details["attempts"] = before
            if fitted.shortened:
                response.details["shortened"] = fitted.shortened
            if fitted.cut:
                response.details["cut"] = fitted.cut
            if response.error_kind != "context" or policy == "none":
                return response
            limit = int(_SMALLER * min(response.details.get("limit") or limit, limit))
        return response

    async def _repaired(
        self, request: ModelRequest, first: ModelResponse, handling: Handling, admit: Admit
    ) -> ModelResponse:
        """Show the model what was wrong, and take its second answer if that fits."""
        messages = [
            *request.messages,
            {"role": "assistant", "content": first.text or "{}"},
            {
                "role": "user",
                "content": f"That can't be used: {first.error}. Answer again, with nothing but "
                "JSON that fits the schema.",
            },
        ]
        asked = replace(request, messages=messages)
        second = fit(_apart(await self._fitting(asked, handling, admit)), request.schema)
        second.tokens_in += first.tokens_in
        second.tokens_out += first.tokens_out
        second.seconds += first.seconds
        attempts = attempts_of(first) + attempts_of(second)
        second.details = {
            **first.details,
            **second.details,
            "repaired": True,
            "attempts": attempts,
        }
        if second.error_kind:
            # The first answer is the one that was asked for; the row shows what it was.
            second.text = first.text
            second.error_kind, second.error = first.error_kind, first.error
            second.details["repaired"] = False
        return second


def attempts_of(response: ModelResponse) -> int:
    """How many requests left for it."""
    return int(response.details.get("attempts", 1))


def _guess(request: ModelRequest) -> int:
    return estimate_messages(request.messages) + request.max_tokens


def _apart(response: ModelResponse) -> ModelResponse:
    """What a reasoning model thought aloud, apart from what it answered."""
    match = _THOUGHT.match(response.text)
    if match is not None:
        told: dict[str, Any] = {"reasoning": match.group(1).strip()}
        response.details = {**response.details, **told}
        response.text = response.text[match.end() :]
    return response
