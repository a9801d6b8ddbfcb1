"""People who hear a rumour, and may pass it on."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from populace import Agent


class Decision(BaseModel):
    """What a person makes of what it was told."""

    believes: bool
    retelling: str = Field(max_length=300)


class Person(Agent):
    """Ignorant at first; who believes a rumour spreads it, until it bores those who know it."""

    def __init__(self) -> None:
        self.state = "ignorant"
        """``ignorant``, ``spreader``, or ``stifler``: has heard it, and does not pass it on."""
        self.text = ""
        self.corrected = False

    def start(self, text: str) -> None:
        """Be the first to know."""
        self.state, self.text = "spreader", text

    def told(self) -> dict[str, Any]:
        """Where one stands."""
        return {"state": self.state, "knows": float(self.state != "ignorant"), "text": self.text}

    async def hear(self, text: str) -> bool:
        """Hear a rumour; returns whether it was new."""
        if self.state != "ignorant":
            return False
        believes, self.text = await self._think(text)
        self.state = "spreader" if believes else "stifler"
        return True

    def bored(self) -> None:
        """Somebody knew it already: pass it on no more."""
        self.state = "stifler"

    async def correct(self, news: str) -> None:
        """Hear from elsewhere what is true."""
        self.corrected = True
        self.memory.add_user(f"The news: {news}")
        if self.state == "spreader":
            believes, _ = await self._think(self.text)
            if not believes:
                self.state = "stifler"

    async def _think(self, text: str) -> tuple[bool, str]:
        found = await self.model.ask(
            f"Somebody tells you: {text!r} Do you believe it enough to pass it on? And how would "
            "you retell it, in one sentence?",
            returns=Decision,
        )
        return found.believes, found.retelling or text


class Gossip(Person):
    """A rule in place of a model: believes everything, or nothing once it knows better."""

    async def _think(self, text: str) -> tuple[bool, str]:
        return not self.corrected, text
