"""Requests to the persona services, and what is known of a population that is being written."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, field_validator

from shared.ids import is_token
from shared.messages.scenario import ModelSpec, Strict


def _named(value: str) -> str:
    if not is_token(value):
        raise ValueError("must be 1 to 64 characters of A-Z, a-z, 0-9, '_' and '-'")
    return value


PopulationName = Annotated[str, AfterValidator(_named)]


class PeopleRequest(Strict):
    """Which people are meant: one of three ways to say it."""

    people: str | None = None
    """A stored population or a template by name, or the path of a population file or of rows."""
    population: dict[str, Any] | None = None
    """What a population file would hold."""
    rows: list[dict[str, Any]] | None = None
    """The people themselves."""
    size: int | None = Field(default=None, ge=1, le=100_000_000)
    """Number of people, instead of the population's own."""
    seed: int | None = None
    """What the draws follow from, instead of the population's own."""

    def given(self) -> str | None:
        """What is wrong with it, if anything is."""
        count = sum(x is not None for x in (self.people, self.population, self.rows))
        return None if count == 1 else "give one of people, population and rows"


class SampleRequest(PeopleRequest):
    """Draw people. Without ``store`` they are in the answer, which one message must hold."""

    start: int = Field(default=0, ge=0)
    stop: int | None = None
    """The people from ``start`` up to, and without, ``stop``; default: all."""
    store: str | None = None
    """Keep all of them under this name, and answer without rows."""


class Sampled(BaseModel):
    """People that were drawn."""

    count: int
    rows: list[dict[str, Any]] | None = None
    file: str | None = None
    """Where they were stored."""
    fit: dict[str, Any] | None = None
    """The fit report, if all people of a population were drawn."""


class FitRequest(Strict):
    """Compare people with what a population asks for."""

    population: str | dict[str, Any]
    """A population: name or path of its file, or what the file would hold."""
    people: str | list[dict[str, Any]]
    """A stored population by name, the path of its rows, or the rows."""


class FitReply(BaseModel):
    """The fit report (see ``populace.personas.fit``)."""

    fit: dict[str, Any]


class EnrichRequest(PeopleRequest):
    """Have a model write the people, and store them under a name."""

    name: PopulationName
    """Under which the population is stored; equal names mean the same work."""
    model: ModelSpec = ModelSpec()
    language: str = "en"
    """Of the template that comes with Populace."""
    template: dict[str, Any] | None = None
    """What a template file would hold, instead."""
    names: str | None = None
    """A locale of faker, such as "de_DE", from which everyone gets a name."""
    temperature: tuple[float, float] = (0.7, 1.1)
    """Lowest and highest; each request draws its own."""
    attempts: int = Field(default=4, ge=1, le=20)
    """Versions of a person that may be asked for."""
    judge: bool = False
    """Whether the model is also asked if a text contradicts its row."""
    alike: float | None = Field(default=0.8, gt=0, le=1)
    """Similarity from which two texts count as nearly the same (then one is written anew); None:
    any may be alike."""
    turns: int = Field(default=2, ge=0, le=10)
    """Times that those alike are written anew."""
    again: bool = False
    """Whether people of that name that were written before are written anew."""

    @field_validator("temperature")
    @classmethod
    def _range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] <= value[1] <= 5:
            raise ValueError("must be two numbers from 0 to 5, the lower one first")
        return value


JobState = Literal["checking", "writing", "finished", "failed", "cancelled"]


class JobInfo(BaseModel):
    """How far the writing of a population is."""

    name: str
    state: JobState = "writing"
    reason: str = ""
    """Why it failed: one sentence."""
    total: int = 0
    """People in the population."""
    to_write: int = 0
    """Those that had no text when this work began."""
    written: int = 0
    failed: int = 0
    """Those for whom no version could be used."""
    rewritten: int = 0
    """Versions that were thrown away, since they contradicted their rows or could not be read."""
    anew: int = 0
    """People written anew since they were nearly the same as another."""
    alike: int = 0
    """People who still are."""
    requests: int = 0
    """To the model."""
    tokens_in: int = 0
    tokens_out: int = 0
    backend: str = ""
    """What the model service calls the model."""
    examples: list[str] = Field(default_factory=list)
    """A few failures."""
    file: str | None = None
    created: float = Field(default_factory=time.time)
    """Unix time, seconds."""
    updated: float = Field(default_factory=time.time)

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state not in ("checking", "writing")


class JobRecord(BaseModel):
    """What the bucket of persona jobs keeps under a population's name."""

    request: EnrichRequest
    info: JobInfo
    generation: str = ""
    """Names this work apart from earlier work of the same name."""
    owner: str = ""
    """The service that sees to it at present; another takes over when it is gone."""
    rows_apart: bool = False
    """Whether the request's rows are in an entry of their own, ``<name>.rows``."""
    categories: dict[str, list[str]] = Field(default_factory=dict)
    """The population's categories by attribute, for the check of texts against rows."""


class JobRequest(Strict):
    """Ask of, or stop, the writing of a population."""

    name: PopulationName
    action: Literal["status", "cancel"] = "status"
