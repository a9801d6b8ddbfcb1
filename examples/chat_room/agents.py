"""People in a chat room."""

from __future__ import annotations

from populace import Agent, Event


class Guest(Agent):
    """Reads what is new, and says something, to someone if it was spoken to."""

    def __init__(self, room: str) -> None:
        self.room = room
        self.mentions: list[str] = []

    async def come_in(self) -> None:
        """Join the room, and listen for one's name."""
        name = await self.environment(self.room).join()
        await self.listen(self.room, "mentioned", self.on_mentioned, when=f"name == '{name}'")

    def on_mentioned(self, event: Event) -> None:
        """Remember who spoke to one."""
        self.mentions.append(event["author"])

    async def talk(self, topic: str) -> int:
        """Read, think, post; returns how many messages were new."""
        room = self.environment(self.room)
        unread = await room.read(most=20)
        heard = "\n".join(f"{m['author']}: {m['text']}" for m in unread[-5:])
        thought = await self.model.ask(f"You talk about {topic}. So far:\n{heard}\nSay something.")
        to = f"@{self.random.choice(unread)['author']} " if unread else ""
        await room.post(f"{to}{thought}"[:200])
        return len(unread)

    def spoken_to(self) -> int:
        """How often one was mentioned, as far as one has heard."""
        return len(self.mentions)
