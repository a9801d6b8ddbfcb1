"""Two hundred guests in one chat room."""

from __future__ import annotations

from agents import Guest
from pydantic import BaseModel, ConfigDict

from populace import Event, Scenario
from populace.environments import ChatRoom


class Params(BaseModel):
    """What a scenario file may set."""

    model_config = ConfigDict(extra="forbid")

    topic: str = "the weather"


class Party(Scenario):
    """In each round every guest reads what is new and posts once."""

    Params = Params

    async def setup(self) -> None:
        """Open the room, and let everyone in."""
        self.mentioned = 0
        self.guests = await self.population(Guest, "lounge")
        # In the order of the guests, so that the same seed gives the same talk.
        self.room = await self.environment(
            ChatRoom, "lounge", self.params.topic, keep=500, order="agent", members=self.guests
        )
        await self.listen(self.room, "mentioned", self.count)
        await self.guests.come_in()

    def count(self, event: Event) -> None:
        """Count who was spoken to."""
        self.mentioned += 1

    async def round(self, n: int) -> None:
        """Everyone talks."""
        reading = await self.guests.talk(self.params.topic).reduce("mean")
        last = (await self.room.history(1))[0]
        self.record(
            posts=await self.room.get("count"),
            read=reading.mean,
            present=len(await self.room.present()),
            last=f"{last['author']}: {last['text'][:40]}",
        )
