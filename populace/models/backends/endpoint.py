"""One endpoint that speaks OpenAI's chat API: a request out, a response or a typed failure back."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import orjson
from yarl import URL

from populace.models.context import estimate_messages, estimate_tokens
from shared.codec import writable
from shared.messages.model import ModelRequest, ModelResponse

_JSON = "application/json"
_MESSAGE_LIMIT = 400
_MOST_BYTES = 16 << 20
"""An answer that is longer is not read to its end."""
_BEYOND = 20_000
"""Tokens beyond what was said that an endpoint may count: templates, tools, hidden thoughts."""
_TOO_LONG = re.compile(
    r"context.{0,12}(?:length|size|window)|max_model_len|maximum.{0,20}tokens|prompt is too long|"
    r"too many tokens|reduce the length|exceed_context",
    re.IGNORECASE,
)
_ITS_LIMIT = re.compile(
    r"(?:maximum context length (?:is|of)|n_ctx\"?:?|context size \()\D{0,3}"
    r"(\d{1,3}(?:[,._ ]\d{3})+|\d{3,8})(?![\d])"
)
_IN_A_ROW = 8
"""Refusals for asking too much, without an answer between, after which to pause altogether."""
_AWAY = 1.0
_LONGEST_AWAY = 15.0
_ASIDE_WITHIN = 10.0
_LONGEST_PAUSE = 60.0

_GATEWAY = (502, 503, 504)
"""Said on behalf of a server that is not there, or is not ready."""
_PASSING = (408, 409, 425)
"""Said of requests that may fare better if they are made again."""

_NO_MORE = "insufficient_quota"
"""In a 429: nothing is left to pay with."""
_NEWER = "max_completion_tokens"
"""What some endpoints want in place of ``max_tokens``, and say so."""

RETRY = "retry_after"
"""In a response's details: the fault may pass, and after how many seconds (0: the endpoint
didn't say)."""


