"""Traders at a market."""

from __future__ import annotations

from populace import Agent


class Trader(Agent):
    """Buys when bread is cheap, and so makes it dearer."""

    async def shop(self, hour: float) -> float:
        """Look at the price; buy if it is worth it; returns what was paid, 0 if nothing was."""
        prices = self.environment("prices")
        price = await prices.get("bread")
        if price > self.random.uniform(1.0, 4.0):
            return 0.0
        await prices.increment("bread", 0.01)
        await prices.increment("sold")
        return float(price)
