"""Proxies: light stand-ins for agents that live in a worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from populace._runtime.caller import AGENT_EXTENSION, Caller
from populace.placeholder import Placeholder
from shared.codec import Codec


class AgentProxy:
    """Stands for one agent; calling a method of it returns a ``Placeholder`` at once.

    It may be an argument of a call, and so hand on the agent's address.
    """

    __slots__ = ("_caller", "_cls", "_index", "_label", "_shard")

    def __init__(
        self, caller: Caller, shard: str, index: int, label: str, cls: type | None = None
    ) -> None:
        self._caller = caller
        self._shard = shard
        self._index = index
        self._label = label
        self._cls = cls

    def __getattr__(self, name: str) -> Callable[..., Placeholder[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._cls is not None and not inspect.isfunction(getattr(self._cls, name, None)):
            raise AttributeError(
                f"{self._cls.__name__} has no method {name!r}; a proxy gives methods alone, "
                "write one that returns what you want to read"
            )
        caller, shard, index, label = self._caller, self._shard, self._index, self._label

        def method(*args: Any, **kwargs: Any) -> Placeholder[Any]:
            return caller.call(shard, index, label, name, args, kwargs)

        method.__name__ = name
        return method

    def __deepcopy__(self, memo: Any) -> AgentProxy:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AgentProxy) and (self._shard, self._index) == (
            other._shard,
            other._index,
        )

    def __hash__(self) -> int:
        return hash((self._shard, self._index))

    def __repr__(self) -> str:
        kind = self._cls.__name__ if self._cls is not None else "agent"
        return f"<{kind} {self._label}>"


def register_proxies(codec: Codec, caller: Caller) -> None:
    """Let proxies travel; where they arrive, they call through that process's caller."""
    codec.register(
        AGENT_EXTENSION,
        AgentProxy,
        lambda proxy: [proxy._shard, proxy._index, proxy._label],
        lambda parts: AgentProxy(caller, parts[0], parts[1], parts[2]),
    )
