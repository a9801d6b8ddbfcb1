"""Requests between hosts, workers and the owners of runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.messages.model import Terms
from shared.messages.scenario import ModelSpec, ReplaySpec


class HostInfo(BaseModel):
    """What a host says of itself, once a second."""

    host: str
    address: str = ""
    cores: int
    memory: int
    """Bytes, the machine's."""
    load: float = 0.0
    """Share of the machine's CPU in use, 0 to 1."""
    workers: int = 0
    """Worker processes that serve a run."""
    free: int = 0
    """Worker processes that it would still start."""
    per_run: int = 1
    """Workers that a run gets here unless it asks for more."""
    since: float = 0.0
    version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    """As ``POPULACE_HOST_LABELS`` gives them."""
    draining: bool = False
    """Whether it gives no more workers."""
    runs: dict[str, int] = Field(default_factory=dict)
    """Workers by the run's name."""


class HostChange(BaseModel):
    """To a host: from now on, do otherwise. What is None stays."""

    model_config = ConfigDict(extra="forbid")

    draining: bool | None = None
    """Give no more workers, and end those that are here: their runs go on elsewhere."""
    per_run: int | None = Field(default=None, ge=1, le=1024)
    """Workers that a run gets here unless it asks for more."""


class StopWorker(BaseModel):
    """To a host: end one worker. Its run goes on with others."""

    worker: str


class HostDetail(BaseModel):
    """To a host: what are your workers, and what did you log last?"""

    lines: int = Field(default=100, ge=0, le=1000)


class WorkerProcess(BaseModel):
    """A worker process on a host."""

    worker: str
    run: str
    """The life's scope, as in ``Subjects.scope``."""
    pid: int
    since: float
    """Unix time."""
    rss: int = 0
    """Bytes of memory."""
    cpu: float = 0.0
    """CPU seconds, user and system."""


class HostDetails(BaseModel):
    """What a host says when it is asked closely."""

    info: HostInfo
    workers: list[WorkerProcess] = Field(default_factory=list)
    log: list[str] = Field(default_factory=list)
    """Its last lines, oldest first."""


class AcquireWorkers(BaseModel):
    """To a host: give a run this many workers."""

    run: str
    life: int = 1
    """Which life of the run: one more each time that it is taken up again."""
    count: int = Field(ge=1)
    seed: int = 0
    folders: list[str] = Field(default_factory=list)
    """Where the run's code may be imported from."""
    models: dict[str, ModelSpec] = Field(default_factory=dict)
    results_format: str = "msgpack"
    call_timeout: float | None = None
    terms: Terms = Field(default_factory=Terms)
    """What the run asks of the model services beside its prompts."""
    profile: bool = False
    """Whether to measure where time goes."""
    recall: list[int] = Field(default_factory=list)
    """Rounds that may have been played in part before: answers of models may be there."""
    by_call: bool = False
    """Whether each finished call is written down."""
    record_messages: bool = False
    """Whether calls between agents go into the run's results."""
    replay: ReplaySpec | None = None
    """The run whose kept answers are given instead of asking models."""
    isolated: bool = False
    """Workers for agents that have a process each, besides those that the run has."""


class AcquiredWorkers(BaseModel):
    """The workers' names; each listens on its control subjects by now."""

    workers: list[str]


class ReleaseWorkers(BaseModel):
    """To a host: the run is over, end its workers."""

    run: str
    """The life's scope, as in ``Subjects.scope``; with ``before``, the run's own name."""
    before: int = 0
    """End those of all lives before this one."""
    kill: bool = False
    """At once, since nothing that they hold is of use."""


class Released(BaseModel):
    """How many workers were ended."""

    workers: int


class Assignment(BaseModel):
    """From a host to one of its workers: which run it serves."""

    worker: str
    host: str
    run: str
    life: int = 1
    recall: list[int] = Field(default_factory=list)
    by_call: bool = False
    record_messages: bool = False
    replay: ReplaySpec | None = None
    seed: int = 0
    folders: list[str] = Field(default_factory=list)
    models: dict[str, ModelSpec] = Field(default_factory=dict)
    results_format: str = "msgpack"
    call_timeout: float | None = None
    terms: Terms = Field(default_factory=Terms)
    profile: bool = False


class SavedPart(BaseModel):
    """Where a part of a run's state lies: in so many pieces, written by this life in this round."""

    round: int
    life: int
    pieces: int


class SaveShards(BaseModel):
    """To a worker: write down what the agents and environments hold, at the end of a round."""

    round: int


class Settled(BaseModel):
    """What a worker has done so far, once all that was sent to it has arrived and is done."""

    activity: int = 0
    """Calls and events that it has taken, all together."""


