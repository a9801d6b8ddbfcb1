"""What a scenario says, and what is said of a run: the public messages."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from shared.ids import is_token


class Strict(BaseModel):
    """A model that refuses keys which it doesn't know, and numbers that are none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Latency(Strict):
    """Seconds until an answer, drawn from a lognormal distribution."""

    median: float = Field(gt=0)
    sigma: float = Field(default=0.5, ge=0, le=5)
    """Standard deviation of the logarithm."""


class ScriptRule(Strict):
    """What the scripted back end says where a prompt matches."""

    when: str
    """A regular expression, looked for in the last message."""
    text: str
    """The answer; ``{1}`` stands for the expression's first group, ``{number}`` and ``{words}`` as
    in the script's own text."""

    @field_validator("when")
    @classmethod
    def _expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return value


class ScriptSpec(Strict):
    """How the scripted back end answers: no language model, for tests and benchmarks."""

    text: str = "My number is {number}."
    """Answer to a prompt without a schema; ``{number}`` stands for the drawn number, ``{words}``
    for some thirty drawn words."""
    low: float = 0.0
    high: float = 100.0
    """Numbers are drawn evenly from [low, high], from (seed, agent, round, call) alone."""
    rules: list[ScriptRule] = Field(default_factory=list)
    """The first that matches gives the answer, instead of ``text``."""
    latency: Annotated[float, Field(ge=0.0)] | Latency = 0.0
    """Seconds until an answer: always the same, or drawn."""
    failures: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of requests that fail."""

    @model_validator(mode="after")
    def _in_order(self) -> ScriptSpec:
        if self.low > self.high:
            raise ValueError("low must not be more than high")
        return self


class Limits(Strict):
    """What the whole installation may ask of an endpoint, all runs and model services together."""

    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Prompt and answer tokens."""
    concurrency: int | None = Field(default=None, ge=1)
    """Requests under way at once."""


class Price(Strict):
    """Money for a million tokens."""

    input: float = Field(default=0.0, ge=0)
    output: float = Field(default=0.0, ge=0)


class MemorySpec(Strict):
    """What becomes of an agent's memory when it grows longer than its budget."""

    policy: Literal["window", "summary", "none"] = "window"
    """"window": the latest messages are sent; "summary": older ones are summed up by the model, and
    forgotten; "none": nothing is left out, and a prompt that would not fit fails unsent."""
    tokens: int | None = Field(default=None, ge=16)
    """Budget; default: of "window" whatever fits beside the prompt, of "summary" half of what the
    model can take."""


class Mixture(Strict):
    """Which of the run's models an agent asks: by weight, or by a column of its persona."""

    weights: dict[str, float] | None = None
    """Model to its share of the population, met exactly (largest remainder); which agents get
    which follows from the seed."""
    by: str | None = None
    """A column of the persona."""
    choose: dict[str, str] = Field(default_factory=dict)
    """The column's value to a model; ``"*"`` for all others."""

    @model_validator(mode="after")
    def _one_way(self) -> Mixture:
        if (self.weights is None) == (self.by is None):
            raise ValueError("give either weights, or by and choose")
        if self.weights is not None:
            if self.choose:
                raise ValueError("choose goes with by")
            if not self.weights or any(not w >= 0 for w in self.weights.values()):
                raise ValueError("weights must be 0 or more")
            if not sum(self.weights.values()) > 0:
                raise ValueError("the weights must not all be 0")
        elif not self.choose:
            raise ValueError("by needs choose: which value of the column means which model")
        return self

    @property
    def models(self) -> list[str]:
        """The models that it names."""
        return list(dict.fromkeys([*(self.weights or {}), *self.choose.values()]))


