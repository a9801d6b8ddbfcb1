"""Whose turn it is to record: one process of an installation does, and others wait for its end.

The holder stands in one entry of a bucket, changed by compare and set. It writes the entry anew
each second and before each thing that can't be undone; so one that was stopped for a while, and has
been replaced, finds out before it does harm. Who waits asks the holder itself whether it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shared.bus import Bus, Entry, KeyValue
from shared.errors import BusError, BusTimeoutError, NoRespondersError, RevisionConflictError
from shared.logs import get_logger
from shared.subjects import Subjects

_log = get_logger(__name__)

Result = TypeVar("Result")

_LOCKED_WITHIN, _LOCKED_AGAIN = 60.0, 0.05
_KEY = "recorder"
_RENEW_EVERY = 1.0
_LOOK_EVERY = 0.5
_ANSWER_WITHIN = 1.0
_ASK_AGAIN_AFTER = 0.3


def writing(base: Path, work: Callable[..., Result], *arguments: Any) -> Result:
    """Do something to runs' folders while no other process does; in a thread.

    The seat says whose turn it is to begin. This is for what has begun and takes long: a recorder
    that was told to stop, or whose connection broke, may still be at it when another has the seat.

    Args:
        base: where the folders are.
        work: what is to be done.
        arguments: its own.

    Raises:
        OSError: another process does not end, or the folder can't be used.
    """
    base.mkdir(parents=True, exist_ok=True)
    lock = os.open(base, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _LOCKED_WITHIN
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOCKED_AGAIN)
            except OSError:
                break  # a file system without locks: the seat must do
        return work(*arguments)
    finally:
        os.close(lock)


class SeatLostError(BusError):
    """Another process records by now."""


class Seat:
    """The place of the one who records.

    Args:
        bus: a connection; by its process the holder is known, and asked.
        subjects: the installation's.
    """

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self._revision = 0
        """Of the entry as it was last written here; 0: the seat is not held."""
        self._renewed = 0.0

    async def _bucket(self) -> KeyValue:
        return await self._bus.bucket(self._subjects.bucket_recorder)

    async def take(self, stopping: asyncio.Event) -> bool:
        """Take the seat, once nobody else has it.

        Args:
            stopping: set when it is no longer wanted.

        Returns:
            Whether it is held.

        Raises:
            BusError: the broker does not answer.
        """
        told = False
        while not stopping.is_set():
            entry = await (await self._bucket()).get(_KEY)
            if await self._is_free(entry):
                with contextlib.suppress(RevisionConflictError):  # another was quicker
                    await self._write(self._bus.process, 0 if entry is None else entry.revision)
                    return True
            if not told:
                _log.info("another recorder is at work; this one waits")
                told = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY):
                    await stopping.wait()
        return False

    async def _is_free(self, entry: Entry | None) -> bool:
        holder = "" if entry is None else entry.value.decode()
        if holder in ("", self._bus.process):
            return True
        if await self._answers(holder):
            return False
        await asyncio.sleep(_ASK_AGAIN_AFTER)
        return not await self._answers(holder)

    async def _answers(self, holder: str) -> bool:
        try:
            subject = self._subjects.service_state(holder)
            await self._bus.request(subject, b"", timeout=_ANSWER_WITHIN)
        except (NoRespondersError, BusTimeoutError):
            return False
        return True

    async def _write(self, holder: str, revision: int) -> None:
        self._revision = await (await self._bucket()).write(_KEY, holder.encode(), revision)
        self._renewed = time.monotonic()

    async def keep(self) -> None:
        """Renew it from time to time.

        Raises:
            SeatLostError: another has it by now.
            BusError: the broker does not answer.
        """
        if time.monotonic() - self._renewed >= _RENEW_EVERY:
            await self.renew()

    async def renew(self) -> None:
        """Make sure that it is still held here.

        Raises:
            SeatLostError: another has it by now.
            BusError: the broker does not answer.
        """
        process = self._bus.process
        try:
            await self._write(process, self._revision)
        except RevisionConflictError:
            # Or it was written here, and the broker's word of that was lost.
            entry = await (await self._bucket()).get(_KEY)
            if entry is None or entry.value.decode() != process:
                self._revision = 0
                raise SeatLostError("another recorder is at work by now") from None
            await self._write(process, entry.revision)

    async def give_back(self) -> None:
        """Leave it to the next, which then need not ask.

        Raises:
            BusError: it could not be said.
        """
        if self._revision:
            with contextlib.suppress(RevisionConflictError):  # it is another's
                await self._write("", self._revision)
            self._revision = 0
