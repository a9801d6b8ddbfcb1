"""A scenario that news comes into; the director's processes import it by path."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from populace import Agent, Scenario
from shared.messages.scenario import PlannedEvent


class Reader(Agent):
    def __init__(self, pause: float) -> None:
        self.pause = pause

    async def read(self, news: str) -> dict[str, Any]:
        if news:
            self.memory.add_user(news)
        await self.sleep(self.pause)
        drawn = self.random.random()
        answer = await self.model.ask(f"What do you say in round {self.round}? ({drawn:.6f})")
        return {"text": answer, "heard": len(self.memory)}

    def remembers(self) -> list[str]:
        return [m["content"] for m in self.memory.messages]


class Params(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pause: float = 0.0
    tone: str = "plain"


class Paper(Scenario):
    Params = Params

    async def setup(self) -> None:
        self.readers = await self.population(Reader, self.params.pause, name="readers")
        self.more: Any = None
        self.news = ""

    async def injected(self, event: PlannedEvent) -> None:
        if event.name == "news":
            self.news = event.data["text"]
        elif event.name == "leave":
            self.readers = self.readers.without(event.data["agents"])
        elif event.name == "join":
            self.more = await self.population(
                Reader, self.params.pause, count=event.data["count"], name="newcomers"
            )
        else:
            await super().injected(event)

    async def round(self, n: int) -> None:
        answers = self.readers.read(self.news)
        heard = await answers.reduce("mean", field="heard")
        more = 0
        if self.more is not None:
            more = (await self.more.read(self.news).reduce("count", field="heard")).count
        self.record(heard=heard.mean, readers=heard.count, more=more, tone=self.params.tone)
        self.news = ""
