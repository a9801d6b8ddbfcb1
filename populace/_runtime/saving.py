"""What agents hold, as bytes: written down at the end of a round, and taken up again.

A population's shard is packed by columns: the names of the attributes once, then for each a value
that all agents share, or one value per agent. Where agents differ in class or attributes, they
are packed one by one. What follows from (seed, agent, round), the random stream and the numbers of
questions, is not kept: a new round begins them anew.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from populace.agent import Agent
from populace.errors import StateError
from shared.bus import Bus
from shared.codec import Codec, from_public, pack_plain, readable
from shared.errors import BusError, CodecError
from shared.messages import batch
from shared.messages.control import SavedPart
from shared.streams import append_patiently
from shared.subjects import Subjects

if TYPE_CHECKING:
    from populace._runtime.shard import Shard

_ROOM = 4096
_AT_ONCE = 8
_IMMUTABLE = frozenset({str, int, float, bool, type(None), bytes})
_COLUMNS, _ROWS = range(2)
_AGENT, _BROKEN = range(2)


class StateStore:
    """Parts of a run's state in the broker, each in as many messages as it takes.

    Args:
        bus: the connection.
        subjects: the installation's subjects.
        run: the run.
        life: which life of it writes.
    """

    def __init__(self, bus: Bus, subjects: Subjects, run: str, life: int) -> None:
        self._bus = bus
        self._subjects = subjects
        self._run = run
        self._life = life

    async def write(self, round_number: int, name: str, data: bytes) -> SavedPart:
        """Store a part; returns where it lies.

        Raises:
            BusError: the broker does not take it.
        """
        limit = self._bus.max_payload - _ROOM
        subject = self._subject(name, round_number, self._life)
        count = max(1, -(-len(data) // limit))
        slots = asyncio.Semaphore(_AT_ONCE)

        async def store(number: int) -> None:
            piece = data[number * limit : (number + 1) * limit]
            async with slots:
                await append_patiently(
                    self._bus,
                    subject,
                    pack_plain([self._life, number, piece]),
                    headers={},
                    message_id=f"{self._bus.process}/{subject}/{number}",
                )

        await asyncio.gather(*(store(number) for number in range(count)))
        return SavedPart(round=round_number, life=self._life, pieces=count)

    def _subject(self, name: str, round_number: int, life: int) -> str:
        # By life, so that none removes what another wrote.
        return self._subjects.run_state(self._run, round_number, f"{life}.{name}")

    async def read(self, name: str, part: SavedPart) -> bytes:
        """A part that was stored.

        Raises:
            BusError: it is not there, or not whole.
        """
        subject = self._subject(name, part.round, part.life)
        pieces: dict[int, bytes] = {}
        async for message in self._bus.read(self._subjects.stream_states, (subject,)):
            life, number, piece = from_public(message.data)
            if life == part.life:
                pieces[number] = piece
        if len(pieces) != part.pieces:
            raise BusError(
                f"of the state of {name!r} after round {part.round}, {len(pieces)} of "
                f"{part.pieces} pieces are there"
            )
        return b"".join(pieces[number] for number in range(part.pieces))

    async def drop(self, name: str, part: SavedPart) -> None:
        """Remove a part that another has replaced."""
        subject = self._subject(name, part.round, part.life)
        await self._bus.purge(self._subjects.stream_states, subject)


# Packing
def pack_shard(shard: Shard) -> bytes:
    """What the agents of a shard hold.

    Raises:
        StateError: an agent holds something that can't be written down; it is named.
    """
    codec = shard.worker.codec
    agents = shard.agents
    deeds = [getattr(agent, "_deeds", 0) for agent in agents] if shard.some_did else []
    memories = {
        index: memory.messages
        for index, agent in enumerate(agents if shard.some_remember else ())
        if (memory := getattr(agent, "_memory", None)) is not None and memory.messages
    }
    row = [
        shard.round,
        deeds if any(deeds) else None,
        memories,
        shard.listeners,
        # Single agents are of a class each, which has to be kept beside them.
        (shard.cls and _columns(agents)) or [_ROWS, [_row(shard, i) for i in range(len(agents))]],
    ]
    try:
        return codec.pack(row)
    except CodecError as error:
        raise StateError(_culprit(shard, codec, str(error))) from None


def _columns(agents: list[Any]) -> list[Any] | None:
    """The agents' attributes by column, if they are of one class and have the same ones."""
    if not agents:
        return None
    cls = type(agents[0])
    if not issubclass(cls, Agent) or _has_own_state(cls) or set(map(type, agents)) != {cls}:
        return None
    if _slots(cls):
        return None
    dicts = [agent.__dict__ for agent in agents]
    names = list(dicts[0])
    if len(set(map(len, dicts))) != 1:
        return None
    try:
        columns = [_column(list(map(itemgetter(name), dicts))) for name in names]
    except KeyError:
        return None
    return [_COLUMNS, names, columns]


def _column(values: list[Any]) -> list[Any]:
    first = values[0]
    if type(first) in _IMMUTABLE and set(map(type, values)) == {type(first)}:
        if values.count(first) == len(values):
            return [batch.SHARED, first]
        return batch.pack_values(values)
    return [batch.COLUMN, values]


def _row(shard: Shard, index: int) -> Any:
    agent = shard.agents[index]
    if agent is None:
        return None
    if not isinstance(agent, Agent):
        return [_BROKEN, agent.error]
    return [_AGENT, *shard.made_of.get(index, (None, None)), state_of(agent)]


