"""Looking into a run that is under way: what an agent or an environment holds, and where it lives.

Looking changes nothing, and does not wait for what an agent is at work on.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class Attribute(BaseModel):
    """An attribute of an agent or an environment, in words."""

    name: str
    type: str
    text: str
    """The value as JSON, or as Python shows it; cut, if it is long."""
    cut: int = 0
    """Characters that were cut off."""


class Listens(BaseModel):
    """Somebody who hears events."""

    who: str
    """An agent by name, an environment by path, or ``scenario``."""
    path: str
    """Of the environment; empty: of all."""
    event: str
    handler: str = ""
    when: str | None = None
    below: bool = False
    durable: bool = False


class Look(BaseModel):
    """To a worker: what does one of a shard's agents hold? Without a shard: what is there?"""

    shard: str = ""
    index: int = 0


class Looked(BaseModel):
    """What one agent or environment holds."""

    name: str
    class_name: str
    round: int = 0
    attributes: list[Attribute] = Field(default_factory=list)
    memory: list[dict[str, str]] = Field(default_factory=list)
    """Messages, oldest first; of a long memory the latest."""
    memory_left_out: int = 0
    """How many older ones there are."""
    persona: dict[str, Any] | None = None
    text: str | None = None
    """The persona in words."""
    under_way: list[str] = Field(default_factory=list)
    """Methods that it is at work on."""
    waiting: int = 0
    """Calls that wait for it."""
    about: dict[str, Any] | None = None
    """Of an environment: what it says of itself, see ``Environment.describe``."""
    view: dict[str, Any] | None = None
    """Of an environment: how to show it, see ``Environment.view``."""


class Held(BaseModel):
    """What a worker holds."""

    worker: str
    pid: int = 0
    agents: int = 0
    calls: int = 0
    waiting: int = 0
    rss: int = 0
    cpu: float = 0.0
    listens: list[Listens] = Field(default_factory=list)
    listens_left_out: int = 0


class Inspect(BaseModel):
    """To a run's owner: an agent, an environment, or, if neither is named, the whole."""

    agent: str | None = None
    environment: str | None = None
    workers: bool = True
    """Whether each worker is asked what it holds, and who listens."""


class PopulationSeen(BaseModel):
    """A population, and where it lives."""

    name: str
    class_name: str
    count: int
    people: str | None = None
    workers: dict[str, int] = Field(default_factory=dict)
    """Worker to how many of its agents live there."""


class EnvironmentSeen(BaseModel):
    """An environment, and where it lives."""

    path: str
    class_name: str
    worker: str
    moved: int = 0
    """How often another process took it over."""


class WorkerSeen(BaseModel):
    """A worker of a run."""

    worker: str
    host: str
    holds: str = "agents"
    """Or ``environments``."""
    held: Held | None = None
    """None: it did not answer in time."""


class Inspected(BaseModel):
    """What the owner of a run says."""

    run: str
    round: int
    life: int
    where: str = ""
    """Of an agent or environment: worker and host."""
    one: Looked | None = None
    populations: list[PopulationSeen] = Field(default_factory=list)
    environments: list[EnvironmentSeen] = Field(default_factory=list)
    workers: list[WorkerSeen] = Field(default_factory=list)
    listens: list[Listens] = Field(default_factory=list)
    listens_left_out: int = 0
