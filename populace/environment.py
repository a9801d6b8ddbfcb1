"""Environments: shared worlds that agents act in and hear from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from populace._runtime.driver import CallTask, Parking, stepping
from populace.agent import Agent
from populace.proxy import AgentProxy
from shared.errors import InvalidInputError

if TYPE_CHECKING:
    from populace._runtime.caller import Caller
    from populace._runtime.stage import Stage

F = TypeVar("F", bound=Callable[..., Any])


OWN_USE = frozenset({"child", "emit", "until", "snapshot", "restore", "view"})
"""Methods that an environment calls on itself, and nobody from outside."""


def event(function: F) -> F:
    """Marks a method of an environment: when it has returned, everyone who listens is told.

    The event has the method's name; it tells the arguments, the return value, the round and who
    called. What it tells must be plain: numbers, texts, lists, dicts, models.
    """
    if hasattr(function, "_populace_readonly"):
        raise InvalidInputError(f"{function.__name__} can't be both @event and @readonly")
    signature = inspect.signature(function)

    def tell(self: Environment, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        named.pop(next(iter(signature.parameters)))
        self.emit(function.__name__, value, **named)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(self: Environment, *args: Any, **kwargs: Any) -> Any:
            value = await function(self, *args, **kwargs)
            tell(self, args, kwargs, value)
            return value

        made: Any = later
    else:

        @functools.wraps(function)
        def at_once(self: Environment, *args: Any, **kwargs: Any) -> Any:
            value = function(self, *args, **kwargs)
            tell(self, args, kwargs, value)
            return value

        made = at_once
    made._populace_event = function.__name__
    return made  # type: ignore[no-any-return]


def readonly(function: F) -> F:
    """Marks a plain method that changes nothing: it doesn't queue behind a call that waits."""
    if inspect.iscoroutinefunction(function):
        raise InvalidInputError(f"@readonly is for plain methods; {function.__name__} is async")
    if hasattr(function, "_populace_event"):
        raise InvalidInputError(f"{function.__name__} can't be both @event and @readonly")
    function._populace_readonly = True  # type: ignore[attr-defined]
    return function


class Until(Parking):
    """A wait for something to become true in an environment; see ``Environment.until``."""

    __slots__ = ("_stage", "condition")

    def __init__(self, stage: Stage, condition: Callable[[], object]) -> None:
        self._stage = stage
        self.condition = condition

    def __await__(self) -> Generator[Any, None, None]:
        while not self.condition():
            if stepping() is None:
                raise InvalidInputError("until() is awaited in the environment's own method alone")
            yield self

    def park(self, task: CallTask) -> None:
        """Step aside; the stage looks at the condition after each call."""
        self._stage.step_aside(task, self)


