"""Writing one persona: ask, check against the row, ask again, a bounded number of times."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from populace.personas.writing.checks import contradictions, flaw
from populace.personas.writing.names import Names, gender_of
from populace.personas.writing.template import WritingTemplate
from shared.messages.model import ModelRequest, ModelResponse
from shared.messages.scenario import ModelSpec

Ask = Callable[[ModelRequest], Awaitable[ModelResponse]]

_DRAFT = {
    "type": "object",
    "properties": {"background": {"type": "string", "minLength": 40, "maxLength": 600}},
    "required": ["background"],
    "additionalProperties": False,
}
_VERDICT = {
    "type": "object",
    "properties": {
        "contradicts": {"type": "boolean"},
        "what": {"type": "string", "maxLength": 200},
    },
    "required": ["contradicts", "what"],
    "additionalProperties": False,
}
_TOKENS = 400
_FREER = 0.05
_SHOWN = 160


@dataclass(slots=True)
class Written:
    """What became of one row."""

    row: int
    values: dict[str, Any]
    """The row's attributes, the name included."""
    text: str | None = None
    """The persona for a prompt: facts and background; None if none could be written."""
    background: str = ""
    """The part that the model wrote."""
    problem: str = ""
    """Why there is no text."""
    rewrites: int = 0
    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    notes: list[str] = field(default_factory=list)
    """What was wrong with earlier versions."""

    def as_dict(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)


class Writer:
    """Writes the people of one population.

    Args:
        template: what the model is told.
        ask: sends a request to the model and gives its response.
        model: how the model is asked, temperature excepted.
        seed: what names, temperatures and the model's draws follow from, with the row's number.
        temperature: lowest and highest; each request draws its own.
        attempts: versions that may be asked for, the first included.
        judge: whether the model is also asked if a text contradicts its row.
        names: draws names; None: nobody gets one.
        categories: the population's categories by attribute, for the check.
    """

    def __init__(
        self,
        template: WritingTemplate,
        ask: Ask,
        *,
        model: ModelSpec,
        seed: int = 0,
        temperature: tuple[float, float] = (0.7, 1.1),
        attempts: int = 4,
        judge: bool = False,
        names: Names | None = None,
        categories: Mapping[str, list[str]] | None = None,
    ) -> None:
        self._template = template
        self._ask = ask
        self._model = model
        self._seed = seed
        self._temperature = temperature
        self._attempts = attempts
        self._judge = judge
        self._names = names
        self._categories = dict(categories or {})
        self._numbers = 0

    async def write(
        self, row: int, values: Mapping[str, Any], *, turn: int = 0, unlike: str | None = None
    ) -> Written:
        """Write one person.

        Args:
            row: the person's number within the population.
            values: the person's attributes.
            turn: 0, and one more each time that the person is written anew.
            unlike: another person's background, to which the last version was too similar.
        """
        written = Written(row, dict(values))
        if self._names is not None and "name" not in written.values:
            name = self._names.name(row, gender_of(values))
            written.values = {"name": name, **written.values}
        template = self._template
        facts = template.told(written.values)
        angle = template.angles[self._draw(row, turn, "angle") % len(template.angles)]
        last = ""
        problem = template.fill("different", other=unlike[:_SHOWN]) if unlike else ""
        for attempt in range(self._attempts):
            if problem:
                prompt = template.fill(
                    "again", facts=facts, angle=angle, text=last or "-", problem=problem
                )
            else:
                prompt = template.fill("draft", facts=facts, angle=angle)
            response = await self._request(written, turn, attempt, prompt, _DRAFT)
            if response.error_kind == "schema":
                problem, last = response.error, ""
                written.notes.append(problem)
                continue
            if response.error_kind:
                written.problem = f"{response.error_kind}: {response.error}"
                return written
            last = whole_sentences(" ".join(str(response.data["background"]).split()))
            problem = await self._wrong(written, turn, attempt, facts, last)
            if not problem:
                written.background = last
                written.rewrites = attempt
                written.text = self._whole(written.values, last)
                return written
            written.notes.append(problem)
        written.rewrites = self._attempts - 1
        written.problem = f"no version could be used: {problem}"
        return written

    def _whole(self, values: Mapping[str, Any], background: str) -> str:
        template = self._template
        name = str(values.get("name") or "")
        facts = template.told({k: v for k, v in values.items() if k != "name"})
        if name:
            return f"{template.fill('facts', name=name, facts=facts)}\n{background}"
        return f"{template.fill('facts_unnamed', facts=facts)}\n{background}"

    async def _wrong(self, written: Written, turn: int, attempt: int, facts: str, text: str) -> str:
        """What is wrong with a version, or an empty text."""
        flawed = flaw(text)
        if flawed is not None:
            return flawed
        found = contradictions(written.values, text, self._categories)
        if found:
            return "; ".join(map(str, found))
        if not self._judge:
            return ""
        prompt = self._template.fill("judge", facts=facts, text=text)
        verdict = await self._request(
            written, turn, self._attempts + attempt, prompt, _VERDICT, temperature=0.0
        )
        if verdict.error_kind:
            written.notes.append(f"the judge gave no verdict: {verdict.error}")
            return ""
        return str(verdict.data["what"]) if verdict.data["contradicts"] else ""

    async def _request(
        self,
        written: Written,
        turn: int,
        question: int,
        prompt: str,
        schema: dict[str, Any],
        temperature: float | None = None,
    ) -> ModelResponse:
        if temperature is None:
            low, high = self._temperature
            share = self._draw(written.row, turn, f"temperature/{question}") / 0xFFFFFFFF
            # Each further version is a little freer, or a small model says the same again.
            temperature = round(low + share * (high - low) + _FREER * question, 3)
        self._numbers += 1
        response = await self._ask(
            ModelRequest(
                self._numbers,
                (self._seed, "persona", written.row, turn, question),
                [
                    {"role": "system", "content": self._template.system},
                    {"role": "user", "content": prompt},
                ],
                schema,
                temperature,
                self._model.top_p,
                max(_TOKENS, self._model.max_tokens),
            )
        )
        written.requests += 1
        written.tokens_in += response.tokens_in
        written.tokens_out += response.tokens_out
        return response

    def _draw(self, row: int, turn: int, what: str) -> int:
        """32 bits that follow from seed, row and purpose alone."""
        told = f"{self._seed}/{row}/{turn}/{what}".encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=4).digest(), "big")


def fingerprint(values: Mapping[str, Any]) -> str:
    """Names a row by what it holds: a text belongs to no other."""
    told = json.dumps(dict(values), sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def whole_sentences(text: str) -> str:
    """A text without the half sentence at its end that the limit of its length left there."""
    if text[-1:] in ".!?\"')。!?":
        return text
    end = max(text.rfind(sign) for sign in ".!?。!?")
    return text[: end + 1] if end > 0 else text
