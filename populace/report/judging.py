"""A run in which a model judges the answers of another: do they contradict who gave them?"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from populace.agent import Agent
from populace.answers import each
from populace.errors import ScenarioError
from populace.personas.people import told
from populace.recorded import RecordedRun
from populace.scenario import Scenario
from shared.errors import InvalidInputError

_LONGEST = 2000
_RUBRIC = (
    "You check role play. You are shown a person's attributes, and what somebody said who was told "
    "to answer as that person. Does the answer contradict the person? It does if such a person "
    "could hardly have said it: words, knowledge or reckoning far beyond or below their age and "
    "schooling, another occupation, age or sex than theirs, or the speaker saying that it is an "
    "AI. A plain number, or an answer that many kinds of people could give, contradicts nobody."
)


class Verdict(BaseModel):
    """What a judge says."""

    model_config = ConfigDict(extra="forbid")

    reason: str
    """One sentence."""
    contradicts: bool


def judgeable(run: RecordedRun) -> int:
    """How many answers of a run can be judged: those with words, of agents with personas.

    Raises:
        InvalidInputError: none can be.
    """
    found = len(_items(run))
    if not found:
        raise InvalidInputError(
            f"nothing of {run.run!r} can be judged: its agents have no personas, or said nothing"
        )
    return found


def _items(run: RecordedRun) -> list[dict[str, Any]]:
    from populace.report.data import persona_columns

    table = run.to_arrow()
    personas = persona_columns(table)
    if not personas:
        return []
    found = []
    for row in table.to_pylist():
        text = _words(row["answer"]) or (row["message"] if row["error"] else None)
        person = told({name: row[name] for name in personas})
        if text and person:
            found.append(
                {
                    "agent": f"{row['population']}/{row['agent']}",
                    "round": row["round"],
                    "persona": person,
                    "answer": text[:_LONGEST],
                }
            )
    return found


def _words(answer: str | None) -> str | None:
    """What an agent said: an answer that is a text, or its part ``text``, or all of it."""
    if answer is None or answer[:1] != "{":
        return answer
    try:
        held = json.loads(answer)
    except ValueError:
        return answer  # words that begin like an object
    text = held.get("text")
    return text if isinstance(text, str) and text else answer


class Judge(Agent):
    """Judges one answer.

    Args:
        item: agent, round, persona, answer.
    """

    def __init__(self, item: dict[str, Any]) -> None:
        self.item = item

    async def judge(self) -> dict[str, Any]:
        """Say whether the answer contradicts the persona; returns the item with the verdict."""
        asked = f"Person: {self.item['persona']}\n---\n{self.item['answer']}\n---"
        verdict = await self.model.ask(asked, system=_RUBRIC, returns=Verdict)
        return {**self.item, "contradicts": verdict.contradicts, "reason": verdict.reason}


class Params(BaseModel):
    """Whose answers are judged."""

    model_config = ConfigDict(extra="forbid")

    run: str
    folder: str


class Judging(Scenario):
    """One round: every judge judges one answer; which ones follows from the seed."""

    Params = Params

    async def setup(self) -> None:
        """Draw the answers."""
        try:
            items = _items(RecordedRun(Path(self.params.folder)))
        except InvalidInputError as error:
            raise ScenarioError(str(error)) from None
        if len(items) < self.agents:
            raise ScenarioError(f"{self.params.run} holds only {len(items)} answers to be judged")
        draw = random.Random(f"judging/{self.seed}")  # noqa: S311 - reproducible on purpose
        chosen = [items[i] for i in sorted(draw.sample(range(len(items)), self.agents))]
        self.judges = await self.population(Judge, each(chosen), name="judges")

    async def round(self, n: int) -> None:
        """Have them judged."""
        found = await self.judges.judge()
        out = sum(1 for verdict in found.values if verdict and verdict["contradicts"])
        self.record(judged=self.agents - len(found.errors), contradict=out)