class ModelSpec(Strict):
    """A model that agents may ask, and how it is asked by default."""

    backend: Literal["embedded", "openai", "vllm", "scripted"] = "embedded"
    mixture: Mixture | None = None
    """Stands for others of the run's models; nothing else is given then."""
    base_url: str | list[str] | None = None
    """Of an OpenAI-compatible endpoint, with or without ``/v1``; or of several equal ones."""
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
    limits: Limits | None = None
    context: int | None = Field(default=None, ge=64)
    """Tokens that prompt and answer may have together; default: what the endpoint says, if it
    does."""
    memory: MemorySpec = MemorySpec()
    repair: bool = True
    """Whether an answer that does not fit its schema is asked for once more, with the error."""
    price: Price | None = None
    """Default: what the price table (``POPULACE_PRICES``) says of the model."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Of the vllm backend: arguments of vLLM's engine, such as ``max_model_len``."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Of the openai backend: what requests hold besides, such as ``reasoning_effort``; null leaves
    out what they would hold, for endpoints that refuse it (``top_p: null``)."""
    script: ScriptSpec | None = None

    @field_validator("base_url")
    @classmethod
    def _http(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is None:
            return None
        if isinstance(value, list):
            if not value:
                raise ValueError("must name at least one endpoint")
            return list(dict.fromkeys(_endpoint(one) for one in value))
        return _endpoint(value)

    @property
    def endpoints(self) -> list[str]:
        """The addresses in ``base_url``."""
        if self.base_url is None:
            return []
        return self.base_url if isinstance(self.base_url, list) else [self.base_url]

    @model_validator(mode="after")
    def _complete(self) -> ModelSpec:
        if self.mixture is not None:
            # Defaults may be spelled out: a scenario travels with them filled in.
            defaults = type(self).model_fields
            given = self.model_fields_set - {"mixture"}
            if any(
                getattr(self, name) != defaults[name].get_default(call_default_factory=True)
                for name in given
            ):
                raise ValueError("a mixture stands for other models and has no keys besides")
            return self
        if self.backend == "openai" and not (self.base_url and self.model):
            raise ValueError("the openai backend needs base_url and model")
        if self.backend == "vllm" and not self.model:
            raise ValueError("the vllm backend needs model")
        if self.engine and self.backend != "vllm":
            raise ValueError("engine goes with the vllm backend alone")
        if self.backend != "openai" and (self.base_url or self.api_key_env):
            raise ValueError(f"base_url and api_key_env mean nothing to the {self.backend} backend")
        if self.extra and self.backend != "openai":
            raise ValueError("extra goes with the openai backend alone")
        if taken := sorted({"model", "messages", "stream"} & self.extra.keys()):
            raise ValueError(f"extra must not hold {', '.join(taken)}")
        if self.script is not None and self.backend != "scripted":
            raise ValueError("script goes with the scripted backend alone")
        return self


def _endpoint(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("must be an http:// or https:// address")
    if parts.username or parts.password:
        raise ValueError("must not hold a password; name its variable in api_key_env")
    if parts.query or parts.fragment:
        raise ValueError("must be an address alone, without a query")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError("must have a port from 0 to 65535, or none") from None
    return value.rstrip("/").removesuffix("/v1")


class Budget(Strict):
    """What a run may spend on models; once it is spent, nothing more is asked."""

    tokens: int | None = Field(default=None, ge=1)
    """Prompt and answer tokens."""
    money: float | None = Field(default=None, gt=0)
    requests: int | None = Field(default=None, ge=1)
    account: str | None = Field(default=None, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    """Runs that name the same one spend together; default: each run for itself."""

    @model_validator(mode="after")
    def _something(self) -> Budget:
        if self.tokens is None and self.money is None and self.requests is None:
            raise ValueError("give tokens, money or requests")
        return self


CacheMode = Literal["off", "read-write", "replay"]

Durability = Literal["none", "round", "call"]
"""What is kept of a run for the case of a crash: nothing, so that what a lost process held fails;
the state at the end of each round, from which it is taken up again; or that and each finished call,
so that agents do nothing again who had to do with the scenario and models alone."""


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


class ReplaySpec(Strict):
    """A run whose kept answers are given again, instead of asking models."""

    run: str
    strict: bool = False
    """Whether a prompt that differs from the one that was answered then fails the run."""


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


class PlannedEvent(Strict):
    """Something that is injected into a run before a round, for its scenario to make sense of."""

    name: str = Field(min_length=1, max_length=100)
    """``params`` sets parameters; others are the scenario's own."""
    data: dict[str, Any] = Field(default_factory=dict)
    round: int | None = Field(default=None, ge=1)
    """The round before which it comes."""
    after: float | None = Field(default=None, ge=0)
    """Or: seconds since the start after which the next round that begins brings it."""
    time: float = 0.0
    """When it came by hand (Unix time); orders events of one round."""
    refused: str = ""
    """Why it could not be used, if it came by hand."""
    done: bool = Field(default=False, exclude=True)
    """Whether this process has brought it."""

    @model_validator(mode="after")
    def _once(self) -> PlannedEvent:
        if self.round is not None and self.after is not None:
            raise ValueError("give either round or after")
        return self


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
    events: list[PlannedEvent] = Field(default_factory=list)
    """What is injected, and when; more may come by hand (``populace inject``)."""
    budget: Budget | None = None
    cache: CacheMode = "off"
    """Answers kept across runs. "read-write": what was asked before, word for word and by the same
    agent, is not asked again; "replay": nothing is asked, and what was not kept fails."""
    durability: Durability | None = None
    """What a crash of any process may cost: see ``docs/durability.md``. Default: "round", unless an
    agent or the scenario holds what can't be written down."""
    record_events: bool = False
    """Whether the events of environments are written to the run's folder."""
    record_messages: bool = False
    """Whether what agents say to one another, and to environments, is written there as well."""
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
    replay: ReplaySpec | None = None
    """The run that this one plays again."""

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

    @field_validator("cache", mode="before")
    @classmethod
    def _cache_words(cls, value: Any) -> Any:
        """YAML reads ``off`` as false; ``true`` means the useful one."""
        return {False: "off", True: "read-write"}.get(value, value) if value in (0, 1) else value

    @field_validator("models")
    @classmethod
    def _has_default(cls, value: dict[str, ModelSpec]) -> dict[str, ModelSpec]:
        if "default" not in value:
            raise ValueError("must have an entry named 'default'")
        for name, spec in value.items():
            for other in spec.mixture.models if spec.mixture is not None else ():
                if other not in value:
                    raise ValueError(f"{name} mixes a model {other!r}, which is not among them")
                if value[other].mixture is not None:
                    raise ValueError(f"{name} mixes {other}, which is itself a mixture")
        return value


RunState = Literal["accepted", "running", "paused", "finished", "failed", "cancelled"]


class RunInfo(BaseModel):
    """The latest state of a run, as kept in the bucket of runs."""

    run: str
    name: str
    state: RunState
    reason: str = ""
    """Why it failed, was cancelled, or is paused: one sentence."""
    life: int = 1
    """One more each time that it is taken up again, after a crash or a pause."""
    player: str = ""
    """The process that plays it; whoever is not this one has been replaced, and must stop."""
    not_durable: str = ""
    """Why it can't be taken up again, if that turned out."""
    rounds: int = 0
    rounds_done: int = 0
    agents: int = 0
    director: str = ""
    event: str = ""
    """What tells the scenario event that it began with from others."""
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
    usage: dict[str, Any] = Field(default_factory=dict)
    """What models were asked and what it cost: sums, see ``populace.models.accounts.Usage``."""


class Status(BaseModel):
    """An event in the life of a run, on its status subject, always JSON."""

    kind: Literal[
        "accepted",
        "started",
        "round_started",
        "progress",
        "round_finished",
        "restored",
        "paused",
        "ended",
        "recorded",
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
    life: int | None = None
    """With "restored": the run goes on from the end of ``round`` in this life; what earlier ones
    recorded of later rounds does not count. With "ended" and "paused": which life that was."""
    state: RunState | None = None
    reason: str | None = None
    records: int | None = None
    """With "ended": records published. With "recorded": records written."""
    folder: str | None = None
    """With "recorded": where they lie."""
    missing: int | None = None
    """With "recorded": answers that were gone from the stream before they could be written."""
    events_missing: int | None = None
    """With "recorded": the same of environments' events, where they are recorded."""


class Submitted(BaseModel):
    """The answer to a scenario request: either a run, or what is wrong."""

    run: str | None = None
    error: str | None = None


class ControlRequest(Strict):
    """Asks something of a run's director."""

    action: Literal["cancel", "pause", "inject", "spread"]
    """"spread": take workers anew, on the hosts that there are now."""
    reason: str = ""
    """Why, where it is no person who asks."""
    event: PlannedEvent | None = None
    """With "inject"."""

    @model_validator(mode="after")
    def _event_with_inject(self) -> ControlRequest:
        if (self.action == "inject") != (self.event is not None):
            raise ValueError("an event is given with inject, and with nothing else")
        return self


class ManageRequest(Strict):
    """Asks any director for something that needs nobody who plays the run."""

    run: str
    action: Literal["resume", "cancel"]
    rounds: int | None = Field(default=None, ge=1)
    """With "resume": how many rounds the run is to have now."""
    budget: Budget | None = None
    """With "resume": what it may spend now, what it has spent before included."""


class ControlReply(BaseModel):
    """What became of it."""

    state: RunState | None = None
