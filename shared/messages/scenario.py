"""What a scenario says, and what is said of a run: the public messages."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from shared.ids import is_token


class Strict(BaseModel):
    """A model that refuses keys which it doesn't know."""

    model_config = ConfigDict(extra="forbid")


class ScriptSpec(Strict):
    """How the scripted back end answers: no language model, for tests and benchmarks."""

    text: str = "My number is {number}."
    """Answer to a prompt without a schema; ``{number}`` stands for the drawn number, ``{words}``
    for some thirty drawn words."""
    low: float = 0.0
    high: float = 100.0
    """Numbers are drawn evenly from [low, high], from (seed, agent, round, call) alone."""
    latency: float = Field(default=0.0, ge=0.0)
    """Seconds until an answer."""
    failures: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of requests that fail."""


class ModelSpec(Strict):
    """A model that agents may ask, and how it is asked by default."""

    backend: Literal["embedded", "openai", "scripted"] = "embedded"
    base_url: str | None = None
    """Of an OpenAI-compatible endpoint, with or without ``/v1``."""
    model: str | None = None
    api_key_env: str | None = None
    """The environment variable of the model service that holds the key; never the key."""
    temperature: float = Field(default=1.0, ge=0.0, le=5.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    max_tokens: int = Field(default=256, ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    """Requests under way at once in one model worker; default: the worker's setting."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that one request may take; default: the worker's setting."""
    script: ScriptSpec | None = None

    @field_validator("base_url")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError("must be an http:// or https:// address")
        if parts.username or parts.password:
            raise ValueError("must not hold a password; name its variable in api_key_env")
        return value.rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _complete(self) -> ModelSpec:
        if self.backend == "openai" and not (self.base_url and self.model):
            raise ValueError("the openai backend needs base_url and model")
        if self.backend != "openai" and (self.base_url or self.api_key_env):
            raise ValueError(f"base_url and api_key_env mean nothing to the {self.backend} backend")
        if self.script is not None and self.backend != "scripted":
            raise ValueError("script goes with the scripted backend alone")
        return self


class AgentsSpec(Strict):
    """How many agents, and over how many worker processes."""

    count: int = Field(default=100, ge=1, le=100_000_000)
    workers: int | None = Field(default=None, ge=1, le=4096)
    """Worker processes for the run; default: what the hosts offer."""
    isolated: bool = False
    """Whether each agent gets a process of its own, besides these."""
    personas: str | None = None
    """Who the agents are: a file beside the scenario (.yaml or .parquet), a stored population, or
    a template, by name."""
    groups: int | None = Field(default=None, ge=1)
    """Into how many groups scenarios that know of groups divide the agents."""

    @model_validator(mode="after")
    def _nobody_alone(self) -> AgentsSpec:
        if self.groups is not None and self.groups > self.count:
            raise ValueError(f"{self.count} agents can't be divided into {self.groups} groups")
        return self


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


class ScenarioSpec(Strict):
    """A scenario as a file holds it, or as an outside program publishes it."""

    name: str
    scenario: str
    """``module:Class`` of the scenario; beside the file, or in an installed package."""
    seed: Annotated[int, BeforeValidator(_whole)] = 0
    rounds: Annotated[int, BeforeValidator(_whole)] = Field(default=1, ge=1, le=1_000_000)
    agents: AgentsSpec = AgentsSpec()
    models: dict[str, ModelSpec] = Field(default_factory=lambda: {"default": ModelSpec()})
    params: dict[str, Any] = Field(default_factory=dict)
    """Checked by the scenario's own ``Params``."""
    profile: bool = False
    """Whether to measure where the run's time goes; costs a few per cent itself."""
    call_timeout: float | None = Field(default=None, gt=0)
    """Seconds without any sign of progress after which calls have failed."""

    # Set by whoever publishes, rather than in a file:
    folder: str | None = None
    """Where ``scenario`` is imported from; relative to where the services run."""
    run: str | None = None
    """A name for the run, chosen by the sender; must be new."""
    results_format: Literal["msgpack", "json"] | None = None
    """Of the result stream; default: as the scenario itself was sent."""

    @field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        if not value.strip() or len(value) > 200:
            raise ValueError("must be 1 to 200 characters")
        return value

    @field_validator("run")
    @classmethod
    def _run_token(cls, value: str | None) -> str | None:
        if value is not None and not is_token(value):
            raise ValueError("must be 1 to 64 characters of A-Z, a-z, 0-9, '_' and '-'")
        return value

    @field_validator("models")
    @classmethod
    def _has_default(cls, value: dict[str, ModelSpec]) -> dict[str, ModelSpec]:
        if "default" not in value:
            raise ValueError("must have an entry named 'default'")
        return value


RunState = Literal["accepted", "running", "finished", "failed", "cancelled"]


class RunInfo(BaseModel):
    """The latest state of a run, as kept in the bucket of runs."""

    run: str
    name: str
    state: RunState
    reason: str = ""
    """Why it failed or was cancelled: one sentence."""
    rounds: int = 0
    rounds_done: int = 0
    agents: int = 0
    director: str = ""
    created: float = Field(default_factory=time.time)
    """Unix time, seconds."""
    updated: float = Field(default_factory=time.time)

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ("finished", "failed", "cancelled")


class RoundRow(BaseModel):
    """What is known of one round once it is over."""

    round: int
    answers: int
    """Agents that answered."""
    failed: int
    """Agents that did not, for whatever reason."""
    failures: dict[str, int] = Field(default_factory=dict)
    """The same by kind of failure."""
    example: str = ""
    """The first failure's message."""
    values: dict[str, Any] = Field(default_factory=dict)
    """What the scenario recorded."""
    tokens: int = 0
    seconds: float = 0.0


class Status(BaseModel):
    """An event in the life of a run, on its status subject, always JSON."""

    kind: Literal[
        "accepted", "started", "round_started", "progress", "round_finished", "ended", "recorded"
    ]
    run: str
    time: float = Field(default_factory=time.time)
    """Unix time, seconds."""
    name: str = ""
    scenario: dict[str, Any] | None = None
    """With "accepted": the scenario as taken, defaults filled in."""
    manifest: dict[str, Any] | None = None
    """With "started" and "ended": seed, versions, hosts, models."""
    round: int | None = None
    rounds: int | None = None
    agents: int | None = None
    done: int | None = None
    """With "progress": agents that have answered or failed in this round."""
    failed: int | None = None
    mean: float | None = None
    """With "progress": mean of the numbers so far, if there are any."""
    tokens: int | None = None
    row: RoundRow | None = None
    """With "round_finished"."""
    state: RunState | None = None
    reason: str | None = None
    records: int | None = None
    """With "ended": records published. With "recorded": records written."""
    folder: str | None = None
    """With "recorded": where they lie."""


class Submitted(BaseModel):
    """The answer to a scenario request: either a run, or what is wrong."""

    run: str | None = None
    error: str | None = None


class ControlRequest(Strict):
    """Asks something of a run's director."""

    action: Literal["cancel"]


class ControlReply(BaseModel):
    """What became of it."""

    state: RunState | None = None
