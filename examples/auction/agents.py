"""Bidders."""

from __future__ import annotations

from populace import Agent


class Bidder(Agent):
    """Knows what a thing is worth to it, and doesn't pay more."""

    def __init__(self, auction: str, kind: str) -> None:
        self.auction = auction
        self.kind = kind

    async def take_part(self) -> float:
        """Bid; returns what the thing is worth to one."""
        worth = round(self.random.uniform(10, 100), 2)
        auction = self.environment(self.auction)
        if self.kind != "open":
            # With a second price it is best to bid the worth itself, with the first price less.
            await auction.bid(worth if self.kind == "second_price" else round(worth * 0.9, 2))
            return worth
        seen = unchanged = 0
        while unchanged < 3:  # others may still be making up their minds
            standing = await auction.standing()
            if standing["leader"] == self.id:
                unchanged = unchanged + 1 if standing["bids"] == seen else 0
                seen = standing["bids"]
            elif standing["needed"] > worth:
                return worth
            else:
                await auction.bid(standing["needed"])
        return worth
