"""A rumour spreads; an intervention may come in the middle."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import networkx as nx
from agents import Gossip, Person
from pydantic import BaseModel, ConfigDict, Field

from populace import Scenario, ScenarioError, each
from populace.report import Reference, ReportSpec, Variable
from shared.messages.scenario import PlannedEvent


class Params(BaseModel):
    """What a scenario file may set."""

    model_config = ConfigDict(extra="forbid")

    rumour: str = "The water in the north of the town is not safe to drink."
    first: int = Field(default=1, ge=1)
    """People who know it at the start."""
    graph: Literal["complete", "small_world"] = "complete"
    neighbours: int = Field(default=6, ge=2)
    people: Literal["llm", "gossip"] = "llm"


class Rumour(Scenario):
    """In each round every spreader tells one person it knows; who knew it already bores it.

    The event ``correction`` (``{"text": ..., "share": part of all who hear it}``) is an
    intervention.
    """

    Params = Params

    async def setup(self) -> None:
        """Draw who knows whom, and tell the first."""
        params = self.params
        if self.agents < 2:
            raise ScenarioError("agents.count: a rumour needs two people")
        if params.first > self.agents:
            raise ScenarioError(f"params.first: there are {self.agents} people")
        cls = Person if params.people == "llm" else Gossip
        self.people = await self.population(cls, name="people")
        self.known: list[list[int]] = []
        if params.graph == "small_world":
            if self.agents <= params.neighbours:
                raise ScenarioError(
                    f"params.neighbours: {self.agents} people can't have {params.neighbours} each"
                )
            made = nx.connected_watts_strogatz_graph(
                self.agents, params.neighbours, 0.1, seed=self.seed
            )
            self.known = [sorted(made.neighbors(i)) for i in range(self.agents)]
        first = self.random.sample(range(self.agents), params.first)
        await self.people.only(first).start(params.rumour)
        self.texts = dict.fromkeys(first, params.rumour)
        """What each spreader says."""

    async def injected(self, event: PlannedEvent) -> None:
        """Take a correction; everything else as usual."""
        if event.name != "correction":
            await super().injected(event)
            return
        share, text = event.data.get("share", 1.0), event.data.get("text")
        if not isinstance(text, str) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ScenarioError("a correction needs a text, and a share from 0 to 1")
        hearing = self.people.sample(round(share * self.agents), self.random)
        await hearing.options(record=False).correct(text)
        await self._look()

    async def round(self, n: int) -> None:
        """Spreaders talk."""
        told: dict[int, int] = {}
        """Who is told, by whom: one listens to one person at a time, the others find it busy."""
        bored = []
        spreaders = self.random.sample(sorted(self.texts), len(self.texts))
        for spreader in spreaders:
            whom = self._someone(spreader)
            if whom in told:
                bored.append(spreader)
            else:
                told[whom] = spreader
        hearing = self.people.only(told).options(record=False)
        texts = [self.texts[told[whom]] for whom in hearing.numbers]
        heard = await hearing.hear(each(texts))
        bored += [
            told[whom]
            for place, whom in enumerate(hearing.numbers)
            if place not in heard.errors and heard.values[place] is False
        ]
        await self.people.only(bored).options(record=False).bored()
        counts = await self._look(record=True)
        self.record(
            **{f"{state}s": counts[state] for state in ("ignorant", "spreader", "stifler")},
            knows=1 - counts["ignorant"] / self.agents,
            failed_talks=len(heard.errors),
        )

    def _someone(self, spreader: int) -> int:
        if self.known:
            return self.random.choice(self.known[spreader])
        whom = self.random.randrange(self.agents - 1)
        return whom + (whom >= spreader)

    async def _look(self, *, record: bool = False) -> Counter[str]:
        """See who is what, and what spreaders say."""
        answers = await self.people.options(record=record).told()
        self.texts = {
            number: value["text"]
            for number, value in enumerate(answers.values)
            if value is not None and value["state"] == "spreader"
        }
        return Counter(value["state"] for value in answers.values if value is not None)

    def report(self) -> ReportSpec:
        """Who knows it, round by round."""
        references = []
        if self.params.people == "gossip" and self.params.graph == "complete":
            references.append(
                Reference(
                    label="in the end (if nobody intervenes)",
                    value=0.797,
                    kind="theory",
                    source="Maki and Thompson's model: 0.203 never hear it (Sudbury 1985)",
                    round=self.rounds,
                )
            )
        return ReportSpec(
            about=f'The rumour "{self.params.rumour}" on a {self.params.graph.replace("_", " ")}.',
            variables=[
                Variable(
                    name="state",
                    label="who is what, all rounds",
                    field="state",
                    kind="category",
                    categories=["ignorant", "spreader", "stifler"],
                ),
                Variable(
                    name="knows",
                    label="part that knows it",
                    field="knows",
                    low=0,
                    high=1,
                    references=references,
                ),
                Variable(name="text", label="how it is told", field="text", kind="text"),
            ],
            lines=["ignorants", "spreaders", "stiflers"],
        )
