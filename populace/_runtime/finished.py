"""What agents have finished in the round under way, so that a crash has none of it done again.

With ``durability: call``, an answer to a call of the scenario is written down before it is given,
with what its agent holds by then. When the round is played again, such an agent is given that
state and that answer, and does nothing. That holds only for agents who had to do with nobody but
the scenario and models: whoever called, or was called by, another agent or an environment in this
round (is *mixed*) does it all again, since they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from populace._random import AgentRandom
from populace._runtime.cost import Cost
from populace._runtime.saving import give_state, state_of
from populace.agent import Agent
from populace.errors import WireError
from shared.errors import BusError, CodecError
from shared.logs import get_logger
from shared.streams import append_patiently

if TYPE_CHECKING:
    from populace._runtime.shard import Group, Shard

_log = get_logger(__name__)

_ROOM = 4096
_MIXED = -1

Outcome = tuple[Any, Any, WireError | None, list[Any] | None, float]
"""What the agent held, its answer, or its error, what it cost, and the seconds that it took."""


class Finished:
    """The finished calls of one shard's agents.

    Args:
        shard: the shard.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._mixed: set[int] = set()
        self._mixed_round = -1
        self._written: set[int] = set()
        """Agents of whom something was written in this round."""
        self._numbers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: dict[tuple[int, int, str], dict[int, Outcome]] = {}
        """By round, population call and method: what agents had finished before a crash."""

    # Writing
    def mix(self, indexes: Iterable[int]) -> None:
        """These agents have to do with others in this round."""
        self._enter()
        new = set(indexes) - self._mixed
        self._mixed |= new
        void = sorted(new & self._written)
        if void:
            task = asyncio.ensure_future(self._append(self._packed([_MIXED, "", void])))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _enter(self) -> None:
        if self._shard.round != self._mixed_round:
            self._mixed_round = self._shard.round
            self._mixed.clear()
            self._written.clear()

    async def write(
        self,
        group: Group,
        positions: list[int],
        values: list[Any],
        errors: list[Any],
        costs: list[Cost | None],
        seconds: list[float],
    ) -> None:
        """Write down what was answered; what can't be written is done again after a crash."""
        self._enter()
        failed: dict[int, WireError] = dict(errors)
        rows = []
        for place, position in enumerate(positions):
            index = group.indexes[position]
            # One that is at work again already holds what belongs to that call.
            if index in self._mixed or self._shard.active(index):
                continue
            cost = costs[place] if costs else None
            rows.append(
                [
                    index,
                    _held(self._shard.agents[index]),
                    values[place],
                    failed.get(place),
                    None if cost is None else _plain(cost),
                    round(seconds[place], 4) if seconds else 0.0,
                ]
            )
            self._written.add(index)
        if rows:
            await self._append(self._packed([group.options["step"], group.method, rows]))

    def _packed(self, row: list[Any]) -> list[bytes]:
        """A row as messages; at once, before anything else happens to the agents."""
        worker = self._shard.worker
        try:
            data = worker.codec.pack(row)
        except CodecError as error:
            _log.debug("finished calls can't be written down", error=str(error))
            return []
        if len(data) <= worker.bus.max_payload - _ROOM:
            return [data]
        step, method, rows = row
        half = len(rows) // 2
        if not half:
            return []
        parts = (rows[:half], rows[half:])
        return [data for part in parts for data in self._packed([step, method, part])]

    async def _append(self, messages: list[bytes]) -> None:
        worker = self._shard.worker
        subject = worker.subjects.run_finished(worker.run, self._mixed_round, self._shard.id)
        for data in messages:
            self._numbers += 1
            name = f"{worker.id}/{self._shard.id}/finished/{self._numbers}"
            try:
                await append_patiently(worker.bus, subject, data, headers={}, message_id=name)
            except BusError as error:
                _log.warning("finished calls are not written down", error=str(error))

    # Taking up
    async def read(self, round_number: int) -> None:
        """Read what was finished in a round before a crash.

        Raises:
            BusError: it can't be read.
        """
        worker = self._shard.worker
        subject = worker.subjects.run_finished(worker.run, round_number, self._shard.id)
        mixed: set[int] = set()
        async for message in worker.bus.read(worker.subjects.stream_states, (subject,)):
            step, method, rows = worker.codec.unpack(message.data)
            if step == _MIXED:
                mixed.update(rows)
                continue
            known = self._known.setdefault((round_number, step, method), {})
            for index, *outcome in rows:
                known[index] = tuple(outcome)
        for known in self._known.values():
            for index in mixed & known.keys():
                del known[index]

    def answered(self, group: Group, positions: Sequence[int]) -> list[int]:
        """Answer what is known; returns the positions that are left to be done."""
        known = self._known.get((group.round, group.options.get("step", 0), group.method))
        if not known:
            return list(positions)
        left = []
        for position in positions:
            index = group.indexes[position]
            outcome = known.pop(index, None)
            if outcome is None:
                left.append(position)
                continue
            held, value, error, cost, seconds = outcome
            try:
                _give(self._shard.agents[index], held)
            except Exception as raised:  # the agent's own code
                _log.warning("a finished call is done again", error=str(raised))
                left.append(position)
                continue
            spent = None if cost is None else _cost(cost)
            if error is not None:
                self._shard.answer_error(group, position, error, seconds, spent)
            else:
                self._shard.answer(group, position, value, seconds, spent)
        return left

    @property
    def knows(self) -> bool:
        """Whether anything is left of what was read."""
        return bool(self._known)

    def forget(self) -> None:
        """The round in which a crash was is over."""
        self._known.clear()


def _held(agent: Any) -> list[Any] | None:
    if not isinstance(agent, Agent):
        return None
    memory = getattr(agent, "_memory", None)
    source: AgentRandom | None = getattr(agent, "_random", None)
    return [
        state_of(agent),
        None if memory is None else memory.messages,
        getattr(agent, "_questions", None),
        None if source is None else [source.key, source.state],
    ]


def _give(agent: Any, held: list[Any] | None) -> None:
    if held is None:
        return
    state, messages, questions, source = held
    agent.__dict__.clear()
    give_state(agent, state)
    if messages is not None:
        agent.memory.messages = messages
    if questions is not None:
        agent._questions = tuple(questions)
    if source is not None:
        agent._random = AgentRandom(source[1], source[0])


def _plain(cost: Cost) -> list[Any]:
    return [cost.tokens_in, cost.tokens_out, cost.model, cost.backend]


def _cost(parts: list[Any]) -> Cost:
    made = Cost()
    made.tokens_in, made.tokens_out, made.model, made.backend = parts
    return made
