"""Drives agents' coroutines without an asyncio Task for each.

A coroutine that never waits costs a ``send``; one that does is carried on by a ``CallTask``,
a small record that stands in for a Task: it is registered as the current task around every
step, so ``asyncio.timeout``, ``TaskGroup``, ``wait_for`` and libraries built on them find the
methods that they call. It leans on two private functions of asyncio, which is why the tests
run the whole of asyncio's manners on every Python that is supported.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from populace._runtime.cost import Cost
    from populace._runtime.profile import Profile
    from populace._runtime.shard import Group

_parent_call: contextvars.ContextVar[CallTask | None] = contextvars.ContextVar(
    "populace_parent_call", default=None
)
"""In tasks that a call of an agent has started: that call."""


_stepping: CallTask | None = None
"""The call that is being stepped right now: what asyncio.current_task() gives, faster."""


def stepping() -> CallTask | None:
    """The call whose own code runs right now, and not that of a task which it started."""
    return _stepping


def current_call() -> CallTask | None:
    """The call of an agent that the running code belongs to, if it belongs to one."""
    return _stepping or _parent_call.get()


class _Here:
    """The plain call that runs right now, if one does; set by the shard."""

    __slots__ = ("group", "position")

    def __init__(self) -> None:
        self.group: Group | None = None
        self.position = 0


here = _Here()


class PlainCall:
    """Stands for a call of a plain method, for what it calls itself."""

    __slots__ = ("group", "index", "position")

    def __init__(self, group: Group, position: int) -> None:
        self.group = group
        self.position = position
        self.index = group.indexes[position]

    def note_call(self, placeholder: Any) -> None:
        """A plain method waits for nothing, so nothing has to be followed."""

    def get_name(self) -> str:
        """A name for logs."""
        return f"{self.group.shard.agent_name(self.index)}.{self.group.method}"


def calling() -> CallTask | PlainCall | None:
    """The call, of whatever kind of method, that the running code belongs to."""
    if _stepping is None and here.group is not None:
        return PlainCall(here.group, here.position)
    return current_call()


def mark_child_tasks(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Have tasks know which call started them; returns what undoes it.

    A note in every call's own context would do the same, but costs a microsecond and 200
    bytes for each of a million calls, of which few start tasks.
    """
    before = loop.get_task_factory()

    def make(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> Any:
        parent: object = asyncio.current_task(loop)  # the loop may not run yet
        if type(parent) is CallTask:
            if more.get("context") is None:
                more["context"] = contextvars.copy_context()
            more["context"].run(_parent_call.set, parent)
        if before is not None:
            return before(loop, coro, **more)
        return asyncio.Task(coro, loop=loop, **more)

    loop.set_task_factory(make)
    return lambda: loop.set_task_factory(before)


_profile: Profile | None = None


def set_profile(profile: Profile | None) -> None:
    """Note the time that agents' code takes, or don't."""
    global _profile
    _profile = profile


Finish = Callable[["CallTask", Any, BaseException | None], None]


class CallTask:
    """One call of an agent's coroutine method, under way. Speaks the Task protocol."""

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_cancel_message",
        "_cancels",
        "_context",
        "_coro",
        "_done",
        "_exception",
        "_finish",
        "_loop",
        "_must_cancel",
        "_result",
        "_waiter",
        "calls",
        "cost",
        "group",
        "index",
        "position",
        "started",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any],
        finish: Finish,
        group: Group,
        position: int,
        index: int,
    ) -> None:
        self._loop = loop
        self._coro = coro
        self._finish = finish
        self._context = contextvars.copy_context()
        self._callbacks: list[tuple[Callable[[Any], Any], contextvars.Context | None]] | None = None
        self._cancels = 0
        self._cancel_message: Any = None
        self._must_cancel = False
        self._done = False
        self._waiter: Any = None
        self._result: Any = None
        self._exception: BaseException | None = None
        self.group = group
        self.position = position
        self.index = index
        measured = group.record is not None or _profile is not None
        self.started = time.monotonic() if measured else 0.0
        """When it began; told only where it is recorded, or measured."""
        self.cost: Cost | None = None
        self.calls: set[Any] | None = None
        """Placeholders of calls that this call has made; some may be answered by now."""

    @property
    def waits_for(self) -> Any:
        """What the call waits for: a future, or something of the platform's own; or None."""
        return self._waiter

    def note_call(self, placeholder: Any) -> None:
        """Remember a call that this call makes; answered ones are let go now and then."""
        calls = self.calls
        if calls is None:
            calls = self.calls = set()
        calls.add(placeholder)
        size = len(calls)
        if size >= 64 and size & (size - 1) == 0:  # at each doubling
            self.calls = {p for p in calls if not p.done()}

    def step(self, error: BaseException | None = None) -> None:
        """Run the coroutine up to its next wait; must be called outside of any task."""
        global _stepping
        if self._done:
            return
        if self._must_cancel:
            if not isinstance(error, asyncio.CancelledError):
                error = self._cancelled_error()
            self._must_cancel = False
        self._waiter = None
        loop, coro = self._loop, self._coro
        result: Any = None
        failure: BaseException | None = None
        ended = False
        _enter_task(loop, self)  # type: ignore[arg-type]
        _stepping = self
        began = time.perf_counter() if _profile is not None else 0.0
        try:
            if error is None:
                wanted = self._context.run(coro.send, None)
            else:
                wanted = self._context.run(coro.throw, error)
        except StopIteration as stop:
            ended, result = True, stop.value
        except BaseException as raised:
            ended, failure = True, raised
        finally:
            _stepping = None
            if _profile is not None:
                _profile.work += time.perf_counter() - began
            _leave_task(loop, self)  # type: ignore[arg-type]
        if ended:
            self._end(result, failure)
        elif type(wanted) is _Bucket and not self._must_cancel:
            # By far the most frequent wait: spelled out here.
            self._waiter = wanted
            wanted.tasks.append(self)
        else:
            self._wait_for(wanted)

    def _wait_for(self, wanted: Any) -> None:
        blocking = getattr(wanted, "_asyncio_future_blocking", None)
        if blocking:
            wanted._asyncio_future_blocking = False
            # No context: step enters the call's own, which must not be entered twice.
            wanted.add_done_callback(self._future_done)
            self._waiter = wanted
        elif wanted is None:
            self._loop.call_soon(self.step)
        elif isinstance(wanted, Parking):
            self._waiter = wanted
            wanted.park(self)
        else:
            text = (
                f"an agent awaited {wanted!r}, which asyncio does not know"
                if blocking is None
                else "an agent yielded a future without awaiting it"
            )
            self._loop.call_soon(self.step, RuntimeError(text))
        if self._must_cancel and self._cancel_waiter():
            self._must_cancel = False

    def _future_done(self, future: asyncio.Future[Any]) -> None:
        try:
            future.result()
        except BaseException as error:
            self.step(error)
        else:
            self.step()

    def wake(self, parking: Any) -> None:
        """Go on after a platform wait, unless a cancellation was faster."""
        if self._waiter is parking:
            self.step()

    def _cancel_waiter(self) -> bool:
        waiter = self._waiter
        if waiter is None:
            return False
        if isinstance(waiter, Parking):
            self._waiter = None
            self._loop.call_soon(self.step, self._cancelled_error())
            return True
        return bool(waiter.cancel(msg=self._cancel_message))

    def _cancelled_error(self) -> asyncio.CancelledError:
        if self._cancel_message is None:
            return asyncio.CancelledError()
        return asyncio.CancelledError(self._cancel_message)

    def _end(self, result: Any, failure: BaseException | None) -> None:
        self._done = True
        self._result, self._exception = result, failure
        if self._callbacks:
            for callback, context in self._callbacks:
                self._loop.call_soon(callback, self, context=context)
            self._callbacks = None
        self._finish(self, result, failure)

    # The Task protocol, as asyncio and libraries on it use it.
    def cancel(self, msg: Any = None) -> bool:
        """Have CancelledError raised where the call waits."""
        if self._done:
            return False
        self._cancels += 1
        self._cancel_message = msg
        if not self._cancel_waiter():
            self._must_cancel = True
        return True

    def cancelling(self) -> int:
        """How many cancellations were asked for and not taken back."""
        return self._cancels

    def uncancel(self) -> int:
        """Take one back."""
        if self._cancels > 0:
            self._cancels -= 1
            if self._cancels == 0:
                self._must_cancel = False
        return self._cancels

    def done(self) -> bool:
        """Whether the call is over."""
        return self._done

    def cancelled(self) -> bool:
        """Whether it ended by cancellation."""
        return self._done and isinstance(self._exception, asyncio.CancelledError)

    def result(self) -> Any:
        """What the method returned; raises what it raised."""
        if not self._done:
            raise asyncio.InvalidStateError("the call is not over")
        if self._exception is not None:
            raise self._exception
        return self._result

    def exception(self) -> BaseException | None:
        """What the method raised, or None."""
        if not self._done:
            raise asyncio.InvalidStateError("the call is not over")
        if isinstance(self._exception, asyncio.CancelledError):
            raise self._exception
        return self._exception

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop."""
        return self._loop

    def get_coro(self) -> Coroutine[Any, Any, Any]:
        """The coroutine."""
        return self._coro

    def get_context(self) -> contextvars.Context:
        """The context that the coroutine runs in."""
        return self._context

    def get_name(self) -> str:
        """A name for logs."""
        return f"{self.group.shard.agent_name(self.index)}.{self.group.method}"

    def set_name(self, value: object) -> None:
        """Calls keep their names."""

    def get_stack(self, *, limit: int | None = None) -> list[Any]:
        """The frame at which the coroutine waits."""
        frame = getattr(self._coro, "cr_frame", None)
        return [] if frame is None else [frame]

    def add_done_callback(
        self, callback: Callable[[Any], Any], *, context: contextvars.Context | None = None
    ) -> None:
        """Have ``callback(self)`` called once the call is over."""
        if self._done:
            self._loop.call_soon(callback, self, context=context)
            return
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append((callback, context))

    def remove_done_callback(self, callback: Callable[[Any], Any]) -> int:
        """Forget a callback; returns how often it was there."""
        held = self._callbacks or []
        self._callbacks = [(c, x) for c, x in held if c != callback]
        return len(held) - len(self._callbacks)


class Parking:
    """Something of the platform's own that a CallTask can wait for without a future."""

    __slots__ = ()

    def park(self, task: CallTask) -> None:
        """Remember to ``wake`` the task; it waits from now on."""
        raise NotImplementedError


