"""Questions to agents from the page, and what they said."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

from populace.interviews import InterviewAnswers, InterviewRequest
from shared.errors import InvalidInputError, NoRespondersError
from shared.service import ask

if TYPE_CHECKING:
    from services.manager.manager import Manager

_WITHIN = 600.0
_HELD = 20
_AGENTS_HELD = 500


class InterviewBook:
    """Asks agents, and remembers the last answers of each for the page.

    Args:
        manager: whose.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._held: OrderedDict[tuple[str, str], deque[dict[str, Any]]] = OrderedDict()

    def of(self, run: str, agent: str) -> list[dict[str, Any]]:
        """What an agent was asked from here, oldest first."""
        return list(self._held.get((run, agent), ()))

    def forget(self, run: str) -> None:
        """A run was deleted."""
        for key in [key for key in self._held if key[0] == run]:
            del self._held[key]

    async def ask(self, run: str, request: InterviewRequest) -> InterviewAnswers:
        """Ask agents of a run that is under way.

        Raises:
            InvalidInputError: the run is not under way.
            RemoteError: there is no such agent.
            BusError: the run's owner does not answer.
        """
        if not self._manager.is_live(run):
            raise InvalidInputError(
                f"the run {run!r} is not under way: agents answer while they live; resume it "
                "(with more rounds, if it is finished) to ask them"
            )
        subject = self._manager.settings.subjects.run_owner(run, "interview")
        try:
            found = await ask(
                self._manager.bus, subject, request, InterviewAnswers, timeout=_WITHIN, patience=2
            )
        except NoRespondersError:
            raise InvalidInputError(
                f"nobody plays the run {run!r} at this moment; try again in a second"
            ) from None
        for answer in found.answers:
            held = self._held.setdefault((run, answer.agent), deque(maxlen=_HELD))
            held.append(
                {
                    "time": time.time(),
                    "round": found.round,
                    "question": request.question,
                    "text": answer.text,
                    "error": answer.error,
                    "remember": request.remember,
                }
            )
            self._held.move_to_end((run, answer.agent))
        while len(self._held) > _AGENTS_HELD:
            self._held.popitem(last=False)
        return found
