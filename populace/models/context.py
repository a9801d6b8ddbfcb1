"""How many tokens prompts take, and what is left out of one that would not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_CHARACTERS = 3.2
"""Per token of a script that writes spaces. English prose has 4 to 5 with common tokenizers; fewer
is assumed, so that an estimate errs on the long side."""
_UNSPACED = re.compile(r"[\u1100-\u11ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_PER_MESSAGE = 6
"""Tokens of a chat template around each message, at most, of common ones."""
_LEAST_ANSWER = 16
_UNSURE = 1.6
"""An estimate that is this many times below the limit is believed; else the endpoint counts, where
it can."""
_CUT = " [...] "

M = TypeVar("M", bound=Mapping[str, Any])
Count = Callable[[list[dict[str, Any]]], Awaitable[int | None]]


def estimate_tokens(text: str) -> int:
    """Tokens of a text, rather too many than too few."""
    unspaced = 0 if text.isascii() else len(_UNSPACED.findall(text))
    return int(unspaced + (len(text) - unspaced) / _CHARACTERS) + 1


def estimate_messages(messages: Sequence[Mapping[str, Any]]) -> int:
    """Tokens of a conversation, rather too many than too few."""
    return sum(_PER_MESSAGE + estimate_tokens(_said(m)) for m in messages)


def _said(message: Mapping[str, Any]) -> str:
    """All text of a message, that of its tool calls included."""
    content, calls = message.get("content") or "", message.get("tool_calls")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"{text}{json.dumps(calls, ensure_ascii=False)}" if calls else text


def latest(messages: list[M], tokens: int) -> list[M]:
    """The latest messages that take no more than so many tokens together; the last one at least."""
    left, start = tokens, len(messages)
    while start > 0:
        left -= estimate_messages(messages[start - 1 : start])
        if left < 0 and start < len(messages):
            break
        start -= 1
    return messages[start:]


@dataclass(slots=True)
class Fitted:
    """A prompt that fits."""

    messages: list[dict[str, Any]]
    max_tokens: int
    shortened: int = 0
    """Messages that were left out."""
    cut: int = 0
    """Messages of which only beginning and end are left."""
    fits: bool = True
    """Whether it does: with the policy "none", nothing is left out."""


async def fit_prompt(
    messages: list[dict[str, Any]],
    max_tokens: int,
    limit: int | None,
    *,
    spare: tuple[int, int],
    policy: str,
    count: Count,
    times: float = 1.0,
) -> Fitted:
    """A prompt that leaves room for an answer within a model's limit.

    Args:
        messages: the conversation.
        max_tokens: of the answer.
        limit: tokens of both together; None: nobody knows.
        spare: which messages may be left out, oldest first.
        policy: see ``MemorySpec``.
        count: the endpoint's own count of a conversation's tokens, or None.
        times: how many times as many tokens as estimated the model has counted before.
    """
    fitted = Fitted(messages, max_tokens)
    if limit is None:
        return fitted
    known = await _tokens(messages, max_tokens, limit, count, times)
    if known + max_tokens <= limit:
        return fitted
    if policy == "none":
        fitted.fits = False
        return fitted
    if max_tokens > limit // 2:
        # An answer that may be longer than all that is said before it: rather a shorter one.
        max_tokens = fitted.max_tokens = max(limit // 2, limit - known)
    first, stop = spare
    # In pairs, so that roles go on alternating. As few as will do, found by halving: each count
    # may be a request.
    none, all_ = 0, (stop - first + 1) // 2

    def without(pairs: int) -> list[dict[str, Any]]:
        return [*messages[:first], *messages[min(stop, first + 2 * pairs) :]]

    while none < all_:
        middle = (none + all_) // 2
        if await _tokens(without(middle), max_tokens, limit, count, times) + max_tokens <= limit:
            all_ = middle
        else:
            none = middle + 1
    left = without(all_)
    fitted.shortened = len(messages) - len(left)
    if fitted.shortened:
        known = await _tokens(left, max_tokens, limit, count, times)
    if known + max_tokens > limit:
        fitted.max_tokens = max(min(_LEAST_ANSWER, max_tokens), limit - known)
    while known + fitted.max_tokens > limit and _cut_longest(left):
        fitted.cut += 1
        known = await _tokens(left, fitted.max_tokens, limit, count, times)
    fitted.messages = left
    return fitted


async def _tokens(
    messages: list[dict[str, Any]], max_tokens: int, limit: int, count: Count, times: float
) -> int:
    estimate = int(times * estimate_messages(messages))
    if estimate + max_tokens <= limit / _UNSURE:
        return estimate
    counted = await count(messages)
    return estimate if counted is None else counted


def _cut_longest(messages: list[dict[str, Any]]) -> bool:
    """Take a third out of the middle of the longest message; False if none is worth it."""
    if not messages:
        return False

    def text_of(message: dict[str, Any]) -> str:
        content = message.get("content")
        return content if isinstance(content, str) else ""  # parts, such as images, stay whole

    place = max(range(len(messages)), key=lambda i: len(text_of(messages[i])))
    text = text_of(messages[place])
    if len(text) < 8 * len(_CUT):
        return False
    keep = len(text) // 3
    messages[place] = {**messages[place], "content": f"{text[:keep]}{_CUT}{text[-keep:]}"}
    return True
