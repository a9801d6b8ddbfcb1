"""An auction: one thing, many bidders; open and ascending, or with sealed bids."""

from __future__ import annotations

from typing import Any, Literal

from populace.environment import Environment, event, readonly

Kind = Literal["open", "sealed", "second_price"]
_KINDS = ("open", "sealed", "second_price")


_MOST_SHOWN = 200


class Auction(Environment):
    """Sells one thing after another.

    Args:
        kind: ``"open"``: bids are known and each must beat the highest by the step (an English
            auction). ``"sealed"``: bids are secret, the highest wins and pays its bid.
            ``"second_price"``: the same, but pays the second highest bid (Vickrey 1961).
        step: by how much an open bid must beat the highest.

    Of equal bids the earlier wins. Events: ``opened(item, reserve)``, ``raised(item, bidder,
    amount)`` for open bids, ``sold(item, winner, price)``, and ``unsold(item)``.
    """

    def __init__(self, kind: Kind = "open", *, step: float = 1.0) -> None:
        if kind not in _KINDS:
            raise ValueError(f"there is no auction of kind {kind!r} (there are: {_KINDS})")
        if not step > 0:
            raise ValueError(f"the step must be above 0, not {step!r}")
        self.kind = kind
        self.step = step
        self.item: str | None = None
        self.reserve = 0.0
        self.bids: list[list[Any]] = []
        """[bidder, amount] as they came; in a sealed auction each bidder's last counts."""
        self.results: list[dict[str, Any]] = []

    @event
    def opened(self, item: str, reserve: float = 0.0) -> None:
        """Put a thing up for sale.

        Raises:
            ValueError: another is for sale.
        """
        if self.item is not None:
            raise ValueError(f"{self.item!r} is still for sale in {self.path}; close it first")
        self.item, self.reserve, self.bids = item, reserve, []

    def bid(self, amount: float, bidder: str = "") -> dict[str, Any]:
        """Bid; returns whether it was taken, why not, and in an open auction the price to beat.

        Raises:
            ValueError: nothing is for sale, or nobody says who bids.
        """
        if self.item is None:
            raise ValueError(f"nothing is for sale in {self.path}")
        who = bidder or self.caller
        if not who:
            raise ValueError("say who bids: bidder=")
        if not amount >= 0:
            return {"accepted": False, "reason": "a bid can't be below 0"}
        if self.kind != "open":
            self.bids = [row for row in self.bids if row[0] != who]
            self.bids.append([who, amount])
            return {"accepted": True, "reason": ""}
        needed = self._needed()
        if amount < needed:
            reason = f"{amount:g} does not reach {needed:g}"
            return {"accepted": False, "reason": reason, "needed": needed}
        self.bids.append([who, amount])
        self.emit("raised", None, item=self.item, bidder=who, amount=amount)
        return {"accepted": True, "reason": "", "needed": self._needed()}

    def _needed(self) -> float:
        return float(self.bids[-1][1] + self.step) if self.bids else self.reserve

    @readonly
    def standing(self) -> dict[str, Any]:
        """What all may know: item, number of bids, and in an open auction who leads at what."""
        known: dict[str, Any] = {"item": self.item, "bids": len(self.bids)}
        if self.kind == "open" and self.item is not None:
            leader, price = self.bids[-1] if self.bids else (None, None)
            known |= {"leader": leader, "price": price, "needed": self._needed()}
        return known

    def close(self) -> dict[str, Any]:
        """End the sale; returns item, winner, price and number of bids.

        Raises:
            ValueError: nothing is for sale.
        """
        if self.item is None:
            raise ValueError(f"nothing is for sale in {self.path}")
        item, self.item = self.item, None
        good = [row for row in self.bids if row[1] >= self.reserve]
        result: dict[str, Any] = {"item": item, "winner": None, "price": None}
        result["bids"] = len(self.bids)
        if good:
            ranked = sorted(good, key=lambda row: -row[1])  # stable: of equal ones the earlier
            price = ranked[0][1]
            if self.kind == "second_price":
                price = ranked[1][1] if len(ranked) > 1 else self.reserve
            result |= {"winner": ranked[0][0], "price": price}
            self.emit("sold", None, item=item, winner=ranked[0][0], price=price)
        else:
            self.emit("unsold", None, item=item)
        self.results.append(result)
        return result

    def view(self) -> dict[str, Any]:
        """See ``Environment.view``."""
        names = ["item", "winner", "price", "bids"]
        rows = [[sale[name] for name in names] for sale in self.results[-_MOST_SHOWN:]]
        return {"kind": "table", "columns": names, "rows": rows}

    @readonly
    def sales(self) -> list[dict[str, Any]]:
        """All sales so far."""
        return self.results
