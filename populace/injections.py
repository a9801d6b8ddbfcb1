"""What is injected into a run: news, other parameters, whatever its scenario understands.

An event comes before a round. Planned ones name the round, or a time after the start; those that
come by hand go before the next round that begins. As soon as an event has its round, that is kept,
so that the round brings it again if it is played again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shared.errors import InvalidInputError
from shared.messages.scenario import PlannedEvent
from shared.problems import first_problem

if TYPE_CHECKING:
    from pydantic import BaseModel

Keep = Callable[[str, PlannedEvent], Awaitable[None]]


class Injections:
    """The events of one run.

    Args:
        planned: as the scenario's file has them.
        kept: events that have their round already, and those that wait, by their names.
        keep: keeps an event that has got its round.
        clock: seconds since the run began, all its lives together.
    """

    def __init__(
        self,
        planned: list[PlannedEvent],
        kept: dict[str, PlannedEvent],
        keep: Keep,
        clock: Callable[[], float],
    ) -> None:
        self._events = {f"planned-{i}": event for i, event in enumerate(planned)}
        self._events.update(kept)
        self._keep = keep
        self._clock = clock

    def take(self, name: str, event: PlannedEvent) -> None:
        """An event has come by hand."""
        self._events.setdefault(name, event)

    def skip(self, number: int) -> None:
        """What came before these rounds has come: they were played, and are not played again."""
        for event in self._events.values():
            event.done = event.done or (event.round is not None and event.round <= number)

    async def due(self, number: int) -> list[tuple[str, PlannedEvent]]:
        """The events that go before a round, by name, in their order.

        Raises:
            BusError: it can't be kept that they do.
        """
        for name, event in list(self._events.items()):  # more may come meanwhile
            waits = event.round is None and self._clock() >= (event.after or 0.0)
            late = event.round is not None and event.round < number and not event.done
            if waits or late:
                event.round, event.after = number, None
                await self._keep(name, event)
        found = [(name, e) for name, e in self._events.items() if e.round == number]
        for _, event in found:
            event.done = True
        return sorted(found, key=lambda item: item[1].time)  # those of the file first, in its order

    async def refuse(self, name: str, event: PlannedEvent, why: str) -> None:
        """Note that an event that came by hand could not be used.

        Raises:
            BusError: it can't be kept.
        """
        event.refused = why
        await self._keep(name, event)

    def told(self, number: int) -> list[dict[str, Any]]:
        """What has been injected up to a round, for the manifest."""
        found = [(n, e) for n, e in self._events.items() if e.round is not None]
        found.sort(key=lambda item: (item[1].round or 0, item[1].time))
        return [
            {
                "round": event.round,
                "name": event.name,
                "data": event.data,
                "by": "file" if name.startswith("planned-") else "hand",
                **({"refused": event.refused} if event.refused else {}),
            }
            for name, event in found
            if event.round is not None and event.round <= number
        ]


def changed_params(params: BaseModel, data: dict[str, Any]) -> BaseModel:
    """Parameters of which some are other than they were; dots lead into what is nested.

    Raises:
        InvalidInputError: there is no such parameter, or the value can't be used.
    """
    fields: dict[str, Any] = params.model_dump()
    for dotted, value in data.items():
        *path, last = dotted.split(".")
        place = fields
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise InvalidInputError(f"params.{dotted}: {part} holds no keys")
        place[last] = value
    try:
        return type(params).model_validate(fields)
    except ValidationError as error:
        raise InvalidInputError(f"params.{first_problem(error, type(params))}") from None
