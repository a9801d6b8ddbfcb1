"""One player of the game, who asks a language model."""

from __future__ import annotations

import re
from math import inf
from typing import Any

import prompts

from populace import Agent, Failure
from populace.parsing import find_number

_NUMBER = re.compile(r"(?<![\w.,/])-?\d+(?:\.\d+)?(?![\w%]|[.,]\d|/\d)")
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"number": {"type": ["number", "null"]}},
    "required": ["number"],
    "additionalProperties": False,
}


def numbers_in(text: str) -> list[float]:
    """All numbers that a text holds, in their order, each once."""
    return list(dict.fromkeys(float(found) for found in _NUMBER.findall(text)))


class Player(Agent):
    """Picks a number by asking its model, and remembers what was announced.

    Args:
        low: smallest number that may be picked.
        high: largest.
        group: path of its group's environment; empty if there are no groups.
        uses: which of the run's models it asks.
        expert: whether it is the only expert; None: nobody speaks of experts.
    """

    def __init__(
        self,
        low: float,
        high: float,
        group: str = "",
        uses: str = "default",
        expert: bool | None = None,
    ) -> None:
        self.low = low
        self.high = high
        self.group = group
        self.uses = uses
        self.expert = expert
        self.picked: float | None = None
        """The last pick; None if it could not be read."""

    def attribute(self, name: str) -> str:
        """What the player's persona says of something."""
        return str(self.persona[name]) if self.persona is not None else ""

    async def guess(self, rules: str, question: str, news: str | None) -> dict[str, Any]:
        """Pick a number.

        Returns:
            ``{"number": the pick, "text": what the model said}``.

        Raises:
            Failure: ``unparsable``, ``out_of_range``, or the model's own failure.
        """
        self.picked = None
        if self.group:
            return await self._guess_in_group(rules, question)
        if news is not None:
            self.memory.add_user(news)
        return await self._pick(rules, question)

    def nearness(self, winning: float, near: float) -> str:
        """The player's model, if its last pick was near the winning number; else nothing."""
        won = self.picked is not None and abs(self.picked - winning) <= near
        return self.model.name(self.uses) if won else ""

    async def _guess_in_group(self, rules: str, question: str) -> dict[str, Any]:
        """The same, with news from the group, and the pick reported to it."""
        group = self.environment(self.group)
        news = await group.latest()
        if news is not None:
            self.memory.add_user(news)
        picked: float | None = None
        try:
            answer = await self._pick(rules, question)
            picked = answer["number"]
        finally:  # a failure is reported as well, or the others would wait for ever
            await group.report(picked)
        return answer

    async def _pick(self, rules: str, question: str) -> dict[str, Any]:
        role = prompts.role(self.expert)
        asked = f"{role} {question}" if role else question
        text = await self.model.ask(asked, system=rules, model=self.uses)
        number = await self._read_number(text)
        if number is None:
            raise Failure("unparsable", text)
        if not self.low <= number <= self.high:
            raise Failure("out_of_range", text)
        self.picked = number
        return {"number": number, "text": text}

    async def _read_number(self, text: str) -> float | None:
        """The number that a free answer settles on, or None."""
        number = find_number(text, -inf, inf)
        if number is not None:
            return number
        found = numbers_in(text)
        if not found:
            return None
        # Not said plainly: a model tells which is meant; it may only point at one that is there.
        answer = await self.model.ask(
            prompts.extraction(text),
            returns=_SCHEMA,
            model=self.uses,
            memory=False,
            temperature=0.0,
            max_tokens=24,
        )
        meant = answer["number"]
        return float(meant) if meant is not None and float(meant) in found else None
