"""A map: places in two dimensions, who is near whom, and zones that are entered and left."""

from __future__ import annotations

import itertools
import math
from typing import Any

from populace.environment import Environment, readonly
from shared.errors import InvalidInputError

_MOST_SHOWN = 2000


class Map(Environment):
    """A rectangle in which things stand and move.

    Queries use an R-tree (rtree, libspatialindex).

    Args:
        width: of the rectangle, from 0.
        height: likewise.

    Events: ``moved(name, x, y)``, ``entered(zone, name)``, ``left(zone, name)``.

    Raises:
        InvalidInputError: rtree is not installed, or the rectangle has no area.
    """

    def __init__(self, width: float, height: float) -> None:
        if not (width > 0 and height > 0):
            raise InvalidInputError(f"a map needs an area, not {width} by {height}")
        self.width = width
        self.height = height
        self.places: dict[str, list[float]] = {}
        self.zones: dict[str, list[float]] = {}
        self._build()

    def _build(self) -> None:
        try:
            from rtree import index
        except ImportError:
            raise InvalidInputError("Map needs rtree: pip install 'populace[worlds]'") from None
        self._names: list[str] = []
        self._ids: dict[str, int] = {}
        self._tree = index.Index()
        for name, (x, y) in self.places.items():
            self._insert(name, x, y)

    def _insert(self, name: str, x: float, y: float) -> None:
        if name not in self._ids:
            self._ids[name] = len(self._names)
            self._names.append(name)
        self._tree.insert(self._ids[name], (x, y, x, y))

    # Moving
    def place(self, x: float, y: float, name: str = "") -> None:
        """Put something (default: the calling agent) somewhere.

        Raises:
            ValueError: the place is outside.
        """
        name = self._who(name)
        if not (0 <= x <= self.width and 0 <= y <= self.height):
            raise ValueError(
                f"({x:g}, {y:g}) is outside of {self.path}, which is {self.width:g} by "
                f"{self.height:g}"
            )
        before = self.places.get(name)
        if before is not None:
            old = (before[0], before[1], before[0], before[1])
            self._tree.delete(self._ids[name], old)
        self.places[name] = [x, y]
        self._insert(name, x, y)
        self.emit("moved", None, name=name, x=x, y=y)
        for zone, box in self.zones.items():
            was, now = before is not None and _inside(box, *before), _inside(box, x, y)
            if was != now:
                self.emit("entered" if now else "left", None, zone=zone, name=name)

    def move(self, dx: float, dy: float, name: str = "") -> list[float]:
        """Go by so much, as far as the edge; returns the new place.

        Raises:
            LookupError: it isn't on the map.
        """
        x, y = self.where(self._who(name))
        x, y = min(max(x + dx, 0.0), self.width), min(max(y + dy, 0.0), self.height)
        self.place(x, y, self._who(name))
        return [x, y]

    def remove(self, name: str = "") -> None:
        """Take something off the map.

        Raises:
            LookupError: it isn't on it.
        """
        name = self._who(name)
        x, y = self.where(name)
        del self.places[name]
        self._tree.delete(self._ids[name], (x, y, x, y))
        for zone, box in self.zones.items():
            if _inside(box, x, y):
                self.emit("left", None, zone=zone, name=name)

    def zone(self, name: str, x0: float, y0: float, x1: float, y1: float) -> None:
        """Mark a part of the map; who is in it from the beginning enters nothing."""
        if not (x0 < x1 and y0 < y1):
            raise ValueError(f"the zone {name!r} has no area")
        self.zones[name] = [x0, y0, x1, y1]

    # Asking
    @readonly
    def where(self, name: str) -> list[float]:
        """X and y.

        Raises:
            LookupError: it isn't on the map.
        """
        if name not in self.places:
            raise LookupError(f"{name!r} is not on {self.path}")
        return self.places[name]

    @readonly
    def within(self, x: float, y: float, radius: float) -> list[list[Any]]:
        """What is no farther than a radius: name and distance, nearest first."""
        box = (x - radius, y - radius, x + radius, y + radius)
        found = []
        for one in self._tree.intersection(box):
            name = self._names[one]
            distance = math.dist((x, y), self.places[name])
            if distance <= radius:
                found.append([name, distance])
        return sorted(found, key=lambda row: (row[1], row[0]))

    @readonly
    def near(self, name: str, radius: float) -> list[list[Any]]:
        """What is no farther than a radius from something: name and distance, nearest first."""
        x, y = self.where(name)
        return [row for row in self.within(x, y, radius) if row[0] != name]

    @readonly
    def nearest(self, x: float, y: float, count: int = 1) -> list[list[Any]]:
        """The so many things that are nearest: name and distance, nearest first."""
        ids = self._tree.nearest((x, y, x, y), count)
        rows = [[self._names[i], math.dist((x, y), self.places[self._names[i]])] for i in ids]
        return sorted(rows, key=lambda row: (row[1], row[0]))[:count]

    @readonly
    def in_zone(self, zone: str) -> list[str]:
        """Names of what is in a zone.

        Raises:
            LookupError: there is no such zone.
        """
        if zone not in self.zones:
            raise LookupError(f"{self.path} has no zone {zone!r} (it has: {sorted(self.zones)})")
        box = self.zones[zone]
        return sorted(self._names[i] for i in self._tree.intersection(box))

    def view(self) -> dict[str, Any]:
        """See ``Environment.view``."""
        some = dict(itertools.islice(self.places.items(), _MOST_SHOWN))
        return {
            "kind": "map",
            "width": self.width,
            "height": self.height,
            "places": some,
            "zones": self.zones,
            "left_out": len(self.places) - len(some),
        }

    def _who(self, name: str) -> str:
        who = name or self.caller
        if not who:
            raise ValueError("say what is meant: name=")
        return who

    # Kept and restored: the index is made anew
    def snapshot(self) -> dict[str, Any]:
        """See ``Environment.snapshot``."""
        return {k: v for k, v in vars(self).items() if k not in ("_tree", "_ids", "_names")}

    def restore(self, state: dict[str, Any]) -> None:
        """See ``Environment.restore``."""
        super().restore(state)
        self._build()


def _inside(box: list[float], x: float, y: float) -> bool:
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]
