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
    model: str = "default"
    """The model's name in its scenario, for the accounts."""
    spare: tuple[int, int] = (0, 0)
    """Which messages (from, up to) may be left out, oldest first, if all would not fit."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the model may call, in OpenAI's shape."""

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
            self.model,
            self.spare,
            self.tools,
        ]

    @classmethod
    def from_columns(cls, row: list[Any]) -> ModelRequest:
        """The request that travelled.

        Raises:
            CodecError: the row has another shape.
        """
        try:
            number, key, messages, schema, temperature, top_p, max_tokens, *rest = row
            model, spare, tools = rest or ("default", (0, 0), None)
            return cls(
                number,
                tuple(key),
                messages,
                schema,
                temperature,
                top_p,
                max_tokens,
                model,
                tuple(spare),
                tools,
            )
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
    """Empty, or what failed: see ``populace.errors.ModelFailure``."""
    error: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    """What else is worth telling: "attempts" (more than one was needed), "repaired" (it fitted the
    schema at the second time), "shortened" (messages left out), "cut" (messages cut), "cached"
    (prompt tokens that the engine had at hand), "kept" (served from kept answers, nothing was
    asked), "reasoning" (what the model thought, where the endpoint tells it apart), "tool_calls".
    """
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


_HOW_ASKED = {"temperature", "top_p", "max_tokens", "memory", "price", "repair", "context"}


@dataclass(slots=True, frozen=True)
class Handling:
    """What a service does where a prompt or an answer does not fit."""

    policy: str = "window"
    """As in ``MemorySpec``."""
    repair: bool = True
    context: int | None = None
    """Tokens that prompt and answer may have together, where the scenario says so."""

    @classmethod
    def of(cls, spec: ModelSpec) -> Handling:
        """As a model's specification says."""
        return cls(spec.memory.policy, spec.repair, spec.context)


@dataclass(slots=True)
class Terms:
    """What a run asks of the model services beside its prompts; travels with each batch."""

    cache: str = "off"
    budget: dict[str, Any] | None = None
    """As in ``Budget``."""
    prices: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By model: money for a million tokens in, and out."""
    keep: bool = True
    """Whether answers are kept."""
    handling: dict[str, Handling] = field(default_factory=dict)
    """By model."""
    contexts: dict[str, int] = field(default_factory=dict)
    """By model: tokens that its endpoint says it can take. For the agents' side alone."""

    def plain(self) -> list[Any]:
        """As they travel."""
        handling = {k: [h.policy, h.repair, h.context] for k, h in self.handling.items()}
        return [self.cache, self.budget, self.prices, self.keep, handling]

    @classmethod
    def from_plain(cls, value: Any) -> Terms:
        """The terms that travelled.

        Raises:
            CodecError: they have another shape.
        """
        try:
            cache, budget, prices, keep, handling = value
            return cls(
                cache,
                budget,
                {k: (p[0], p[1]) for k, p in prices.items()},
                bool(keep),
                {k: Handling(*h) for k, h in handling.items()},
            )
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise CodecError(f"a run's terms have the wrong shape: {error}") from None


def pool_name(spec: ModelSpec) -> str:
    """The work queue's name for all models that are served alike: equal endpoint, equal queue.

    How a single request is to be answered (temperature, length) travels with the request, and what
    is done where it does not fit with the run's terms.
    """
    if not spec.model_dump(exclude={"backend", *_HOW_ASKED}, exclude_defaults=True):
        return spec.backend  # nothing is said that makes it differ from another of its kind
    told = spec.model_dump_json(exclude=_HOW_ASKED)
    return f"{spec.backend}-{hashlib.blake2b(told.encode(), digest_size=6).hexdigest()}"