def _has_own_state(cls: type) -> bool:
    return any("__getstate__" in vars(base) for base in cls.__mro__[:-1])


def state_of(agent: Agent) -> Any:
    cls = type(agent)
    if _has_own_state(cls):
        return agent.__getstate__()
    slots = _slots(cls)
    if not slots:
        return agent.__dict__
    return {**agent.__dict__, **{s: getattr(agent, s) for s in slots if hasattr(agent, s)}}


@functools.cache
def _slots(cls: type) -> tuple[str, ...]:
    """Attributes that the agent's own classes keep in slots."""
    own = cls.__mro__[: cls.__mro__.index(Agent)]
    names = [vars(base).get("__slots__", ()) for base in own]
    return tuple(n for ns in names for n in ([ns] if isinstance(ns, str) else ns))


def _culprit(shard: Shard, codec: Codec, said: str) -> str:
    """Which attribute of which class can't be written down."""
    for index, agent in enumerate(shard.agents):
        if not isinstance(agent, Agent):
            continue
        state = state_of(agent)
        for name, value in state.items() if isinstance(state, dict) else [("state", state)]:
            try:
                codec.pack(value)
            except CodecError as error:
                return f"{type(agent).__name__}.{name} of {shard.agent_name(index)}: {error}"
    return said


# Unpacking
def read_agent(data: bytes, index: int) -> tuple[dict[str, Any], list[dict[str, str]]] | None:
    """What one agent of a packed shard held, in plain terms: attributes, and memory.

    Args:
        data: as ``pack_shard`` made it.
        index: the agent's place in the shard.

    Raises:
        CodecError: the bytes hold something else.
    """
    try:
        _, _, memories, _, content = readable(data)
        memory = list(memories.get(index, ()))
        if content[0] == _COLUMNS:
            attributes = {}
            for name, packed in zip(content[1], content[2], strict=True):
                by_agent, values = batch.unpack_argument(packed, str)
                attributes[name] = values[index] if by_agent else values
            return attributes, memory
        row = content[1][index]
        if row is None or row[0] == _BROKEN:
            return None
        state = row[3]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise CodecError(f"the state of a shard has another shape: {error!r}") from None
    return (state if isinstance(state, dict) else {"state": state}), memory


def read_environment(data: bytes) -> dict[str, Any]:
    """What a packed environment held, in plain terms.

    Raises:
        CodecError: the bytes hold something else.
    """
    try:
        state = readable(data)[2]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise CodecError(f"the state of an environment has another shape: {error!r}") from None
    return state if isinstance(state, dict) else {"state": state}


def unpack_shard(
    shard: Shard, data: bytes, load: Callable[[str, str | None], type[Agent]]
) -> list[list[Any]]:
    """Fill a shard with the agents that were packed; returns what they listened to.

    Args:
        shard: an empty one.
        data: as ``pack_shard`` made it.
        load: finds the class of a single agent.

    Raises:
        CodecError: the bytes hold something else.
        CodeError: a class can't be found.
    """
    from populace._runtime.shard import _Broken

    round_number, deeds, memories, listeners, content = shard.worker.codec.unpack(data)
    if round_number != shard.round:
        shard._enter_round(round_number)
    if content[0] == _COLUMNS:
        assert shard.cls is not None
        _make_columns(shard, shard.cls, content[1], content[2])
    else:
        for index, row in enumerate(content[1]):
            if row is None:
                shard._put(index, None)
            elif row[0] == _BROKEN:
                shard._put(index, _Broken(row[1]))
            else:
                _, path, folder, state = row
                cls = shard.cls if path is None else load(path, folder)
                assert cls is not None
                if path is not None:
                    shard.made_of[index] = (path, folder)
                shard._put(index, _make(shard, cls, index, state))
    for index, number in enumerate(deeds or ()):
        if number:
            shard.agents[index]._deeds = number
            shard.some_did = True
    for index, messages in memories.items():
        shard.agents[index].memory.messages = messages
    shard.worker.agents_created(len(shard.agents))
    return list(listeners)


def _make_columns(shard: Shard, cls: type[Agent], names: list[str], columns: list[Any]) -> None:
    new, intern, size = cls.__new__, shard.worker.intern, len(shard.agents)
    for index in range(size):
        agent = shard.agents[index] = new(cls)
        agent._shard = shard
        agent._index = index
    for name, packed in zip(names, columns, strict=True):
        by_agent, values = batch.unpack_argument(packed, intern)
        if by_agent and len(values) != size:
            raise CodecError(f"{len(values)} values of {name!r} were kept for {size} agents")
        for index, agent in enumerate(shard.agents):
            agent.__dict__[name] = values[index] if by_agent else values


def _make(shard: Shard, cls: type[Agent], index: int, state: Any) -> Agent:
    agent = cls.__new__(cls)
    agent._shard = shard
    agent._index = index
    give_state(agent, state)
    return agent


def give_state(agent: Agent, state: Any) -> None:
    """Have an agent hold what another held."""
    restore = getattr(agent, "__setstate__", None)
    if restore is not None:
        restore(state)
        return
    slots = _slots(type(agent))
    if not slots:
        agent.__dict__.update(state)
        return
    for name, value in state.items():
        setattr(agent, name, value)