class _Bucket(Parking):
    """All sleepers that wake in the same hundredth of a second."""

    __slots__ = ("_timers", "due", "tasks")

    def __init__(self, timers: Timers, due: int) -> None:
        self._timers = timers
        self.due = due
        self.tasks: list[CallTask] = []

    def __await__(self) -> Any:
        return iter((self,))  # what a generator would give, for less

    def park(self, task: CallTask) -> None:
        """Wake the task with the others."""
        self.tasks.append(task)


class Timers:
    """Sleeps that share timers: one per hundredth of a second, however many sleep."""

    QUANTUM = 0.01
    """Seconds; a sleep ends up to this much late, never early."""
    _AT_ONCE = 2000

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buckets: dict[int, _Bucket] = {}

    def sleep(self, seconds: float) -> _Bucket:
        """An awaitable, for a CallTask alone."""
        due = -int(-(self._loop.time() + seconds) // self.QUANTUM)
        bucket = self._buckets.get(due)
        if bucket is None:
            bucket = self._buckets[due] = _Bucket(self, due)
            self._loop.call_at(due * self.QUANTUM, self._fire, bucket)
        return bucket

    def _fire(self, bucket: _Bucket) -> None:
        early = bucket.due * self.QUANTUM - self._loop.time()
        if early > 1e-6:  # uvloop rounds to milliseconds, down as well as up
            self._loop.call_later(early + 0.001, self._fire, bucket)
            return
        if self._buckets.get(bucket.due) is bucket:
            del self._buckets[bucket.due]
        self._wake(bucket, 0)

    def _wake(self, bucket: _Bucket, start: int) -> None:
        # In slices, so that messages are still taken while a million wake up.
        tasks = bucket.tasks
        stop = min(len(tasks), start + self._AT_ONCE)
        done = start
        try:
            for done in range(start, stop):
                tasks[done].wake(bucket)
        finally:  # whatever one of them does, the others wake
            if done + 1 < len(tasks):
                self._loop.call_soon(self._wake, bucket, done + 1)


_timers: Timers | None = None
"""Of the loop that runs; one runs at a time in a process of ours."""


async def sleep(seconds: float) -> None:
    """Wait. Inside an agent's method this costs far less than ``asyncio.sleep``.

    Args:
        seconds: how long; the sleep may end up to 10 ms late.
    """
    task = _stepping
    if task is None or seconds <= 0:
        await asyncio.sleep(seconds)
        return
    global _timers
    timers = _timers
    if timers is None or timers._loop is not task._loop:
        timers = _timers = Timers(task._loop)
    await timers.sleep(seconds)