class Environment(Agent):
    """A shared world: state in attributes, methods that act on it, events that tell of it.

    Calls are handled one at a time, so state never races. What was done is journalled before it
    is answered: when the process dies, another takes over with the state as of the last answer,
    and a call that is made again for want of an answer takes effect once. For that, methods must
    follow from state, arguments and ``self.random`` alone; an ``async`` method that waits for
    agents, models or time is not done again, its outcome is kept instead.
    """

    __slots__ = ()

    # Attributes, from outside
    @readonly
    def get(self, name: str) -> Any:
        """An attribute's value.

        Raises:
            AttributeError: there is none of that name.
        """
        self._check_attribute(name)
        return getattr(self, name)

    def set(self, name: str, value: Any) -> None:
        """Give an attribute a value.

        Raises:
            AttributeError: there is none of that name.
        """
        self._check_attribute(name)
        setattr(self, name, value)

    def compare_and_set(self, name: str, expected: Any, value: Any) -> bool:
        """Give an attribute a value if it has the expected one; returns whether it had."""
        if self.get(name) != expected:
            return False
        setattr(self, name, value)
        return True

    def increment(self, name: str, by: float = 1) -> Any:
        """Add to a number; returns what it is now.

        Raises:
            AttributeError: there is none of that name.
            TypeError: it isn't a number.
        """
        value = self.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{self.path}.{name} is {value!r}, not a number")
        setattr(self, name, value + by)
        return value + by

    @readonly
    def describe(self) -> dict[str, Any]:
        """What it is: path, class, attributes, methods, events, children."""
        methods: list[str] = []
        events: list[str] = []
        for name, function in inspect.getmembers(type(self), inspect.isfunction):
            if name.startswith("_") or name in OWN_USE or hasattr(Agent, name):
                continue
            told = getattr(function, "_populace_event", None)
            (events if told else methods).append(f"{name}{_shown(function)}")
        return {
            "path": self.path,
            "class": type(self).__name__,
            "about": inspect.getdoc(type(self)) or "",
            "attributes": {name: type(getattr(self, name)).__name__ for name in self._attributes()},
            "methods": methods,
            "events": events,
            "children": sorted(self.children),
        }

    def view(self) -> dict[str, Any]:
        """How the manager's page shows it; override it for another picture. Plain values.

        ``kind`` says which: ``chat`` (``messages``: author, text, round), ``map`` (``width``,
        ``height``, ``places`` by name, ``zones``), ``graph`` (``nodes``: name, size; ``edges``:
        pairs of names), ``table`` (``columns``, ``rows``); ``none``: its attributes alone.
        """
        return {"kind": "none"}

    def _attributes(self) -> list[str]:
        own = {n for n in vars(self) if not n.startswith("_")}
        for cls in type(self).__mro__:
            if cls is Environment:
                break
            own.update(n for n in inspect.get_annotations(cls) if not n.startswith("_"))
            own.update(
                n
                for n, value in vars(cls).items()
                if not n.startswith("_") and not callable(value) and not _descriptor(value)
            )
        return sorted(n for n in own if hasattr(self, n))

    def _check_attribute(self, name: str) -> None:
        known = self._attributes()
        if name not in known:
            listed = ", ".join(known) or "none"
            raise AttributeError(
                f"the environment {self.path} has no attribute {name!r} (it has: {listed})"
            )

    # Where it stands
    @property
    def path(self) -> str:
        """Its path: names from the outermost environment down, with dots between."""
        return self._home().population[1:]

    @property
    def parent(self) -> AgentProxy | None:
        """The environment around it, if there is one."""
        above = self.path.rpartition(".")[0]
        return self.environment(above) if above else None

    @property
    def children(self) -> dict[str, AgentProxy]:
        """The environments directly within it, by name."""
        return self._home().worker.directory.children(self.path)

    async def child(
        self, cls: type[Environment], name: str, *args: Any, **kwargs: Any
    ) -> AgentProxy:
        """Make an environment within this one; see ``World.environment``.

        Raises:
            InvalidInputError: the name is taken, or can't be one.
        """
        worker = self._home().worker
        return await worker.make_environment(cls, f"{self.path}.{name}", args, kwargs)

    @property
    def caller(self) -> str:
        """Name of the agent whose call is under way, such as ``"voter/17"``; empty for others."""
        stage: Any = self._home()
        return str(stage.caller_now())

    # For its own methods
    def emit(self, name: str, value: Any = None, /, **arguments: Any) -> None:
        """Tell those who listen of something, as ``@event`` methods do by themselves."""
        stage: Any = getattr(self, "_shard", None)
        if stage is not None:
            stage.emit(name, arguments, value)

    def until(self, condition: Callable[[], object]) -> Until:
        """Wait until something is true, letting other calls in meanwhile.

        ``await self.until(lambda: len(self.bids) == self.bidders)``: the condition is looked at
        after each call; the wait ends before the next call once it holds. A method that waits so
        may not wait for anything else.
        """
        stage: Any = self._home()
        return Until(stage, condition)

    # Kept and restored
    def snapshot(self) -> dict[str, Any]:
        """The state as plain values; override it where attributes hold more than those."""
        return dict(vars(self))

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``snapshot`` gave."""
        vars(self).clear()
        vars(self).update(state)


def _shown(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    shown = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(signature.replace(parameters=shown, return_annotation=inspect.Signature.empty))


def _descriptor(value: Any) -> bool:
    return hasattr(value, "__get__")


class EnvironmentProxy(AgentProxy):
    """Stands for an environment; made by ``World.environment``."""

    __slots__ = ("_make",)

    def __init__(self, caller: Caller, path: str, cls: type | None, make: Any) -> None:
        super().__init__(caller, f"@{path}", 0, path, cls)
        self._make = make

    @property
    def path(self) -> str:
        """The environment's path."""
        return self._label

    async def child(
        self, cls: type[Environment], name: str, *args: Any, **kwargs: Any
    ) -> EnvironmentProxy:
        """Make an environment within this one; see ``World.environment``."""
        made: EnvironmentProxy = await self._make(cls, f"{self._label}.{name}", *args, **kwargs)
        return made
