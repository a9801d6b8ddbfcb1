"""People who are asked, and one who answers at random, to compare with."""

from __future__ import annotations

from typing import Any

from questionnaire import Question

from populace import Agent, Failure, ModelFailure

INTRODUCTION = "You take part in a survey. Answer as the person you are, honestly and briefly."


class Respondent(Agent):
    """Answers a questionnaire, question by question, and remembers what it has said."""

    async def fill_in(self, questions: list[dict[str, Any]]) -> dict[str, Any]:
        """Answer all questions that apply.

        Returns:
            The answers by the questions' names; None for what was asked and not answered, nothing
            for what was not asked.

        Raises:
            Failure: ``no_answer``: not one question was answered.
        """
        answers: dict[str, Any] = {}
        first = ""
        for fields in questions:
            question = Question.model_validate(fields)
            if not question.asked_after(answers):
                continue
            try:
                answers[question.name] = await self._answer(question)
            except ModelFailure as failure:
                first = first or str(failure)
                answers[question.name] = None
        if all(value is None for value in answers.values()):
            raise Failure("no_answer", first or "no question was asked")
        return answers

    async def _answer(self, question: Question) -> Any:
        found = await self.model.ask(
            question.wording, system=INTRODUCTION, returns=question.schema, remember=True
        )
        return found["answer"]


class RandomRespondent(Respondent):
    """Picks any answer that is allowed: what a survey of nobody looks like."""

    async def _answer(self, question: Question) -> Any:
        if question.kind == "choice":
            return self.random.choice(question.options)
        if question.kind == "scale":
            return self.random.randint(int(question.low), int(question.high))
        if question.kind == "number":
            return self.random.uniform(question.low, question.high)
        return "(nothing)"
