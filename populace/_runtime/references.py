"""Placeholders that travel: as references, resolved from worker to worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from populace._runtime import pieces
from populace._runtime.open_calls import settle
from populace.errors import (
    CallTimeoutError,
    PlaceholderLostError,
    WorkerLostError,
    error_from_wire,
)
from populace.placeholder import Placeholder
from shared.codec import FIRST_FREE_EXTENSION
from shared.errors import BusError, CodecError, PopulaceError
from shared.logs import get_logger
from shared.messages import batch

if TYPE_CHECKING:
    from populace._runtime.caller import Caller

_log = get_logger(__name__)

PLACEHOLDER_EXTENSION = FIRST_FREE_EXTENSION
_LENT_FOR = 600.0
_MOST_LENT = 100_000

Source = tuple[str, int, int, str, bool]
"""Caller's inbox, number of the call, position, shard, and whether the answer is kept there."""


class References:
    """What one caller knows of answers that it passed on, or was passed.

    Args:
        caller: whose they are; its codec learns to pack and unpack placeholders.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.seen = 0
        """Placeholders that came in messages so far; workers look whether it rose."""
        self.bad_objects = 0
        """Objects in messages that could not be made again."""
        self._numbers = 0
        self._fetches: dict[int, tuple[Placeholder[Any], float]] = {}
        """What was asked for, and when it is overdue; oldest first."""
        self._asks: dict[str, list[list[Any]]] = {}
        """Rows of FETCH messages that leave at the end of this tick, by subject."""
        self._lent: dict[tuple[int, int], tuple[Placeholder[Any], float]] = {}
        codec = caller.codec
        codec.register(PLACEHOLDER_EXTENSION, Placeholder, self._encode, self._decode)
        codec.on_bad_object = self._bad_object

    @property
    def idle(self) -> bool:
        """Whether nothing is lent or asked for."""
        return not self._lent and not self._fetches

    def close(self, reason: str) -> None:
        """Fail all that is asked for."""
        for placeholder, _ in list(self._fetches.values()):
            placeholder._set_error(
                PlaceholderLostError(
                    placeholder.label, placeholder.method, "placeholder_lost", reason
                )
            )
        self._fetches.clear()

    def sweep(self, now: float) -> None:
        """Fail what is overdue, and let go of what was lent too long ago, or is too much."""
        while self._fetches:
            number, (placeholder, due) = next(iter(self._fetches.items()))
            if due > now:
                break
            del self._fetches[number]
            label, method = placeholder.label, placeholder.method
            reason = f"no answer within {self._caller.timeout:g} s"
            placeholder._set_error(CallTimeoutError(label, method, "timeout", reason))
        while self._lent:
            key, (_, since) = next(iter(self._lent.items()))
            if now - since < _LENT_FOR and len(self._lent) < _MOST_LENT:
                break
            del self._lent[key]

    def shards_lost(self, shards: set[str], reason: str) -> None:
        """Fail what was asked of shards that are gone."""
        for number, (placeholder, _) in list(self._fetches.items()):
            if placeholder.shard in shards:
                del self._fetches[number]
                placeholder._set_error(
                    WorkerLostError(placeholder.label, placeholder.method, "worker_lost", reason)
                )

    # Packing
    def _encode(self, placeholder: Placeholder[Any]) -> list[Any]:
        label, method = placeholder.label, placeholder.method
        if placeholder._source is not None and not placeholder._here():
            return ["r", *placeholder._source, label, method]
        if placeholder._here():
            try:
                return ["v", placeholder._get()]
            except asyncio.CancelledError:
                return ["e", ["cancelled", "the call was cancelled", ""], label, method]
            except PopulaceError as error:
                kind = getattr(error, "kind", type(error).__name__)
                text = getattr(error, "message", str(error))
                trace = getattr(error, "remote_traceback", "")
                return ["e", [kind, text, trace], label, method]
        kept = placeholder.kept
        if not kept:
            self._lent[(placeholder.call, placeholder.position)] = (placeholder, time.monotonic())
        where = (self._caller.inbox, placeholder.call, placeholder.position)
        return ["r", *where, placeholder.shard, kept, label, method]

    def _decode(self, parts: list[Any]) -> Any:
        if parts[0] == "v":
            return parts[1]
        self.seen += 1
        if parts[0] == "e":
            failed: Placeholder[Any] = Placeholder(self._caller, "", parts[2], parts[3])
            failed._set_error(error_from_wire(parts[2], parts[3], parts[1]))
            return failed
        _, inbox, call, position, shard, kept, label, method = parts
        source = (inbox, call, position, shard, kept)
        return Placeholder._remote(self._caller, source, label, method)

    def _bad_object(self, error: CodecError) -> Placeholder[Any]:
        """Stands for an argument that can't be read: its call fails, others don't."""
        self.seen += 1
        self.bad_objects += 1
        failed: Placeholder[Any] = Placeholder(self._caller, "", "", "")
        failed._set_error(error)
        return failed

    # Asking
    def fetch(self, placeholder: Placeholder[Any]) -> None:
        """Ask the worker that made an answer (or keeps it) to send it here."""
        if (reason := self._caller.refusal(placeholder.shard)) is not None:
            placeholder._set_error(error_from_wire(placeholder.label, placeholder.method, reason))
            return
        self._numbers += 1
        number = self._numbers
        self._fetches[number] = (placeholder, time.monotonic() + self._caller.timeout)
        self._ask_shard(number, placeholder)
        self._caller.keep_sweeping()

    def ask_again(self) -> None:
        """Repeat what was asked for and has not come."""
        for number, (placeholder, _) in self._fetches.items():
            self._ask_shard(number, placeholder)

    def source_of(self, placeholder: Placeholder[Any]) -> Source:
        """Where an answer is made or kept."""
        return placeholder._source or (
            self._caller.inbox,
            placeholder.call,
            placeholder.position,
            placeholder.shard,
            True,
        )

    def _ask_shard(self, number: int, placeholder: Placeholder[Any]) -> None:
        subject = self._caller.subject_of(placeholder.shard)
        self._ask(subject, number, self.source_of(placeholder))

    def _ask(self, subject: str, number: int, source: Source) -> None:
        inbox, call, position, _, kept = source
        if not self._asks:
            asyncio.get_running_loop().call_soon(self._flush)
        self._asks.setdefault(subject, []).append([number, [inbox, call, position], kept])

    def _flush(self) -> None:
        asks, self._asks = self._asks, {}
        caller = self._caller
        for subject, rows in asks.items():
            try:
                data = caller.codec.pack([batch.FETCH, caller.inbox, rows])
                pieces.send(caller.bus, caller.codec, subject, data)
            except BusError as error:  # asked again when the connection is back
                _log.warning("answers could not be asked for", subject=subject, error=str(error))

    def fetched(self, rows: Sequence[list[Any]]) -> None:
        """Take answers that were asked for."""
        for number, outcome, packed in rows:
            asked = self._fetches.get(number)
            if asked is None:
                continue
            placeholder = asked[0]
            if outcome == batch.ASK_CALLER and placeholder._source is not None:
                self._ask(placeholder._source[0], number, placeholder._source)
                continue
            del self._fetches[number]
            label, method = placeholder.label, placeholder.method
            content = self._caller.codec.unpack(packed)
            if outcome == batch.OK:
                settle(placeholder, content)
            elif outcome == batch.FAILED:
                placeholder._set_error(error_from_wire(label, method, content))
            else:
                reason = content or "its worker does not know of it"
                placeholder._set_error(
                    PlaceholderLostError(label, method, "placeholder_lost", reason)
                )

    # Lending
    def lend(self, asker: str, rows: Sequence[list[Any]]) -> None:
        """Answer a worker that was sent here for answers which this caller has received."""
        for number, key, _ in rows:
            held = self._caller.placeholder_of(key[1], key[2])
            if held is None and (lent := self._lent.get((key[1], key[2]))) is not None:
                held = lent[0]
            if held is None:
                self._hand_on(asker, number, batch.GONE, "its caller let go of it")
                continue

            def reply(placeholder: Placeholder[Any], number: int = number) -> None:
                packed = self._encode(placeholder)
                outcome = batch.OK if packed[0] == "v" else batch.FAILED
                self._hand_on(asker, number, outcome, packed[1])

            held.add_done_callback(reply)

    def _hand_on(self, asker: str, number: int, outcome: int, content: Any) -> None:
        codec = self._caller.codec
        data = codec.pack([batch.FETCHED, [[number, outcome, codec.pack(content)]]])
        pieces.send(self._caller.bus, codec, asker, data)
