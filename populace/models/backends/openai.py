"""Any endpoint that speaks OpenAI's chat API: vLLM, llama.cpp, Ollama, hosted providers."""

from __future__ import annotations

import asyncio
import fnmatch
import os
import random
from typing import Any

import aiohttp

from populace.models.backends.base import Backend
from populace.models.structured import fit
from shared.errors import InvalidInputError, PopulaceError
from shared.messages.model import ModelRequest, ModelResponse
from shared.settings import Settings

_ATTEMPTS = 4
_LONGEST_PAUSE = 30.0
_MESSAGE_LIMIT = 400


def api_key(variable: str | None, settings: Settings) -> str | None:
    """The key in an environment variable that a scenario names.

    Raises:
        InvalidInputError: scenarios may not name this variable, or it isn't set.
    """
    if variable is None:
        return None
    patterns = [p.strip() for p in settings.api_key_env_allow.split(",")]
    if not any(fnmatch.fnmatchcase(variable, p) for p in patterns if p):
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
    """Sends each prompt to ``<base_url>/v1/chat/completions``.

    Args:
        base_url: without ``/v1``.
        model: the model's name at the endpoint.
        key: sent as a bearer token; never logged.
        timeout: seconds that one request may take.
        name: how results name this back end.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key: str | None = None,
        timeout: float = 120.0,
        name: str | None = None,
    ) -> None:
        self.name = name or f"openai:{model}"
        self._base = base_url.rstrip("/")
        self._model = model
        self._key = key
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open a connection pool; the endpoint is not asked yet."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=10),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def check(self) -> dict[str, Any]:
        """Ask the endpoint for one token.

        Raises:
            PopulaceError: it does not answer, or refuses.
        """
        request = ModelRequest(
            0,
            (0, "check", 0, 0, 0),
            [{"role": "user", "content": "Say yes."}],
            temperature=0.0,
            max_tokens=1,
        )
        response = await self._once(request)
        if response.error_kind:
            raise PopulaceError(response.error)
        return {"model": self._model, "endpoint": self._base}

    async def answer(self, request: ModelRequest) -> ModelResponse:
        """Answer one prompt; passing faults are tried again a few times."""
        response = await self._once(request)
        for attempt in range(1, _ATTEMPTS):
            pause = response.details.pop("retry_after", None)
            if pause is None:
                break
            if pause <= 0:
                # Full jitter keeps a crowd of retries from arriving together.
                pause = random.uniform(0.1, 0.5 * 2**attempt)  # noqa: S311
            await asyncio.sleep(min(pause, _LONGEST_PAUSE))
            response = await self._once(request)
            response.details["attempts"] = attempt + 1
        response.details.pop("retry_after", None)
        return response

    async def _once(self, request: ModelRequest) -> ModelResponse:
        assert self._session is not None, "the back end was not started"
        body: dict[str, Any] = {
            "model": self._model,
            "messages": request.messages,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
            "seed": request.draw,
        }
        if request.schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": request.schema, "strict": True},
            }
        url = f"{self._base}/v1/chat/completions"
        try:
            async with self._session.post(url, json=body) as reply:
                if reply.status != 200:
                    return self._refused(request, reply, await reply.text())
                content = await reply.json(content_type=None)
        except TimeoutError:
            return self._failed(
                request, "timeout", f"{self._base} did not answer within {self._timeout:g} s"
            )
        except (aiohttp.ClientError, OSError) as error:
            text = f"the model endpoint {self._base} can't be reached: {error}"
            return self._failed(request, "unreachable", text, retry_after=0.0)
        except ValueError as error:
            return self._failed(
                request, "refused", f"{self._base} answered with something else than JSON: {error}"
            )
        return self._answered(request, content)

    def _refused(
        self, request: ModelRequest, reply: aiohttp.ClientResponse, text: str
    ) -> ModelResponse:
        said = text.strip()[:_MESSAGE_LIMIT]
        message = f"{self._base} answered {reply.status} {reply.reason}: {said}"
        if reply.status == 429 or reply.status >= 500:
            try:
                pause = float(reply.headers.get("Retry-After", 0.0))
            except ValueError:
                pause = 0.0
            kind = "refused" if reply.status == 429 else "unreachable"
            return self._failed(request, kind, message, retry_after=pause)
        return self._failed(request, "refused", message)

    def _failed(
        self, request: ModelRequest, kind: str, message: str, retry_after: float | None = None
    ) -> ModelResponse:
        if self._key:
            message = message.replace(self._key, "***")
        details = {} if retry_after is None else {"retry_after": retry_after}
        return ModelResponse(
            request.number,
            backend=self.name,
            error_kind=kind,
            error=message,
            details=details,
        )

    def _answered(self, request: ModelRequest, content: Any) -> ModelResponse:
        try:
            choice = content["choices"][0]
            text = choice["message"].get("content") or ""
            finish = choice.get("finish_reason") or "stop"
            usage = content.get("usage") or {}
        except (KeyError, IndexError, TypeError, AttributeError):
            return self._failed(
                request, "refused", f"{self._base} answered without a choice: {str(content)[:200]}"
            )
        response = ModelResponse(
            request.number,
            text=text,
            finish=finish,
            tokens_in=int(usage.get("prompt_tokens") or 0),
            tokens_out=int(usage.get("completion_tokens") or 0),
            backend=self.name,
        )
        return fit(response, request.schema)
