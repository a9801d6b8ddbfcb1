"""The public-goods game in groups, with and without punishment."""

from __future__ import annotations

from typing import Literal

from agents import ENDOWMENT, HARM, RETURN, Member, Reciprocal
from project import Project
from pydantic import BaseModel, ConfigDict, Field

from populace import Scenario, ScenarioError, each
from populace.report import Reference, ReportSpec, Share, Variable
from shared.messages.scenario import PlannedEvent

_SOURCE = (
    "Fehr and Gaechter 2000, American Economic Review 90, groups that stay together, mean of ten "
    "periods; points cost otherwise there"
)


class Params(BaseModel):
    """What a scenario file may set."""

    model_config = ConfigDict(extra="forbid")

    size: int = Field(default=4, ge=3, le=20)
    """Members of a group; of two, a token in the project would give both less than it cost."""
    punishment: bool = True
    members: Literal["llm", "reciprocal"] = "llm"


class PublicGoods(Scenario):
    """Each round is a period; groups stay together."""

    Params = Params

    async def setup(self) -> None:
        """Make the groups; with a remainder, the first ones have a member more."""
        groups = self.agents // self.params.size
        if not groups:
            raise ScenarioError(f"agents.count: a group needs {self.params.size} agents")
        paths: list[str] = []
        sizes: list[int] = []
        for i in range(groups):
            size = self.agents // groups + (i < self.agents % groups)
            project = await self.environment(
                Project, f"group{i + 1}", size, ENDOWMENT, RETURN, HARM
            )
            paths += [project.path] * size
            sizes += [size] * size
        cls = Member if self.params.members == "llm" else Reciprocal
        self.members = await self.population(
            cls, each(paths), each(sizes), self.params.punishment, name="members"
        )

    async def injected(self, event: PlannedEvent) -> None:
        """Nothing can be changed while it is played: its parameters belong to its groups."""
        raise ScenarioError(f"this game takes no events, nor {event.name!r}")

    async def round(self, n: int) -> None:
        """Play a period."""
        answers = await self.members.period()
        good = [v for v in answers.values if v is not None]
        if not good:
            raise ScenarioError(f"nobody decided anything in round {n}")
        self.record(
            paid=sum(v["paid"] for v in good) / len(good),
            points=sum(v["points"] for v in good) / len(good),
            income=sum(v["income"] for v in good) / len(good),
        )

    def report(self) -> ReportSpec:
        """Payments, beside those of people."""
        part = 0.85 if self.params.punishment else 0.38
        people = [
            Reference(
                label=f"people, {'with' if self.params.punishment else 'without'} punishment",
                value=part * ENDOWMENT,
                kind="human",
                source=_SOURCE,
                round=n,
            )
            for n in range(1, min(self.rounds, 10) + 1)
        ]
        usual = self.params.size == 4 and self.agents % 4 == 0
        nobody = Reference(
            label="equilibrium",
            value=0,
            kind="theory",
            source="whoever cares for its own tokens alone pays nothing",
        )
        return ReportSpec(
            about=(
                f"Public-goods game in groups of {self.params.size}, "
                f"{'with' if self.params.punishment else 'without'} punishment; "
                f"{ENDOWMENT} tokens, each of which gives {RETURN:g} to all."
            ),
            variables=[
                Variable(
                    name="paid",
                    label="tokens paid in",
                    field="paid",
                    low=0,
                    high=ENDOWMENT,
                    shares=[
                        Share(label="nothing", low=0, high=0),
                        Share(label="everything", low=ENDOWMENT, high=ENDOWMENT),
                    ],
                    references=[*(people if usual else []), nobody],
                ),
                Variable(name="income", label="income of a period", field="income"),
            ],
            lines=["paid", "points", "income"],
        )
