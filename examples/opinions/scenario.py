"""Opinions on a social graph: neighbours meet in pairs, round by round."""

from __future__ import annotations

from typing import Any, Literal

import networkx as nx
from agents import Bounded, Person
from pydantic import BaseModel, ConfigDict, Field

from populace import Scenario, ScenarioError, each
from populace.report import Reference, ReportSpec, Variable
from shared.messages.scenario import PlannedEvent


class Params(BaseModel):
    """What a scenario file may set."""

    model_config = ConfigDict(extra="forbid")

    people: Literal["llm", "bounded"] = "llm"
    graph: Literal["small_world", "complete"] = "small_world"
    neighbours: int = Field(default=6, ge=2)
    """Of each, in a small world."""
    confidence: float = Field(default=20.0, gt=0, le=100)
    """Of ``bounded`` people: how far away an opinion may be to count."""
    mu: float = Field(default=0.5, gt=0, le=0.5)


class Opinions(Scenario):
    """In each round as many disjoint pairs of neighbours meet as can be found by chance."""

    Params = Params

    async def setup(self) -> None:
        """Draw opinions, and who knows whom."""
        params = self.params
        if params.graph == "small_world" and self.agents <= params.neighbours:
            raise ScenarioError(
                f"params.neighbours: {self.agents} people can't have {params.neighbours} each"
            )
        opinions = [self.random.uniform(0, 100) for _ in range(self.agents)]
        if params.people == "llm":
            self.people = await self.population(Person, each(opinions), name="people")
        else:
            self.people = await self.population(
                Bounded, each(opinions), params.confidence, params.mu, name="people"
            )
        self.edges: list[list[int]] = []
        if params.graph == "small_world":
            made = nx.connected_watts_strogatz_graph(
                self.agents, params.neighbours, 0.1, seed=self.seed
            )
            self.edges = [list(edge) for edge in made.edges]

    async def injected(self, event: PlannedEvent) -> None:
        """Nothing can be changed while it is played: its parameters belong to its people."""
        raise ScenarioError(f"this scenario takes no events, nor {event.name!r}")

    async def round(self, n: int) -> None:
        """Have pairs meet, then see where all stand."""
        pairs = self._pairs()
        meeting = self.people.only(first for first, _ in pairs).options(record=False)
        partners = [f"people/{second}" for _, second in sorted(pairs)]
        talks = await meeting.meet(each(partners))
        stands: list[float] = list((await self.people.stand()).values)
        self.record(
            meetings=len(pairs) - len(talks.errors),
            failed_meetings=len(talks.errors),
            mean=sum(stands) / len(stands),
            **_shape(stands),
        )

    def _pairs(self) -> list[tuple[int, int]]:
        """Pairs of neighbours in which nobody stands twice."""
        if self.params.graph == "complete":
            order = self.random.sample(range(self.agents), self.agents)
            return list(zip(order[::2], order[1::2], strict=False))
        free = set(range(self.agents))
        pairs = []
        for a, b in self.random.sample(self.edges, len(self.edges)):
            if a in free and b in free:
                free -= {a, b}
                pairs.append((a, b))
        return pairs

    def report(self) -> ReportSpec:
        """Where people stand, round by round."""
        rule = self.params.people == "bounded"
        told = (
            f"Nobody asks a model: people move toward opinions less than "
            f"{self.params.confidence:g} away."
            if rule
            else "People tell one another what they think, and think again."
        )
        references = []
        if rule and self.params.confidence >= 50 and self.params.graph == "complete":
            references.append(
                Reference(
                    label="consensus in the middle",
                    value=50,
                    kind="theory",
                    source="Deffuant et al. 2000: one cluster from half the scale on",
                )
            )
        return ReportSpec(
            about=f"Opinions from 0 to 100 on a {self.params.graph.replace('_', ' ')}. {told}",
            variables=[
                Variable(
                    name="opinion",
                    label="agreement with the claim",
                    method="stand",
                    low=0,
                    high=100,
                    references=references,
                )
            ],
            lines=["mean", "spread", "clusters"],
        )


def _shape(stands: list[float]) -> dict[str, Any]:
    """Standard deviation, and clusters: groups of ten people or more, 5 or more apart."""
    ordered = sorted(stands)
    mean = sum(ordered) / len(ordered)
    spread = (sum((s - mean) ** 2 for s in ordered) / len(ordered)) ** 0.5
    sizes, last = [0], ordered[0]
    for stand in ordered:
        if stand - last > 5:
            sizes.append(0)
        sizes[-1] += 1
        last = stand
    return {"spread": spread, "clusters": sum(size >= min(10, len(stands) / 10) for size in sizes)}
