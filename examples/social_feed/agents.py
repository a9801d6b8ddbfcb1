"""Members of a social network."""

from __future__ import annotations

from populace import Agent


class Member(Agent):
    """Posts now and then, reads its feed, likes what others like."""

    async def day(self, ranking: str) -> int:
        """A day in the network; returns how many posts were read."""
        net = self.environment("net")
        if self.random.random() < 0.3:
            await net.post(await self.model.ask("Write one short post."))
        feed = await net.feed(most=8, ranking=ranking)
        for post in feed:
            if self.random.random() < 0.1 + 0.05 * min(post["likes"], 10):
                await net.like(post["number"])
        return len(feed)
