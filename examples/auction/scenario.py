"""The same thing sold in an open, a sealed, and a second-price auction."""

from __future__ import annotations

from agents import Bidder

from populace import Scenario
from populace.environments import Auction

KINDS = ("open", "sealed", "second_price")


class Auctions(Scenario):
    """Each round is a sale of its own kind; bidders act in the order of their numbers."""

    async def setup(self) -> None:
        """Make a population and a house for each kind."""
        self.bidders = {}
        self.houses = {}
        for kind in KINDS:
            bidders = await self.population(Bidder, kind, kind, name=kind)
            self.bidders[kind] = bidders
            self.houses[kind] = await self.environment(
                Auction, kind, kind, step=1.0, order="agent", members=bidders
            )

    async def round(self, n: int) -> None:
        """Sell something."""
        kind = KINDS[(n - 1) % len(KINDS)]
        house = self.houses[kind]
        await house.opened(f"vase {n}", 20.0)
        worths = await self.bidders[kind].take_part()
        result = await house.close()
        self.record(
            kind=kind,
            winner=result["winner"],
            price=result["price"],
            bids=result["bids"],
            highest_worth=max(worths),
        )
