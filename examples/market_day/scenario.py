"""A day at the market: a clock, a price list, deliveries that make bread cheaper."""

from __future__ import annotations

from agents import Trader

from populace import Event, Scenario
from populace.environments import AttributeStore, Timeline


class MarketDay(Scenario):
    """Each round is an hour from eight o'clock on."""

    async def setup(self) -> None:
        """Wind up the clock and hang up the prices."""
        self.traders = await self.population(Trader)
        self.clock = await self.environment(Timeline, "clock", 7.0)
        # Who comes first pays less: in the order of the traders, the same seed gives the same day.
        self.prices = await self.environment(
            AttributeStore,
            "prices",
            {"bread": 2.0, "sold": 0},
            order="agent",
            members=self.traders,
        )
        await self.clock.plan("delivery", 9.0, {"cheaper": 0.5}, every=3.0)
        self.deliveries: list[float] = []
        await self.listen(self.clock, "due", self.deliver, when="name == 'delivery'")

    def deliver(self, event: Event) -> None:
        """Note that bread has come."""
        self.deliveries.append(event["at"])

    async def round(self, n: int) -> None:
        """An hour goes by; then everyone shops."""
        hour = 7.0 + n
        due = await self.clock.advance(hour)
        for _ in range(due):
            await self.prices.set("bread", max(1.0, await self.prices.get("bread") - 0.5))
        paid = await self.traders.shop(hour).reduce("mean")
        known = await self.prices.all()
        self.record(hour=hour, deliveries=due, bread=known["bread"], sold=known["sold"])
        self.spent = paid.mean
