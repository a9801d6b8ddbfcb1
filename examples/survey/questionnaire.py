"""Questionnaires: what is asked, of what kind, and on which earlier answers it depends."""

from __future__ import annotations

import ast
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from simpleeval import SimpleEval

from populace.report import Variable


class Question(BaseModel):
    """One question."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z_]\w*$")
    text: str
    kind: Literal["choice", "scale", "number", "text"] = "choice"
    options: list[str] = Field(default_factory=list)
    """Of a choice."""
    low: float = 1
    high: float = 7
    """Ends of a scale (whole numbers) or a number."""
    _depends_on: frozenset[str] = PrivateAttr(default=frozenset())
    when: str | None = None
    """Asked only if this holds of the answers so far, such as ``trust == 'no' and age > 3``."""

    @model_validator(mode="after")
    def _complete(self) -> Question:
        if self.kind == "choice" and len(self.options) < 2:
            raise ValueError(f"{self.name}: a choice needs options")
        if self.low >= self.high:
            raise ValueError(f"{self.name}: low must be below high")
        if self.when is not None:
            try:
                parsed = ast.parse(self.when, mode="eval")
            except SyntaxError:
                raise ValueError(
                    f"{self.name}: when: {self.when!r} is no condition, such as trust == 'no'"
                ) from None
            names = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
            self._depends_on = frozenset(names)
        return self

    def asked_after(self, answers: dict[str, Any]) -> bool:
        """Whether it is asked of somebody who has given these answers."""
        if self.when is None:
            return True
        if any(answers.get(name) is None for name in self._depends_on):
            return False  # it depends on something that was not asked, or not answered
        try:
            return bool(SimpleEval(functions={}, names=answers).eval(self.when))
        except Exception:  # a comparison of a number with a word, say
            return False

    @property
    def schema(self) -> dict[str, Any]:
        """What an answer must fit."""
        value: dict[str, Any]
        if self.kind == "choice":
            value = {"type": "string", "enum": self.options}
        elif self.kind == "scale":
            value = {"type": "integer", "minimum": int(self.low), "maximum": int(self.high)}
        elif self.kind == "number":
            value = {"type": "number", "minimum": self.low, "maximum": self.high}
        else:
            value = {"type": "string", "minLength": 1, "maxLength": 600}
        return {
            "type": "object",
            "properties": {"answer": value},
            "required": ["answer"],
            "additionalProperties": False,
        }

    @property
    def wording(self) -> str:
        """The question with what may be answered."""
        if self.kind == "choice":
            return f"{self.text} Choose one of: {', '.join(self.options)}."
        if self.kind == "scale":
            return f"{self.text} Answer with a whole number from {self.low:g} to {self.high:g}."
        if self.kind == "number":
            return f"{self.text} Answer with a number from {self.low:g} to {self.high:g}."
        return f"{self.text} Answer in one or two sentences."

    @property
    def variable(self) -> Variable:
        """What the report shows of it."""
        numeric = self.kind in ("scale", "number")
        return Variable(
            name=self.name,
            label=self.text,
            field=self.name,
            kind="number" if numeric else "category" if self.kind == "choice" else "text",
            categories=self.options,
            low=self.low if numeric else None,
            high=self.high if numeric else None,
        )
