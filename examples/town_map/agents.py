"""People who walk about."""

from __future__ import annotations

from populace import Agent


class Walker(Agent):
    """Walks at random, and greets who is near."""

    def __init__(self, town: str, size: float) -> None:
        self.town = town
        self.size = size

    async def arrive(self) -> None:
        """Stand somewhere."""
        x, y = self.random.uniform(0, self.size), self.random.uniform(0, self.size)
        await self.environment(self.town).place(x, y)

    async def walk(self, stride: float) -> None:
        """Walk a stride."""
        dx, dy = self.random.uniform(-stride, stride), self.random.uniform(-stride, stride)
        await self.environment(self.town).move(dx, dy)

    async def look(self, sight: float) -> int:
        """Look around; returns how many others are in sight."""
        return len(await self.environment(self.town).near(self.id, sight))
