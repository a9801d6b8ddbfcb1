"""An attribute store: values by name, made as they are needed."""

from __future__ import annotations

from typing import Any

from populace.environment import Environment, readonly

_MOST_SHOWN = 500


class AttributeStore(Environment):
    """Values by name, shared by all: a blackboard, a price list, a ledger.

    Args:
        values: what it holds at first.
        fixed: whether only these names may be used.

    Events: ``changed(name, old, new)``.
    """

    def __init__(self, values: dict[str, Any] | None = None, *, fixed: bool = False) -> None:
        self.values: dict[str, Any] = dict(values or {})
        self.fixed = fixed

    @readonly
    def get(self, name: str, default: Any = None) -> Any:
        """The value of a name, or the default if there is none."""
        if self.fixed:
            self._check(name)
        return self.values.get(name, default)

    @readonly
    def all(self) -> dict[str, Any]:
        """All names and values."""
        return dict(self.values)

    def view(self) -> dict[str, Any]:
        """See ``Environment.view``."""
        rows = [[name, self.values[name]] for name in sorted(self.values)[:_MOST_SHOWN]]
        return {"kind": "table", "columns": ["name", "value"], "rows": rows}

    def set(self, name: str, value: Any) -> None:
        """Give a name a value.

        Raises:
            KeyError: the names are fixed, and this is none of them.
        """
        self._check(name)
        self._change(name, value)

    def update(self, values: dict[str, Any]) -> None:
        """Give several names their values, all or none.

        Raises:
            KeyError: the names are fixed, and one is none of them.
        """
        for name in values:
            self._check(name)
        for name, value in values.items():
            self._change(name, value)

    def increment(self, name: str, by: float = 1) -> Any:
        """Add to a number, which is 0 if there was none; returns what it is now.

        Raises:
            KeyError: the names are fixed, and this is none of them.
            TypeError: it isn't a number.
        """
        self._check(name)
        value = self.values.get(name, 0)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name!r} in {self.path} is {value!r}, not a number")
        self._change(name, value + by)
        return value + by

    def compare_and_set(self, name: str, expected: Any, value: Any) -> bool:
        """Give a name a value if it has the expected one; returns whether it had."""
        self._check(name)
        if self.values.get(name) != expected:
            return False
        self._change(name, value)
        return True

    def remove(self, name: str) -> bool:
        """Forget a name; returns whether it was there."""
        if name not in self.values:
            return False
        old = self.values.pop(name)
        self.emit("changed", None, name=name, old=old, new=None)
        return True

    def _check(self, name: str) -> None:
        if self.fixed and name not in self.values:
            known = ", ".join(sorted(self.values))
            raise KeyError(f"{self.path} has no attribute {name!r} (it has: {known})")

    def _change(self, name: str, value: Any) -> None:
        old = self.values.get(name)
        self.values[name] = value
        if old != value:
            self.emit("changed", None, name=name, old=old, new=value)
