"""Placeholders: what a call to an agent returns at once, in place of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from populace._runtime.driver import CallTask, Parking, stepping

if TYPE_CHECKING:
    from populace._runtime.caller import Caller

T = TypeVar("T")

_PENDING, _VALUE, _ERROR, _CANCELLED, _KEPT, _REMOTE = range(6)


class Placeholder(Parking, Generic[T]):
    """Stands for an answer that is still to come.

    ``await`` gives the answer, or raises ``AgentError``. It may be awaited any number of
    times, by any number of tasks; cancelling a task that awaits leaves the call alone, only
    ``cancel`` ends it. Given to another agent's call, at any depth in lists and dicts, it
    travels as a reference and is fetched from the worker that holds the answer. A method gets
    the answer itself, unless its parameter is annotated ``Placeholder``: then the method
    starts at once, and waits when it awaits.
    """

    __slots__ = (
        "__weakref__",
        "_caller",
        "_source",
        "_state",
        "_value",
        "_waiters",
        "call",
        "deadline",
        "kept",
        "label",
        "method",
        "position",
        "shard",
        "used",
        "wanted",
    )

    def __init__(self, caller: Caller, shard: str, label: str, method: str) -> None:
        self._caller = caller
        self._state = _PENDING
        self._value: Any = None
        self._waiters: list[Any] | None = None
        self._source: tuple[str, int, int, str, bool] | None = None
        self.shard = shard
        self.label = label
        self.method = method
        self.call = -1
        """The caller's number of the group of calls; -1 until it is sent."""
        self.position = 0
        self.kept = False
        """Whether its answer stays on the worker that makes it."""
        self.used = False
        """Whether it was given to another call."""
        self.wanted = False
        """Whether anyone here waits for the answer itself."""
        self.deadline: float | None = None

    @classmethod
    def _remote(
        cls, caller: Caller, source: tuple[str, int, int, str, bool], label: str, method: str
    ) -> Placeholder[Any]:
        made: Placeholder[Any] = cls(caller, source[3], label, method)
        made._state = _REMOTE
        made._source = source
        return made

    def done(self) -> bool:
        """Whether the call is over: answered, failed or cancelled."""
        return self._state in (_VALUE, _ERROR, _CANCELLED, _KEPT)

    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self._state == _CANCELLED

    def cancel(self) -> bool:
        """End the call, also where it runs; returns False if it was over already."""
        if self._state != _PENDING:
            return False
        self._caller.cancel(self)
        self._settle(_CANCELLED, None)
        return True

    def with_timeout(self, seconds: float) -> Placeholder[T]:
        """The placeholder itself, whose call fails and is cancelled after so many seconds.

        Raises:
            ValueError: seconds isn't above zero.
        """
        if not seconds > 0:
            raise ValueError(f"a timeout must be above 0 seconds, not {seconds!r}")
        self._caller.set_timeout(self, seconds)
        return self

    def add_done_callback(self, callback: Callable[[Placeholder[T]], object]) -> None:
        """Have ``callback(self)`` called from the event loop once the answer is here."""
        if self._here():
            asyncio.get_running_loop().call_soon(callback, self)
            return
        future = self._future()
        future.add_done_callback(lambda _: callback(self))

    def _here(self) -> bool:
        return self._state in (_VALUE, _ERROR, _CANCELLED)

    def _want(self) -> None:
        if not self.wanted:
            self.wanted = True
            if self._state in (_KEPT, _REMOTE):
                self._caller.references.fetch(self)

    def _future(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._add_waiter(future)
        self._want()
        return future

    def _add_waiter(self, waiter: Any) -> None:
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)

    def park(self, task: CallTask) -> None:
        """Wake a call of an agent when the answer is here."""
        self._add_waiter(task)
        self._want()

    def __await__(self) -> Generator[Any, None, T]:
        while not self._here():
            if stepping() is not None:
                yield self
            else:
                future = self._future()
                try:
                    yield from future
                finally:
                    if not future.done() and self._waiters:
                        self._waiters.remove(future)
        return self._get()

    def _get(self) -> T:
        if self._state == _VALUE:
            value: T = self._value
            return value
        if self._state == _CANCELLED:
            raise asyncio.CancelledError(f"{self.label}.{self.method} was cancelled")
        raise self._value

    # Settled by the caller, which alone knows what came.
    def _set_value(self, value: Any) -> None:
        if not self._here():
            self._settle(_VALUE, value)

    def _set_error(self, error: BaseException) -> None:
        if not self._here():
            self._settle(_ERROR, error)

    def _set_kept(self) -> None:
        if self._state == _PENDING:
            self._state = _KEPT
            if self.wanted:
                self._caller.references.fetch(self)

    def _settle(self, state: int, value: Any) -> None:
        self._state = state
        self._value = value
        waiters, self._waiters = self._waiters, None
        if waiters:
            for waiter in waiters:
                if type(waiter) is CallTask:
                    waiter._loop.call_soon(waiter.wake, self)
                elif not waiter.done():
                    waiter.set_result(None)

    def __deepcopy__(self, memo: Any) -> Placeholder[T]:
        return self  # it stands for one answer, wherever it is held

    def __format__(self, spec: str) -> str:
        raise TypeError(
            f"a placeholder of {self.label}.{self.method} can't be part of a text; await it first"
        )

    def __repr__(self) -> str:
        state = ("pending", "answered", "failed", "cancelled", "done, kept", "elsewhere")
        return f"<Placeholder {self.label}.{self.method}: {state[self._state]}>"


async def resolve(value: Any) -> Any:
    """The value, with every placeholder in it (in lists and dicts too) replaced by its answer.

    Raises:
        AgentError: one of the calls failed.
    """
    if isinstance(value, Placeholder):
        return await value
    if isinstance(value, list):
        return [await resolve(v) for v in value]
    if isinstance(value, tuple):
        return tuple([await resolve(v) for v in value])
    if isinstance(value, dict):
        return {k: await resolve(v) for k, v in value.items()}
    return value


def failure_in(value: Any) -> BaseException | None:
    """The error that stands in place of an answer which can't be read, if it is one."""
    if type(value) is Placeholder and value._state == _ERROR:
        error: BaseException = value._value
        return error
    return None


def find_placeholders(value: Any) -> list[Placeholder[Any]]:
    """All placeholders in a value, at any depth in lists, tuples and dicts."""
    found: list[Placeholder[Any]] = []
    _gather(value, found)
    return found


_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})


def _gather(value: Any, found: list[Placeholder[Any]]) -> None:
    kind = type(value)
    if kind in _LEAVES:
        return
    if kind is list or kind is tuple:
        for one in value:
            _gather(one, found)
    elif kind is dict:
        for one in value.values():
            _gather(one, found)
    elif isinstance(value, Placeholder):
        found.append(value)