class ShardsSaved(BaseModel):
    """Which shards were written; the others have not changed since the last time."""

    parts: dict[str, SavedPart] = Field(default_factory=dict)
    unquiet: int = 0
    """Calls that were still under way, and are not part of it."""
    problem: str = ""
    """Why something could not be written down: it holds values that can't."""


class OpenShard(BaseModel):
    """To a worker: take calls for a slice of a population."""

    shard: str
    population: str
    class_path: str | None = None
    """Of the agents; None: each creation names its own (single agents)."""
    folder: str | None = None
    """Where the class is imported from, if it isn't installed."""
    offset: int = 0
    """The slice's first agent's number within the population."""
    size: int = 0
    """Number of agents in the slice; 0: grows with each creation."""
    people: str | None = None
    """File of the agents' personas, or "template:" and a name."""
    people_count: int = 0
    """Number of agents of the whole population."""
    members: str | None = None
    """For an environment: the population whose calls are applied in agent order."""
    member_count: int = 0
    epoch: int = 0
    """For an environment: 1, and one more each time that it is taken over."""
    made: bool = False
    """For an environment: whether it was made, so that its journal says how."""
    saved: SavedPart | None = None
    """Where its state lies, if it is opened as it was at the end of a round."""
    owner: str = ""
    """For an environment: the process that owns the run."""


class ShardOpened(BaseModel):
    """A worker's consent."""

    shard: str


class Rule(BaseModel):
    """Which events go out for a listener whose condition the environment evaluates."""

    rule: str
    path: str = ""
    event: str = "*"
    when: str | None = None
    below: bool = False
    format: Literal["msgpack", "json"] = "msgpack"
    subject: str = ""
    """Where they come."""


class Populations(BaseModel):
    """To a worker: which populations there are, so that its agents can call theirs."""

    known: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """By name: number of agents, number of shards."""
    environments: dict[str, str] = Field(default_factory=dict)
    """Path to the name of the class."""
    ordered: dict[str, list[str]] = Field(default_factory=dict)
    """Population to the environments that apply its agents' calls in agent order."""
    rules: list[Rule] = Field(default_factory=list)
    """What listeners want of the environments."""
    lost: list[str] = Field(default_factory=list)
    """Shards whose worker is gone."""
    moved: dict[str, str] = Field(default_factory=dict)
    """Shards that another worker holds now, and its name; unanswered calls are made again."""


class ListenRequest(BaseModel):
    """To a run's owner: have events sent to a subject of their own; answered with a Rule."""

    path: str = ""
    """Of the environment."""
    event: str = "*"
    when: str | None = None
    """A condition on the event, such as ``new > 3``."""
    below: bool = False
    """Whether environments below the path count as well."""
    format: Literal["msgpack", "json"] = "msgpack"


class EnvironmentRequest(BaseModel):
    """To a run's owner: make an environment."""

    path: str
    class_path: str
    folder: str | None = None
    arguments: str
    """The constructor's, packed, in hexadecimal: ``[args, kwargs]``."""


class EnvironmentMade(BaseModel):
    """The owner's consent."""

    path: str


class WorkerStats(BaseModel):
    """What a worker counts."""

    worker: str
    run: str
    pid: int
    agents: int
    shards: int
    calls: int
    waiting: int
    """Calls begun and not yet answered."""
    listener_failures: int = 0
    """Events whose handler raised."""
    rss: int
    """Bytes of memory."""
    cpu: float
    """CPU seconds, user and system."""
    sent_bytes: int
    received_bytes: int
    profile: dict[str, float] | None = None
    """Sums of seconds, where they are measured; see ``populace._runtime.profile``."""


class WorkerEnded(BaseModel):
    """From a host to all concerned: a worker is no more."""

    run: str
    worker: str
    host: str
    reason: str


class ShardsLost(BaseModel):
    """From a run's owner to its workers: calls to these shards can't be answered any more."""

    shards: list[str]
    reason: str


class Lease(BaseModel):
    """To a host, twice a second: the owner of this run is alive. Without it, workers end."""

    run: str
    owner: str = ""


class LeaseRenewed(BaseModel):
    """The host's answer: which of the run's workers are there."""

    workers: list[str]
    ended: dict[str, str] = Field(default_factory=dict)
    """Why others are no more."""


class PlacedShard(BaseModel):
    """Where one slice of a population lives."""

    shard: str
    worker: str
    host: str
    offset: int
    size: int


class Placement(BaseModel):
    """Where a population lives; the epoch rises with each move."""

    population: str
    epoch: int = 1
    shards: list[PlacedShard]


class CheckModel(BaseModel):
    """To the model service: can this model be reached?"""

    spec: ModelSpec
    attempt: bool = True
    """Whether to try it, rather than to look at the specification alone."""


class ModelChecked(BaseModel):
    """What the model service found."""

    ok: bool
    error: str = ""
    details: dict[str, Any] = Field(default_factory=dict)
