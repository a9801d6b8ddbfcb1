"""A questionnaire put to a population."""

from __future__ import annotations

from typing import Literal

from agents import RandomRespondent, Respondent
from pydantic import BaseModel, ConfigDict, Field, model_validator
from questionnaire import Question

from populace import Scenario
from populace.report import ReportSpec


class Params(BaseModel):
    """What a scenario file may set."""

    model_config = ConfigDict(extra="forbid")

    questions: list[Question] = Field(min_length=1)
    respondents: Literal["llm", "random"] = "llm"

    @model_validator(mode="after")
    def _each_once(self) -> Params:
        names = [question.name for question in self.questions]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"two questions are named {twice[0]}")
        return self


class Survey(Scenario):
    """Each round puts the whole questionnaire to everyone."""

    Params = Params

    async def setup(self) -> None:
        """Find the people."""
        cls = Respondent if self.params.respondents == "llm" else RandomRespondent
        self.people = await self.population(cls, name="people")

    async def round(self, n: int) -> None:
        """Ask."""
        questions = [question.model_dump() for question in self.params.questions]
        answers = await self.people.fill_in(questions).reduce("mean")
        self.record(questionnaires=answers.count)

    def report(self) -> ReportSpec:
        """Each question as it was asked."""
        return ReportSpec(
            about=f"A questionnaire of {len(self.params.questions)} questions.",
            variables=[question.variable for question in self.params.questions],
        )
