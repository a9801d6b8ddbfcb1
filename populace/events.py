"""Events of environments, as listeners get them, and what chooses among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from simpleeval import EvalWithCompoundTypes, InvalidExpression

from shared.errors import InvalidInputError

ANY = "*"
"""Stands for every event's name."""


@dataclass(slots=True)
class Event:
    """Something that happened in an environment; ``event["winning"]`` is an argument of it."""

    name: str
    path: str
    """The environment in which it happened."""
    round: int
    number: int
    """Which event of this environment it is, from 1."""
    arguments: dict[str, Any]
    value: Any
    """What the method returned."""
    by: str
    """Name of the agent whose call led to it; empty if the scenario's did."""
    storm: list[str] = field(default_factory=list, repr=False)
    """The events of which each led to the next, this one last."""
    run: str = ""
    life: int = 1
    """Which life of the run told it: a round that is played again tells its events again."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @classmethod
    def from_plain(cls, told: dict[str, Any]) -> Event:
        """The event that a message holds."""
        return cls(**told)


class Condition:
    """A condition on events, such as ``new > 3 and by != "voter/1"``.

    Names are the event's arguments, ``value``, ``round``, ``by``, ``path`` and ``name``. The
    expression is evaluated by simpleeval, which knows no attributes of Python's objects.

    Raises:
        InvalidInputError: it isn't an expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._evaluator = EvalWithCompoundTypes()
        try:
            self._parsed = self._evaluator.parse(text)
        except (SyntaxError, InvalidExpression) as error:
            raise InvalidInputError(f"the condition {text!r} can't be read: {error}") from None

    def holds(self, told: dict[str, Any]) -> bool:
        """Whether it holds for an event.

        Raises:
            InvalidInputError: it names something that the event doesn't have, say.
        """
        self._evaluator.names = {
            "value": told["value"],
            "round": told["round"],
            "by": told["by"],
            "path": told["path"],
            "name": told["name"],
            **told["arguments"],
        }
        try:
            return bool(self._evaluator.eval(self.text, previously_parsed=self._parsed))
        except Exception as error:  # whatever an expression can do wrong
            raise InvalidInputError(
                f"the condition {self.text!r} can't be evaluated for the event {told['name']!r}: "
                f"{error}"
            ) from None


def matches(told_name: str, told_path: str, name: str, path: str, *, below: bool) -> bool:
    """Whether an event is of this name, and of this environment (or of one below it)."""
    if name not in (ANY, told_name):
        return False
    return told_path == path or (below and (not path or told_path.startswith(f"{path}.")))
