"""What an agent asks its model through: ``self.model``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pydantic import BaseModel, ValidationError

from populace._runtime.driver import current_call
from populace.errors import ModelFailure
from populace.models.structured import schema_problem
from shared.errors import InvalidInputError
from shared.messages.model import ModelRequest, ModelResponse

if TYPE_CHECKING:
    from populace.agent import Agent
    from populace.models.client import ModelClient

M = TypeVar("M", bound=BaseModel)


class ModelHandle:
    """Asks the models of the run, as one agent."""

    __slots__ = ("_agent", "_client")

    def __init__(self, agent: Agent, client: ModelClient) -> None:
        self._agent = agent
        self._client = client

    @overload
    async def ask(
        self,
        prompt: str,
        *,
        returns: None = None,
        model: str = ...,
        system: str | None = ...,
        temperature: float | None = ...,
        max_tokens: int | None = ...,
        memory: bool = ...,
        remember: bool = ...,
    ) -> str: ...

    @overload
    async def ask(
        self,
        prompt: str,
        *,
        returns: type[M],
        model: str = ...,
        system: str | None = ...,
        temperature: float | None = ...,
        max_tokens: int | None = ...,
        memory: bool = ...,
        remember: bool = ...,
    ) -> M: ...

    @overload
    async def ask(
        self,
        prompt: str,
        *,
        returns: dict[str, Any],
        model: str = ...,
        system: str | None = ...,
        temperature: float | None = ...,
        max_tokens: int | None = ...,
        memory: bool = ...,
        remember: bool = ...,
    ) -> Any: ...

    async def ask(
        self,
        prompt: str,
        *,
        returns: Any = None,
        model: str = "default",
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        memory: bool = True,
        remember: bool = False,
    ) -> Any:
        """Ask, and await the answer.

        Args:
            prompt: what the user says to the model.
            returns: a pydantic model or a JSON schema that the answer must fit; default: text.
            model: which of the run's models.
            system: goes before everything else; the agent's persona, if it has one, follows.
            temperature: of sampling; default: the model's.
            max_tokens: of the answer; default: the model's.
            memory: whether the agent's memory goes before the prompt.
            remember: whether prompt and answer go into the memory.

        Raises:
            ModelFailure: no usable answer; ``kind`` says why.
            InvalidInputError: no such model, or a schema that isn't one.
        """
        messages: list[dict[str, Any]] = []
        persona = self._agent.persona
        # What all share goes first: engines keep the beginnings of prompts.
        parts = [part for part in (system, persona and persona.text) if part]
        if parts:
            messages.append({"role": "system", "content": "\n\n".join(parts)})
        if memory:
            messages.extend(dict(m) for m in self._agent.memory.messages)
        messages.append({"role": "user", "content": prompt})
        messages = _joined(messages)
        response = await self.generate(
            messages,
            schema=_schema(returns),
            model=model,
            temperature=temperature,
            max_tokens=max_tokens,
        )
        if remember:
            self._agent.memory.add_user(prompt)
            self._agent.memory.add_assistant(response.text)
        if returns is None:
            return response.text
        if isinstance(returns, dict):
            return response.data
        try:
            return returns.model_validate(response.data)
        except ValidationError as error:
            raise ModelFailure(
                "model_schema", f"the answer does not fit: {error}", text=response.text
            ) from None

    async def generate(
        self,
        messages: list[dict[str, Any]],
        *,
        schema: dict[str, Any] | None = None,
        model: str = "default",
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> ModelResponse:
        """Send these very messages; returns the whole response, token counts included.

        Raises:
            ModelFailure: no usable answer; ``kind`` says why.
        """
        agent, client = self._agent, self._client
        spec = client.spec(model)
        shard = agent._home()
        request = ModelRequest(
            client.next_number(),
            (
                shard.worker.seed,
                shard.population,
                agent.number,
                agent.round,
                agent._next_question(),
            ),
            messages,
            schema,
            spec.temperature if temperature is None else temperature,
            spec.top_p,
            spec.max_tokens if max_tokens is None else max_tokens,
        )
        profile = shard.worker.profile
        began = time.monotonic() if profile is not None else 0.0
        response = await client.request(model, request)
        if profile is not None:
            profile.models += time.monotonic() - began
            profile.served += response.seconds
        call = current_call()
        if call is not None:
            call.tokens += response.tokens_in + response.tokens_out
            call.backend = response.backend or call.backend
        if response.error_kind:
            raise ModelFailure(f"model_{response.error_kind}", response.error, text=response.text)
        return response


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in a row of one role as one: many chat templates insist that roles alternate."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            both = f"{joined[-1]['content']}\n\n{message['content']}"
            joined[-1] = {**message, "content": both}
        else:
            joined.append(message)
    return joined


def _schema(returns: Any) -> dict[str, Any] | None:
    if returns is None:
        return None
    if isinstance(returns, dict):
        problem = schema_problem(returns)
        if problem is not None:
            raise InvalidInputError(f"returns is not a JSON schema: {problem}")
        return returns
    if isinstance(returns, type) and issubclass(returns, BaseModel):
        return returns.model_json_schema()
    raise InvalidInputError("returns must be a pydantic model or a JSON schema")
