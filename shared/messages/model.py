"""Prompts on their way to a model, and its answers on their way back, in batches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from shared.errors import CodecError
from shared.messages.scenario import ModelSpec


@dataclass(slots=True)
class ModelRequest:
    """One prompt."""

    number: int
    """The asking process's own count; its answer carries it back."""
    key: tuple[int, str, int, int, int]
    """(seed, population, agent, round, number of the question within the round)."""
    messages: list[dict[str, Any]]
    """As in OpenAI's chat API: role and content."""
    schema: dict[str, Any] | None = None
    """JSON schema that the answer must fit."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256

    def columns(self) -> list[Any]:
        """The request as it travels."""
        return [
            self.number,
            list(self.key),
            self.messages,
            self.schema,
            self.temperature,
            self.top_p,
            self.max_tokens,
        ]

    @classmethod
    def from_columns(cls, row: list[Any]) -> ModelRequest:
        """The request that travelled.

        Raises:
            CodecError: the row has another shape.
        """
        try:
            number, key, messages, schema, temperature, top_p, max_tokens = row
            return cls(number, tuple(key), messages, schema, temperature, top_p, max_tokens)
        except (TypeError, ValueError) as error:
            raise CodecError(f"a model request has the wrong shape: {error}") from None

    @property
    def draw(self) -> int:
        """A seed for the engine: 31 bits that follow from the key alone."""
        digest = hashlib.blake2b(repr(self.key).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") & 0x7FFFFFFF


@dataclass(slots=True)
class ModelResponse:
    """One answer, or one failure."""

    number: int
    text: str = ""
    data: Any = None
    """The parsed answer, where a schema was asked for."""
    finish: str = "stop"
    """Why the engine stopped: "stop", or "length" when it was cut by the token limit."""
    tokens_in: int = 0
    tokens_out: int = 0
    backend: str = ""
    """Name of what answered, such as "embedded" or "scripted"."""
    error_kind: str = ""
    """Empty, or what failed: "unreachable", "timeout", "refused", "schema", "internal"."""
    error: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """How long the back end was at work."""

    def columns(self) -> list[Any]:
        """The response as it travels."""
        return [
            self.number,
            self.text,
            self.data,
            self.finish,
            self.tokens_in,
            self.tokens_out,
            self.backend,
            self.error_kind,
            self.error,
            self.details,
            self.seconds,
        ]

    @classmethod
    def from_columns(cls, row: list[Any]) -> ModelResponse:
        """The response that travelled.

        Raises:
            CodecError: the row has another shape.
        """
        try:
            return cls(*row)
        except TypeError as error:
            raise CodecError(f"a model response has the wrong shape: {error}") from None


def pool_name(spec: ModelSpec) -> str:
    """The work queue's name for all models that are served alike: equal endpoint, equal queue.

    How a single request is to be answered (temperature, length) travels with the request.
    """
    if spec.backend == "embedded":
        return "embedded"
    told = spec.model_dump_json(exclude={"temperature", "top_p", "max_tokens"})
    return f"{spec.backend}-{hashlib.blake2b(told.encode(), digest_size=6).hexdigest()}"
