"""The other model services: what has one of them in hand?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from shared.bus import Bus, Message
from shared.errors import BusError
from shared.subjects import Subjects

_STRANGERS, _KNOWN, _BACK = 0.1, 1.0, 3.0
"""Seconds for an answer: of services that nobody has heard of; of those that are known; and of
these when the broker was away, which they may find again later."""
_AGAIN = 0.25
_SETTLED, _LONGEST = 5.0, 30.0


class Peers:
    """Asks all other model services whether a message of prompts is in hand there.

    A broker that was away, or has chosen another leader, gives out what somebody is still at.

    Args:
        bus: this process's connection.
        subjects: the installation's subjects.
        holds: whether a message (pool, number) is in hand here.
    """

    def __init__(self, bus: Bus, subjects: Subjects, holds: Callable[[str, int], bool]) -> None:
        self._bus = bus
        self._subject = subjects.model_held
        self._inbox = subjects.inbox(bus.process, "held")
        self._holds = holds
        self._known: set[str] = set()
        self._numbers = 0
        self._asked: dict[int, dict[str, bool]] = {}
        """Questions under way: who has answered, and what."""
        self._heard = asyncio.Event()
        self._back_at = float("-inf")

    def reconnected(self) -> None:
        """The broker was away, and is back."""
        self._back_at = time.monotonic()

    async def start(self) -> None:
        """Begin to answer others, and to hear their answers."""
        await self._bus.subscribe(self._subject, self._answer)
        await self._bus.subscribe(self._inbox, self._hear)
        self._ask("", 0, 0)  # so that all know of one another

    def _answer(self, message: Message) -> None:
        asked = json.loads(message.data)
        if asked["service"] == self._bus.process:
            return
        self._known.add(asked["service"])
        told: dict[str, Any] = {
            "service": self._bus.process,
            "number": asked["number"],
            "held": self._holds(asked["pool"], int(asked["message"])),
        }
        with contextlib.suppress(BusError):  # then it may be asked for twice
            self._bus.send(message.reply, json.dumps(told).encode())

    def _hear(self, message: Message) -> None:
        if not message.data:
            return
        told = json.loads(message.data)
        self._known.add(told["service"])
        answers = self._asked.get(told["number"])
        if answers is not None:
            answers[told["service"]] = told["held"]
            self._heard.set()

    def _ask(self, pool: str, message: int, number: int) -> None:
        asked = {
            "service": self._bus.process, "pool": pool, "message": message, "number": number
        }  # fmt: skip
        self._bus.send(self._subject, json.dumps(asked).encode(), reply=self._inbox)

    async def hold(self, pool: str, message: int, strangers: bool = True) -> bool:
        """Whether another service has a message in hand, as far as can be heard.

        Args:
            pool: whose message it is.
            message: its number.
            strangers: whether to wait a moment for services that nobody has heard of yet.
        """
        self._numbers += 1
        number = self._numbers
        answers = self._asked[number] = {}
        first = began = asked_at = time.monotonic()
        settling = began - self._back_at < _SETTLED
        try:
            self._ask(pool, message, number)
            while not any(answers.values()):
                now = time.monotonic()
                if not self._bus.connected and now - first < _LONGEST:
                    await asyncio.sleep(0.05)  # nothing can be heard
                    began, asked_at, settling = time.monotonic(), 0.0, True
                    continue
                missing = self._known - answers.keys()
                patience = _BACK if settling else _KNOWN
                left = began + (patience if missing else _STRANGERS * strangers) - now
                if left <= 0:
                    self._known -= missing  # those are gone
                    break
                if now - asked_at > _AGAIN:
                    self._ask(pool, message, number)
                    asked_at = now
                self._heard.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._heard.wait(), min(left, _AGAIN))
        except BusError:
            return False
        finally:
            del self._asked[number]
        return any(answers.values())
