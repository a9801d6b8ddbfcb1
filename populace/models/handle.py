"""What an agent asks its model through: ``self.model``."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pydantic import BaseModel, ValidationError

from populace._runtime.cost import Cost
from populace._runtime.driver import current_call
from populace.errors import ModelFailure
from populace.memory import ChatMessage
from populace.models.context import estimate_messages, latest
from populace.models.mixture import chosen
from populace.models.structured import schema_problem
from shared.errors import InvalidInputError
from shared.logs import get_logger
from shared.messages.model import ModelRequest, ModelResponse
from shared.messages.scenario import ModelSpec
from shared.problems import first_problem

if TYPE_CHECKING:
    from populace.agent import Agent
    from populace.models.client import ModelClient

_log = get_logger(__name__)

_USUAL_CONTEXT = 4096
_SHOWN = 1500
"""Characters of an answer that doesn't fit, in the message of its failure."""
_TIMES = 12
"""Bytes for each token that a model can take: no tokenizer has longer ones, on average."""
_MUCH = 400_000
"""Bytes of a memory that are sent at most: a message to the model services holds 1 MB."""
_SUM_UP = (
    "Sum up what was said between the lines, for the one who was told it, in a few sentences. Keep "
    "all numbers and names that may matter later."
)
_SO_FAR = "What happened so far:"

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
        spec = self._client.spec(self._choose(model))
        memory_ = self._agent.memory
        if memory and spec.memory.policy == "summary":
            await self._sum_up(self._choose(model), spec)
        messages: list[dict[str, Any]] = []
        persona = self._agent.persona
        # What all share goes first: engines keep the beginnings of prompts.
        parts = [part for part in (system, persona and persona.text) if part]
        if parts:
            messages.append({"role": "system", "content": "\n\n".join(parts)})
        first = len(messages)
        if memory:
            kept = memory_.messages
            if spec.memory.policy == "window" and spec.memory.tokens is not None:
                kept = latest(kept, spec.memory.tokens)
            if spec.memory.policy != "none":
                kept = _within_reach(kept, self._client.context(self._choose(model)))
            messages.extend(dict(m) for m in kept)
        spare = (first, len(messages))
        messages.append({"role": "user", "content": prompt})
        messages, spare = _joined(messages, spare)
        generate = functools.partial(
            self.generate,
            schema=_schema(returns),
            model=model,
            temperature=temperature,
            max_tokens=max_tokens,
            spare=spare,
        )
        response = await generate(messages)
        found, problem = _as_asked(response, returns)
        if problem and spec.repair:
            # What the class alone knows (its validators) no service can have looked at.
            told = f"That can't be used: {problem}. Answer again, with JSON that fits."
            messages = [
                *messages,
                {"role": "assistant", "content": response.text},
                {"role": "user", "content": told},
            ]
            response = await generate(messages)
            found, problem = _as_asked(response, returns)
        if remember:
            self._agent.memory.add_user(prompt)
            self._agent.memory.add_assistant(response.text)
        if problem:
            raise _failure("schema", f"the answer does not fit: {problem}", response.text)
        return found

    def name(self, model: str = "default") -> str:
        """Which of the run's models this agent asks: one of a mixture, where that is one.

        Raises:
            InvalidInputError: no such model.
        """
        return self._choose(model)

    def _choose(self, model: str) -> str:
        """The model that a name means for this agent."""
        spec = self._client.spec(model)
        return model if spec.mixture is None else chosen(spec.mixture, model, self._agent)

    async def _sum_up(self, model: str, spec: ModelSpec) -> None:
        """Have the model sum up the older half of a memory that has grown too long."""
        memory = self._agent.memory
        budget = spec.memory.tokens or (self._client.context(model) or _USUAL_CONTEXT) // 2
        if estimate_messages(memory.messages) <= budget:
            return
        recent = latest(memory.messages, budget // 2)
        older = memory.messages[: len(memory.messages) - len(recent)]
        if not older or (len(older) == 1 and str(older[0]["content"]).startswith(_SO_FAR)):
            return  # there is nothing, or nothing new, to sum up
        told = "\n".join(f"{m['role']}: {m['content']}" for m in older)
        try:
            response = await self.generate(
                [{"role": "user", "content": f"{_SUM_UP}\n---\n{told}\n---"}],
                model=model,
                max_tokens=max(32, budget // 4),
            )
        except ModelFailure as failure:
            # The question itself may still be answered: what does not fit is left out of it.
            _log.warning(
                "a memory could not be summed up", agent=str(self._agent), error=str(failure)
            )
            return
        text = response.text.strip()
        if not text:
            _log.warning("the summary of a memory is empty", agent=str(self._agent))
            return
        # What was remembered meanwhile stays; if another has summed up these, they are gone.
        now = memory.messages[: len(older)]
        if len(now) == len(older) and all(a is b for a, b in zip(now, older, strict=True)):
            summary: ChatMessage = {"role": "user", "content": f"{_SO_FAR} {text}"}
            memory.messages[: len(older)] = [summary]

    async def generate(
        self,
        messages: list[dict[str, Any]],
        *,
        schema: dict[str, Any] | None = None,
        model: str = "default",
        temperature: float | None = None,
        max_tokens: int | None = None,
        tools: list[dict[str, Any]] | None = None,
        spare: tuple[int, int] = (0, 0),
    ) -> ModelResponse:
        """Send these very messages; returns the whole response, token counts included.

        Args:
            messages: as in OpenAI's chat API.
            schema: a JSON schema that the answer must fit; ``response.data`` holds it parsed.
            model: which of the run's models.
            temperature: of sampling; default: the model's.
            max_tokens: of the answer; default: the model's.
            tools: that the model may call, in OpenAI's shape; ``response.details["tool_calls"]``
                holds the calls that it asks for.
            spare: which messages (from, up to) may be left out, oldest first, where all would be
                more than the model can take.

        Raises:
            ModelFailure: no usable answer; ``kind`` says why.
        """
        agent, client = self._agent, self._client
        model = self._choose(model)
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
            model,
            spare,
            tools,
        )
        profile = shard.worker.profile
        began = time.monotonic() if profile is not None else 0.0
        response = await client.request(model, request)
        if profile is not None:
            profile.models += time.monotonic() - began
            profile.served += response.seconds
        call = current_call()
        if call is not None:
            if call.cost is None:
                call.cost = Cost()
            call.cost.add(model, response)
        if response.error_kind:
            raise _failure(response.error_kind, response.error, response.text)
        return response


def _failure(kind: str, error: str, text: str) -> ModelFailure:
    """A failure whose message holds what the model said, for whoever reads the results."""
    said = f"{error}; the answer was: {text[:_SHOWN]}" if text.strip() else error
    return ModelFailure(f"model_{kind}", said, text=text)


def _as_asked(response: ModelResponse, returns: Any) -> tuple[Any, str]:
    """The answer as it was asked for, or what is wrong with it."""
    if returns is None:
        return response.text, ""
    if isinstance(returns, dict):
        return response.data, ""
    try:
        return returns.model_validate(response.data), ""
    except ValidationError as error:
        return None, first_problem(error)


def _within_reach(messages: list[ChatMessage], context: int | None) -> list[ChatMessage]:
    """The latest of a memory that can matter: no more travels than a model could ever take.

    What of it does not fit is left out, and counted, where that is known exactly.
    """
    room = min(_MUCH, _TIMES * (context or _MUCH))
    size, start = 0, len(messages)
    while start > 0:
        size += len(str(messages[start - 1]["content"]).encode())
        if size > room and start < len(messages):
            break
        start -= 1
    return messages[start:]


def _joined(
    messages: list[dict[str, Any]], spare: tuple[int, int]
) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    """Messages in a row of one role as one: many chat templates insist that roles alternate.

    What may be left out is not joined to what may not.
    """
    joined: list[dict[str, Any]] = []
    places: list[int] = []
    for place, message in enumerate(messages):
        apart = place in spare and spare[0] != spare[1]
        if joined and joined[-1]["role"] == message["role"] and not apart:
            both = f"{joined[-1]['content']}\n\n{message['content']}"
            joined[-1] = {**message, "content": both}
        else:
            joined.append(message)
        places.append(len(joined) - 1)
    places.append(len(joined))
    if spare[0] == spare[1]:
        return joined, (0, 0)
    return joined, (places[spare[0]], places[spare[1]])


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
