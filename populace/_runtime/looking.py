"""What a worker tells of its agents and environments to those who look at them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import psutil
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from populace._runtime.saving import state_of
from populace._runtime.stage import Stage
from populace.agent import Agent
from populace.environment import Environment
from populace.personas.people import attributes
from shared.codec import plain
from shared.errors import CodecError, InvalidInputError
from shared.messages.inspection import Attribute, Held, Listens, Look, Looked
from shared.problems import first_problem

if TYPE_CHECKING:
    from populace._runtime.shard import Shard
    from populace._runtime.worker import Worker

_LONGEST = 4000
"""Characters of a value that are shown."""
_MOST_ATTRIBUTES = 200
_MOST_PARTS = 2000
"""Parts of a value, within parts as well, that are looked at."""
_MOST_REMEMBERED = 100
_MOST_LISTENERS = 200
_MOST_SHOWN = 4 * _MOST_REMEMBERED * _LONGEST


class Looking:
    """Answers what is asked about a worker's shards.

    Args:
        worker: the worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def look(self, request: Look) -> Looked:
        """One agent, or one environment.

        Raises:
            InvalidInputError: it isn't here.
        """
        shard = self._worker._shards.get(request.shard)
        agent = None
        if shard is not None and 0 <= request.index < len(shard.agents):
            agent = shard.agents[request.index]
        if shard is None or not isinstance(agent, Agent):
            raise InvalidInputError(f"{request.shard} has no agent {request.index} here")
        if isinstance(shard, Stage):
            return self._environment(shard, agent)
        return self._agent(shard, agent, request.index)

    async def held(self, _: Look) -> Held:
        """The worker itself."""
        worker = self._worker
        process = psutil.Process()
        times = process.cpu_times()
        listens = [one for shard in worker._shards.values() for one in _listeners(shard)]
        return Held(
            worker=worker.id,
            pid=os.getpid(),
            agents=sum(len(s.agents) for s in worker._shards.values() if not isinstance(s, Stage)),
            calls=worker._calls,
            waiting=worker.waiting,
            rss=process.memory_info().rss,
            cpu=times.user + times.system,
            listens=listens[:_MOST_LISTENERS],
            listens_left_out=max(0, len(listens) - _MOST_LISTENERS),
        )

    def _agent(self, shard: Shard, agent: Agent, index: int) -> Looked:
        tasks = shard.active(index)
        memory = getattr(agent, "_memory", None)
        messages = [] if memory is None else memory.messages
        persona = agent.persona
        return Looked(
            name=shard.agent_name(index),
            class_name=type(agent).__name__,
            round=shard.round,
            attributes=shown_attributes(state_of(agent)),
            **shown_memory(messages),
            persona=None if persona is None else attributes(persona),
            text=None if persona is None else persona.text,
            under_way=[task.group.method for task in tasks],
            waiting=shard.queued(index),
        )

    def _environment(self, stage: Stage, agent: Agent) -> Looked:
        assert isinstance(agent, Environment)
        return Looked(
            name=stage.path,
            class_name=type(agent).__name__,
            round=stage.round,
            attributes=shown_attributes(dict(vars(agent))),
            under_way=[task.group.method for task in stage.active(0)],
            waiting=stage.queued(0),
            about=agent.describe(),
            view=shown_view(agent),
        )


def shown_memory(messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The latest messages of a memory, and how many older ones there are."""
    return {
        "memory": [
            {"role": m["role"], "content": m["content"][:_LONGEST]}
            for m in messages[-_MOST_REMEMBERED:]
        ],
        "memory_left_out": max(0, len(messages) - _MOST_REMEMBERED),
    }


class _Said(BaseModel):
    author: str = ""
    text: str = ""
    round: int | None = None
    likes: int | None = None


class _Chat(BaseModel):
    kind: Literal["chat"]
    messages: list[_Said] = Field(default_factory=list)
    left_out: int = 0


class _Map(BaseModel):
    kind: Literal["map"]
    width: float = Field(gt=0)
    height: float = Field(gt=0)
    places: dict[str, tuple[float, float]] = Field(default_factory=dict)
    zones: dict[str, tuple[float, float, float, float]] = Field(default_factory=dict)
    left_out: int = 0


class _Graph(BaseModel):
    kind: Literal["graph"]
    nodes: list[tuple[str, float]] = Field(default_factory=list)
    edges: list[tuple[str, str]] = Field(default_factory=list)
    posts: list[_Said] = Field(default_factory=list)
    left_out: int = 0


class _Table(BaseModel):
    kind: Literal["table"]
    columns: list[str] = Field(default_factory=list)
    rows: list[list[Any]] = Field(default_factory=list)


class _NoView(BaseModel):
    kind: Literal["none"] = "none"
    why: str = ""


_VIEWS: TypeAdapter[_Chat | _Map | _Graph | _Table | _NoView] = TypeAdapter(
    Annotated[_Chat | _Map | _Graph | _Table | _NoView, Field(discriminator="kind")]
)


def shown_view(environment: Environment) -> dict[str, Any]:
    """How an environment wants to be shown, with all that its kind of view has.

    Whatever its class makes of it, there is a view: ``none``, and why.
    """
    try:
        view = plain(environment.view())
        if len(json.dumps(view)) > _MOST_SHOWN:
            raise CodecError("the view is too large to be shown")
        return _VIEWS.validate_python(view).model_dump(mode="json")
    except ValidationError as error:
        why = f"the view does not fit its kind: {first_problem(error)}"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return {"kind": "none", "why": why}


def shown_attributes(state: Any) -> list[Attribute]:
    """What somebody holds, in words, each part cut where it is long."""
    if not isinstance(state, dict):
        state = {"state": state}
    public = ((str(n), value) for n, value in state.items() if not str(n).startswith("_"))
    return [_shown(name, value) for name, value in itertools.islice(public, _MOST_ATTRIBUTES)]


def _shown(name: str, value: Any) -> Attribute:
    kind = type(value).__name__
    try:
        length = len(value) if isinstance(value, (list, tuple, dict, set, frozenset)) else 0
        text = json.dumps(plain(_some(value, [_MOST_PARTS])), ensure_ascii=False)
        kind = f"{kind} of {length:,}" if length else kind
    except (CodecError, TypeError, ValueError):
        text = repr(value)
    return Attribute(name=name, type=kind, text=text[:_LONGEST], cut=max(0, len(text) - _LONGEST))


def _some(value: Any, left: list[int]) -> Any:
    """So much of a value as may be shown: the worker has other things to do than to write it.

    Args:
        value: the value.
        left: how many parts of it are still to be looked at, all levels together.
    """
    left[0] -= 1
    if isinstance(value, str):
        return value[: 2 * _LONGEST]
    if isinstance(value, dict):
        pairs = itertools.takewhile(lambda _: left[0] > 0, value.items())
        return {k: _some(v, left) for k, v in pairs}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_some(v, left) for v in itertools.takewhile(lambda _: left[0] > 0, value)]
    return value


def _listeners(shard: Shard) -> list[Listens]:
    if isinstance(shard, Stage):
        rows = [[0, *arguments] for arguments in shard.own_listeners]
    else:
        rows = shard.listeners
    return [
        Listens(
            who=shard.agent_name(index),
            path=path,
            event=event,
            handler=method,
            when=when,
            below=below,
            durable=durable,
        )
        for index, path, event, method, when, below, durable in rows
    ]
