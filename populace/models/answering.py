"""One prompt's way through a back end: made to fit, asked, parsed, repaired once."""

from __future__ import annotations

import re
from dataclasses import replace

from populace.models.backends.base import Admit, Backend, NotWantedError, SpentError, let_in
from populace.models.context import estimate_messages, fit_prompt
from populace.models.structured import fit
from shared.messages.model import Handling, ModelRequest, ModelResponse

_THOUGHT = re.compile(r"<think(?:ing)?>(.*?)</think(?:ing)?>\s*", re.DOTALL | re.IGNORECASE)
_THINKING = re.compile(r"^\s*<think(?:ing)?>(.*)$", re.DOTALL | re.IGNORECASE)
"""Begun, and cut by the token limit."""
_THOUGHT_UP_TO = re.compile(r"^(.*?)</think(?:ing)?>\s*", re.DOTALL | re.IGNORECASE)
"""Of templates in which the prompt begins the thought."""
_USUAL = Handling()
_REFITS = 8
_SMALLER = 0.5
_SURE_FROM = 100
"""Tokens of a prompt from which it tells how a model counts; in shorter ones templates do."""
_SLOWLY = 0.05
_BELOW = 0.9
_MOST_TIMES = 16.0


class Answerer:
    """Has prompts answered.

    Args:
        backend: what answers.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._times = 1.0
        """How many times as many tokens as estimated the model has counted of late, at most."""
        self._refused_from: int | None = None
        """Tokens, as estimated, from which it has refused prompts without telling its limit."""

    async def answer(
        self,
        request: ModelRequest,
        handling: Handling = _USUAL,
        admit: Admit = let_in,
        admit_repair: Admit | None = None,
    ) -> ModelResponse:
        """Answer one prompt. Failures are responses with an error kind.

        Args:
            request: the prompt.
            handling: what is done where prompt or answer don't fit.
            admit: awaited before each request that leaves.
            admit_repair: instead of it, for those that mend an answer.
        """
        response = await self._fitting(request, handling, admit)
        response = fit(_apart(response), request.schema)
        if response.error_kind != "schema" or not handling.repair:
            return response
        try:
            return await self._repaired(request, response, handling, admit_repair or admit)
        except (SpentError, NotWantedError):
            return response  # nothing is left to repair it with; what it cost is counted

    async def _fitting(
        self, request: ModelRequest, handling: Handling, admit: Admit
    ) -> ModelResponse:
        """Ask with a prompt that the model can take; smaller ones if it says that it can't."""
        limit = handling.context or self.backend.context
        if limit is None and self._refused_from is not None:
            limit = int(_BELOW * self._refused_from)
        before = 0
        if limit is None:
            response = await self.backend.timed_answer(request, admit)
            self._learn(request, response)
            if response.error_kind != "context":
                return response
            before = attempts_of(response)
            # If it doesn't tell its limit: it is less than this.
            limit = response.details.get("limit") or int(_SMALLER * self._guess(request))
        policy = handling.policy
        for _ in range(_REFITS):
            fitted = await fit_prompt(
                request.messages,
                request.max_tokens,
                limit,
                spare=request.spare,
                policy=policy,
                count=self.backend.count,
                times=self._times,
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
            self._learn(asked, response)
            before += attempts_of(response)
            if before > 1:
                response.details["attempts"] = before
            if fitted.shortened:
                response.details["shortened"] = fitted.shortened
            if fitted.cut:
                response.details["cut"] = fitted.cut
            if response.error_kind != "context" or policy == "none":
                return response
            told = response.details.get("limit")
            # The limit that it tells may be the one that was kept: then the count was wrong.
            limit = told if told is not None and told < limit else int(_SMALLER * limit)
        return response

    def _learn(self, asked: ModelRequest, response: ModelResponse) -> None:
        """How the model counts, where the endpoint tells: scripts and tokenizers differ."""
        estimate = estimate_messages(asked.messages)
        if response.error_kind == "context":
            limit = response.details.get("limit") or self.backend.context
            if limit is None:
                guessed = self._guess(asked)
                self._refused_from = min(guessed, self._refused_from or guessed)
            elif estimate >= _SURE_FROM:  # then it counts more than fits
                least = (limit - asked.max_tokens) / estimate
                self._times = min(_MOST_TIMES, max(self._times, least / _BELOW))
            return
        if self._refused_from is not None and self._guess(asked) > self._refused_from:
            self._refused_from = None  # it takes more than was thought
        if response.error_kind or "usage" in response.details or estimate < _SURE_FROM:
            return
        seen = response.tokens_in / estimate
        # At once upwards, so that the next prompt fits; slowly back.
        slowly = self._times + _SLOWLY * (seen - self._times)
        self._times = min(_MOST_TIMES, max(1.0, seen, slowly))

    def _guess(self, request: ModelRequest) -> int:
        return int(self._times * estimate_messages(request.messages)) + request.max_tokens

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


def _apart(response: ModelResponse) -> ModelResponse:
    """What a reasoning model thought aloud, apart from what it answered."""
    text, thoughts = response.text, []
    if "think" not in text:
        return response
    first = _THOUGHT_UP_TO.match(text)
    if first is not None and "<think" not in first.group(1).lower():
        thoughts.append(first.group(1))
        text = text[first.end() :]
    thoughts += _THOUGHT.findall(text)
    text = _THOUGHT.sub("", text)
    unfinished = _THINKING.match(text)
    if unfinished is not None:
        thoughts.append(unfinished.group(1))
        text = ""
    if thoughts:
        told = "\n".join(thought.strip() for thought in thoughts)
        response.details = {**response.details, "reasoning": told}
        response.text = text.lstrip()
    return response