class Endpoint:
    """One address.

    Args:
        url: without ``/v1``.
        model: the model's name there.
        key: sent as a bearer token; never logged.
        timeout: seconds that one request may take.
        name: how results name the back end.
        extra: what requests hold besides; None: what they don't hold.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None,
        timeout: float,
        name: str,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url
        self.name = name
        self.in_flight = 0
        self.context: int | None = None
        self._most_taken = 0
        """Tokens of the longest prompt and answer that it took."""
        self._model = model
        self._key = key
        self._timeout = timeout
        self._extra = dict(extra or {})
        self._length = "max_tokens"
        """How it names the longest answer."""
        self._chat = URL(f"{url}/v1/chat/completions")
        self._session: aiohttp.ClientSession | None = None
        self._faults = 0
        self._limited = self._storms = 0
        """Refusals in a row for asking too much, and pauses in a row for that."""
        self._limited_since: float | None = None
        self.answered_at = float("-inf")
        """When it answered last (monotonic)."""
        self._until = 0.0
        self._down_since: float | None = None
        self._probing = False
        self._count_by: str | None = ""
        self._aside_failed = False
        """Whether one of the last questions aside was not answered at all."""

    # Being there
    @property
    def away_for(self) -> float:
        """Seconds for which it is better left alone."""
        return max(0.0, self._until - time.monotonic())

    @property
    def down_for(self) -> float:
        """Seconds for which it could not be reached, without a break; 0 if it can."""
        return 0.0 if self._down_since is None else time.monotonic() - self._down_since

    @property
    def limited_for(self) -> float:
        """Seconds for which it said nothing but 429, and not for how long; 0 if it answers."""
        return 0.0 if self._limited_since is None else time.monotonic() - self._limited_since

    def leave_alone(self, seconds: float) -> None:
        """It said so, or does not answer."""
        self._until = max(self._until, time.monotonic() + seconds)

    def open(self) -> None:
        """Open a connection pool; nothing is asked yet."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=10),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding"),
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    # Asking
    async def ask(self, request: ModelRequest) -> ModelResponse:
        """One attempt."""
        assert self._session is not None, "the back end was not started"
        self.in_flight += 1
        self._probing = self._down_since is not None or self._limited_since is not None
        try:
            return await self._ask(self._session, request)
        finally:
            self.in_flight -= 1
            self._probing = False

    @property
    def may_probe(self) -> bool:
        """Whether to try one that has been down for long: one request at a time, now and then."""
        return not self._probing and self.away_for <= 0

    async def _ask(self, session: aiohttp.ClientSession, request: ModelRequest) -> ModelResponse:
        # A payload of its own kind spares aiohttp the search for one.
        length = self._length
        body = aiohttp.BytesPayload(orjson.dumps(self._body(request)), content_type=_JSON)
        try:
            async with session.post(self._chat, data=body) as reply:
                text = await _read(reply)
                if reply.status not in _GATEWAY:
                    self._faults, self._down_since = 0, None  # whatever it says, it is there
                if reply.status == 200:
                    self._limited = self._storms = 0
                    self._limited_since = None
                    self.answered_at = time.monotonic()
                else:
                    said = text.decode("utf-8", "replace")
                    return self._refused(request, reply, said, length)
            content = _loads(text)
        except aiohttp.ConnectionTimeoutError as error:  # before it could be asked anything
            return self._is_down(request, error)
        except TimeoutError:
            return self.failed(
                request, "timeout", f"{self.url} did not answer within {self._timeout:g} s", 0.0
            )
        except aiohttp.ClientConnectorError as error:
            return self._is_down(request, error)
        except (aiohttp.ClientError, OSError) as error:
            # It was reached; this request alone came to nothing.
            said = str(error) or type(error).__name__
            return self.failed(request, "unreachable", f"{self.url} broke off: {said}", 0.0)
        except _TooLongError:
            said = f"{self.url} answered with more than {_MOST_BYTES >> 20} MB"
            return self.failed(request, "refused", said)
        except ValueError as error:
            return self.failed(
                request,
                "refused",
                f"{self.url} answered with something else than JSON: {error}",
                0.0,
            )
        return self._answered(request, content)

    def _is_down(
        self, request: ModelRequest, said: object, retry_after: float = 0.0
    ) -> ModelResponse:
        """It can't be reached: it is waited for."""
        if self._down_since is None:
            self._down_since = time.monotonic()
        if self.away_for <= 0:
            # Each further fault in a row, and it is left alone for longer.
            self.leave_alone(min(_LONGEST_AWAY, _AWAY * 2 ** min(self._faults, 6)))
            self._faults += 1
        self.leave_alone(min(retry_after, _LONGEST_PAUSE))
        text = f"the model endpoint {self.url} can't be reached: {said!s}"
        return self.failed(request, "unreachable", text, 0.0)

    def _is_limited(self, retry_after: float) -> None:
        """It asks for less.

        Where it does so again and again without saying for how long, the pause grows.
        """
        if retry_after > 0:
            self.leave_alone(min(retry_after, _LONGEST_PAUSE))
            return
        if self._limited_since is None:
            self._limited_since = time.monotonic()
        if self.away_for <= 0:
            self._limited += 1
            if self._limited >= _IN_A_ROW:
                self.leave_alone(min(_LONGEST_PAUSE, _AWAY * 2 ** min(self._storms, 6)))
                self._limited = 0
                self._storms += 1

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": request.messages,
            "temperature": request.temperature,
            "top_p": request.top_p,
            self._length: request.max_tokens,
            "seed": request.draw,
        }
        if request.schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": request.schema, "strict": True},
            }
        if request.tools:
            body["tools"] = request.tools
        if self._extra:
            body = {k: v for k, v in {**body, **self._extra}.items() if v is not None}
        return body

    def _refused(
        self, request: ModelRequest, reply: aiohttp.ClientResponse, text: str, length: str
    ) -> ModelResponse:
        said = " ".join(text.split())[:_MESSAGE_LIMIT]
        message = f"{self.url} answered {reply.status} {reply.reason}: {said}"
        if reply.status == 429 or reply.status >= 500 or reply.status in _PASSING:
            pause = _retry_after(reply.headers.get("Retry-After"))
            if reply.status in _GATEWAY:
                return self._is_down(request, message, pause)
            if reply.status == 429 and _NO_MORE in text:  # waiting does not mend that
                return self.failed(request, "rate_limit", message)
            if reply.status == 429:
                self._is_limited(pause)
            return self.failed(
                request, "rate_limit" if reply.status == 429 else "unreachable", message, pause
            )
        if reply.status in (400, 413, 422) and _TOO_LONG.search(text):
            response = self.failed(request, "context", message)
            told = _ITS_LIMIT.search(text)
            limit = int(re.sub(r"\D", "", told.group(1))) if told is not None else 0
            if limit > self._most_taken:  # else it was read wrongly: more than that was taken
                self.context = response.details["limit"] = limit
            return response
        if reply.status == 400 and _NEWER in text and length != _NEWER:  # of several at once, too
            self._length = _NEWER
            return self.failed(request, "refused", message, 0.0)
        return self.failed(request, "refused", message)

    def failed(
        self, request: ModelRequest, kind: str, message: str, retry_after: float | None = None
    ) -> ModelResponse:
        """A typed failure, without the key."""
        if self._key:
            message = message.replace(self._key, "***")
        details = {} if retry_after is None else {RETRY: retry_after}
        return ModelResponse(
            request.number, backend=self.name, error_kind=kind, error=message, details=details
        )

    def _answered(self, request: ModelRequest, content: Any) -> ModelResponse:
        try:
            choice = content["choices"][0]
            message = choice["message"]
            text = _text_of(message.get("content"))
            finish = choice.get("finish_reason") or "stop"
        except (KeyError, IndexError, TypeError, AttributeError):
            said = str(content)[:200]
            response = self.failed(
                request, "refused", f"{self.url} answered without a choice: {said}", 0.0
            )
            if isinstance(content, dict) and content.get("usage"):  # it was paid for all the same
                self._count_usage(request, response, content["usage"])
            return response
        response = ModelResponse(request.number, text=text, finish=finish, backend=self.name)
        self._count_usage(request, response, content.get("usage"))
        refusal = message.get("refusal")
        if not text and (refusal or finish == "content_filter"):
            said = f": {str(refusal)[:_MESSAGE_LIMIT]}" if refusal else " (content_filter)"
            response.error_kind, response.error = "refused", f"the model refused to answer{said}"
        thought = message.get("reasoning_content") or message.get("reasoning")
        if thought:
            response.details["reasoning"] = str(thought)
        if message.get("tool_calls"):
            response.details["tool_calls"] = message["tool_calls"]
        return response

    def _count_usage(self, request: ModelRequest, response: ModelResponse, usage: Any) -> None:
        """Take the endpoint's counts, where they can be true; else estimates, marked as such."""
        told = usage if isinstance(usage, dict) else {}
        asked = sum(len(str(m.get("content") or "").encode()) for m in request.messages)
        asked += len(str(request.schema or "")) + len(str(request.tools or ""))
        said = max(request.max_tokens, len(response.text.encode()))
        tokens_in = _plausible(told.get("prompt_tokens"), asked)
        tokens_out = _plausible(told.get("completion_tokens"), said, bool(response.text))
        if tokens_in is not None and tokens_out is not None:
            response.tokens_in, response.tokens_out = tokens_in, tokens_out
            self._most_taken = max(self._most_taken, tokens_in + tokens_out)
        else:
            response.tokens_in = estimate_messages(request.messages)
            response.tokens_out = estimate_tokens(response.text)
            response.details["usage"] = "estimated"
        held = (told.get("prompt_tokens_details") or {}) if told else {}
        cached = held.get("cached_tokens") if isinstance(held, dict) else None
        if isinstance(cached, int) and cached > 0:
            response.details["cached"] = cached

    # Beside the chat
    async def find_context(self) -> int | None:
        """How many tokens it takes together, if it tells: vLLM and llama.cpp do."""
        for path, places in (
            ("/v1/models", ("max_model_len",)),
            ("/props", ("default_generation_settings", "n_ctx")),
        ):
            found = await self._aside("GET", path)
            try:
                if path == "/v1/models":
                    listed = found["data"]
                    found = next((m for m in listed if m["id"] == self._model), listed[0])
                for place in places:
                    found = found[place]
            except (KeyError, IndexError, TypeError):
                continue
            if isinstance(found, int) and found > 0:
                self.context = found
                break
        return self.context

    async def count(self, messages: list[dict[str, Any]]) -> int | None:
        """Tokens of a conversation, if it tells; it is asked how only once."""
        if self._count_by is None:
            return None
        self._aside_failed = False
        if self._count_by in ("", "vllm"):
            told = await self._aside(
                "POST", "/tokenize", {"model": self._model, "messages": messages}
            )
            if isinstance(told, dict) and isinstance(told.get("count"), int):
                self._count_by = "vllm"
                return int(told["count"])
        if self._count_by in ("", "llama"):
            told = await self._aside("POST", "/apply-template", {"messages": messages})
            prompt = told.get("prompt") if isinstance(told, dict) else None
            if isinstance(prompt, str):
                told = await self._aside("POST", "/tokenize", {"content": prompt})
                if isinstance(told, dict) and isinstance(told.get("tokens"), list):
                    self._count_by = "llama"
                    return len(told["tokens"]) + 1
        if self._count_by == "" and not self._aside_failed:
            self._count_by = None  # it said that it doesn't know how
        return None

    async def _aside(self, method: str, path: str, body: Any = None) -> Any:
        """What it answers to something that not every endpoint knows; None for any failure."""
        assert self._session is not None, "the back end was not started"
        try:
            async with asyncio.timeout(_ASIDE_WITHIN):
                async with self._session.request(method, f"{self.url}{path}", json=body) as reply:
                    if reply.status == 200:
                        return await reply.json(content_type=None)
                    self._aside_failed |= reply.status == 429 or reply.status >= 500
                    return None
        except (TimeoutError, aiohttp.ClientError, OSError):
            self._aside_failed = True
            return None
        except ValueError:
            return None


