"""Circles of waiting: found by probes, and opened by letting one waiting call in.

An agent handles one call at a time. When A's method awaits a call to B, B's awaits one to C,
and C's one to A, and all three run already, each waits in the queue of a busy agent, for ever.
A worker that sees a call made by an agent wait so for a while sends a probe along what the
busy agent itself waits for (the edge-chasing of Chandy, Misra and Haas 1983). A probe that
arrives at the call which it began with has gone round a circle. Then exactly one call of the
circle, the one with the smallest key, is run at once: its agent sits at an ``await`` that can't
end otherwise, so nothing else of it is running. Calls of one chain that come back to an agent
need no probe: the chain travels with them (see ``Shard``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from populace.placeholder import Placeholder
from shared.logs import get_logger
from shared.messages import batch

if TYPE_CHECKING:
    from populace._runtime.driver import CallTask
    from populace._runtime.shard import Group, Shard
    from populace._runtime.worker import Worker

_log = get_logger(__name__)

_FIRST = 0.1
_SLOWEST = 5.0
_MAX_PATH = 256


class _Watched:
    __slots__ = ("due", "group", "index", "position", "shard", "wait")

    def __init__(self, shard: Shard, index: int, group: Group, position: int, now: float) -> None:
        self.shard = shard
        self.index = index
        self.group = group
        self.position = position
        self.wait = _FIRST
        self.due = now + _FIRST


class Cycles:
    """Watches the calls that wait at one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._watched: list[_Watched] = []
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, shard: Shard, index: int, group: Group, position: int) -> None:
        """Look after a call, made by an agent, that waits for a busy agent."""
        loop = asyncio.get_running_loop()
        self._watched.append(_Watched(shard, index, group, position, loop.time()))
        if self._timer is None:
            self._timer = loop.call_later(_FIRST, self._look)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._watched = [w for w in self._watched if w.shard.is_queued(w.group, w.position)]
        for watched in self._watched:
            if watched.due <= now:
                watched.wait = min(_SLOWEST, watched.wait * 2)
                watched.due = now + watched.wait
                key = [watched.group.caller, watched.group.number, watched.position]
                self._follow_agent(watched.shard, watched.index, key, [key])
        if self._watched:
            wake = min(w.due for w in self._watched)
            self._timer = loop.call_later(max(0.02, wake - now), self._look)

    def _follow_agent(self, shard: Shard, index: int, origin: list[Any], path: list[Any]) -> None:
        for task in shard.active(index):
            self._follow(task, origin, path)

    def _follow(self, task: CallTask, origin: list[Any], path: list[Any]) -> None:
        """Send the probe on to every call that a call under way waits for."""
        caller = self._worker.caller
        waiter = task.waits_for
        awaited = (
            [waiter]
            if isinstance(waiter, Placeholder)
            else [p for p in task.calls or () if p.wanted]  # perhaps in tasks of its own
        )
        for placeholder in awaited:
            key: list[Any] = list(caller.references.source_of(placeholder)[:3])
            if placeholder.done() or key[1] < 0 or len(path) > _MAX_PATH:
                continue
            subject = caller.subject_of(placeholder.shard)
            message = [batch.PROBE, origin, [key, path]]
            self._worker.bus.send(subject, self._worker.codec.pack(message))

    def receive(self, shard: Shard, origin: list[Any], probe: list[Any]) -> None:
        """Take a probe for a call at one of this worker's shards."""
        key, path = probe
        inbox, number, position = key
        group = self._worker.open_group(inbox, number)
        if group is None or group.shard is not shard:
            return
        if shard.is_queued(group, position):
            index = group.indexes[position]
            if key == origin:
                if origin == min(path):
                    _log.info(
                        "a circle of waiting calls is opened",
                        agent=shard.agent_name(index),
                        method=group.method,
                        calls=len(path),
                    )
                    shard.admit(index, group, position)
            elif key not in path:
                self._follow_agent(shard, index, origin, [*path, key])
        else:
            task = shard.task_of(group, position)
            if task is not None:
                self._follow(task, origin, path)