class _TooLongError(Exception):
    """An answer does not end."""


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    """The body, up to a bound.

    Raises:
        _TooLongError: it is longer.
    """
    if reply.content_length is not None and reply.content_length <= _MOST_BYTES:
        return await reply.read()
    parts, size = [], 0
    async for part in reply.content.iter_any():
        size += len(part)
        if size > _MOST_BYTES:
            raise _TooLongError
        parts.append(part)
    return b"".join(parts)


def _loads(text: bytes) -> Any:
    """The JSON of an answer; halves of characters, of a text that was cut, are replaced.

    Raises:
        ValueError: it is none.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return writable(json.loads(text))


def _retry_after(told: str | None) -> float:
    """Seconds of a Retry-After header, which may name a date (RFC 9110, 10.2.3); 0: none."""
    try:
        seconds = float(told or 0.0)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(str(told)).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return seconds if 0.0 < seconds < float("inf") else 0.0


def _plausible(count: Any, size: int, some: bool = True) -> int | None:
    """A count of tokens, if it may be true of a text of so many bytes.

    Args:
        count: what was told.
        size: bytes, none of which is more than two tokens.
        some: whether there was any text.
    """
    if not isinstance(count, int) or isinstance(count, bool):
        return None
    return count if int(some) <= count <= 2 * size + _BEYOND else None


def _text_of(content: Any) -> str:
    """The text in a message's content, which may come in parts.

    Raises:
        TypeError: it is of some other shape.
    """
    if isinstance(content, list):
        return "".join(p["text"] for p in content if p.get("type") == "text")
    if content is not None and not isinstance(content, str):
        raise TypeError
    return content or ""
