"""Follows the runs' stream, and keeps a folder per run.

A message is acknowledged once what it says is on disk. One recorder serves an installation (see
``seat.py``): the stream is taken in order by a single durable consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.recorder.events import EventTable
from services.recorder.seat import Seat, SeatLostError, writing
from services.recorder.tables import RunFolder, put_aside, reopen
from shared.bus import Delivery
from shared.codec import CONTENT_TYPE, JSON_TYPE, from_public
from shared.errors import BusError, CodecError, PopulaceError, RemoteError
from shared.ids import is_token
from shared.logs import get_logger
from shared.messages.scenario import ControlReply, ControlRequest, Status
from shared.service import ServiceContext, ask
from shared.streams import append_patiently, ensure_streams

_log = get_logger(__name__)

_FLUSH_ROWS = 100_000
_FLUSH_EVERY = 5.0
_ACK_WAIT = 30.0
_AGAIN_AFTER = 3.0
_ANEW_AFTER = 1.0
_TAKEN_WITHIN = 3.0
_NEXT_AFTER = 0.2
_END_WITHIN = 30.0

_OF_ALL_RUNS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE}
)
"""Troubles of the disk, or of this process, that no run can be recorded with."""


@dataclass(slots=True)
class _Held:
    """What is held back of a run: it comes again, and is taken in the order of the stream."""

    until: float = 0.0
    sequences: set[int] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    """A heap of them, and of some that have come by now."""

    def add(self, sequence: int) -> None:
        """Hold one more."""
        if sequence not in self.sequences:
            self.sequences.add(sequence)
            heapq.heappush(self.order, sequence)

    @property
    def first(self) -> int:
        """The first of those that are held; there is one."""
        while self.order[0] not in self.sequences:
            heapq.heappop(self.order)
        return self.order[0]


class RunRecorder:
    """Writes what the stream says of runs."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._bus = context.bus
        self._subjects = context.settings.subjects
        self._seat = Seat(context.bus, context.settings.subjects)
        self._base = context.settings.runs_dir.resolve()
        self._folders: dict[str, RunFolder] = {}
        self._trying = ""
        """The run whose folder is being opened."""
        self._unacknowledged: list[tuple[str, Delivery]] = []
        """With the run of each; acknowledged once they are on disk."""
        self._held: dict[str, _Held] = {}
        """Runs whose files can't be written, while others' can."""
        self._pausing: dict[str, asyncio.Task[None]] = {}
        self._flushed = time.monotonic()
        self.rows = 0

    async def _folder(self, run: str) -> RunFolder:
        folder = self._folders.get(run)
        if folder is None:
            self._trying = run
            # In a thread: much may be there to be read, and others ask meanwhile who is at work.
            folder = await asyncio.to_thread(RunFolder, self._base / run, run)
            self._folders[run] = folder
            self._trying = ""
        return folder

    async def _take(self, delivery: Delivery) -> None:
        kind = (delivery.headers or {}).get(CONTENT_TYPE)
        run = delivery.subject.removeprefix(f"{self._subjects.prefix}.run.").partition(".")[0]
        if not is_token(run):
            await delivery.term()
            return
        if await self._is_held(run, delivery):
            return
        try:
            if run not in self._folders and (self._base / run / "manifest.json").exists():
                await self._take_late(run, delivery)
                return
            content = from_public(delivery.data, kind)
            if delivery.subject == self._subjects.run_status(run):
                wait = await self._take_status(Status.model_validate(content))
                if wait:
                    await self._hold(run, wait, delivery)
                    return
            elif delivery.subject.startswith(self._subjects.run_messages(run, "")):
                (await self._folder(run)).add_messages(content)
            else:
                (await self._folder(run)).add(content)
        except BusError:
            raise
        except OSError as error:
            if _is_of_all(error):
                raise
            await self._hold_bad(run, error, delivery)
            return
        except Exception as error:  # one message must not stop the recording of all runs
            _log.error(
                "a message of a run can't be read", subject=delivery.subject, error=str(error)
            )
            await delivery.term()
            return
        self._unacknowledged.append((run, delivery))

    async def _take_late(self, run: str, delivery: Delivery) -> None:
        """A message of a run that is recorded: its acknowledgement was lost.

        Raises:
            ValueError: it is no status, or the run's manifest can't be read.
        """
        folder = self._base / run
        leftover = folder / "answers.parts"
        # Killed before it could clear them away; or while the run was reopened: then they are all.
        if leftover.exists() and (folder / "answers.parquet").exists():
            await asyncio.to_thread(shutil.rmtree, leftover)
        if delivery.subject == self._subjects.run_status(run):
            status = Status.model_validate_json(delivery.data)
            manifest = json.loads((folder / "manifest.json").read_text())
            if status.kind == "accepted" and status.time > _known_since(manifest):
                await self._seat.renew()
                aside = await asyncio.to_thread(writing, self._base, put_aside, folder)
                _log.warning(
                    "another run has the name of a recorded one, whose files are kept aside",
                    run=run,
                    folder=str(aside),
                )
                await self._take(delivery)
                return
            begun = (status.life or 1) > int(manifest.get("life") or 1)
            if status.kind == "restored" and begun:  # it was over, and goes on
                await self._seat.renew()
                await asyncio.to_thread(writing, self._base, reopen, folder, run)
                await self._take(delivery)
                return
            if status.kind == "ended":  # and perhaps "recorded" was never told
                await self._tell(run, folder, status.records, ended=status, manifest=manifest)
        await delivery.ack()

    async def _is_held(self, run: str, delivery: Delivery) -> bool:
        """Whether a message is held back, since its run is, or others of it are to come first."""
        held = self._held.get(run)
        if held is None:
            return False
        wait = held.until - time.monotonic()
        if wait <= 0:
            if wait < -_ACK_WAIT:  # the first is gone: the run was deleted, say
                held.sequences.clear()
            held.sequences.discard(delivery.sequence)
            if not held.sequences:
                del self._held[run]
                return False
            if delivery.sequence < held.first:
                return False
            wait = min(_AGAIN_AFTER, _NEXT_AFTER * (1 + len(held.sequences) / 200))
        held.add(delivery.sequence)
        await delivery.nak(wait)
        return True

    async def _hold(self, run: str, wait: float, *current: Delivery) -> None:
        """Hold a run back: what is not written of it is not acknowledged, and comes again."""
        self._folders.pop(run, None)
        self._trying = ""
        back = [*(delivery for name, delivery in self._unacknowledged if name == run), *current]
        self._unacknowledged = [pair for pair in self._unacknowledged if pair[0] != run]
        held = self._held.setdefault(run, _Held())
        held.until = time.monotonic() + wait
        for delivery in back:
            held.add(delivery.sequence)
            await delivery.nak(wait)

    async def _hold_bad(self, run: str, error: OSError, *current: Delivery) -> None:
        """Hold a run back whose folder can't be used, and have it paused; others go on."""
        _log.error("a run's results can't be written", run=run, error=str(error))
        await self._hold(run, _AGAIN_AFTER, *current)
        # A folder that somebody has removed is made again.
        if not isinstance(error, FileNotFoundError) and run not in self._pausing:
            task = self._pause_runs([run], f"its results can't be written: {error}")
            self._pausing[run] = asyncio.ensure_future(task)
            self._pausing[run].add_done_callback(lambda _: self._pausing.pop(run, None))

    async def _take_status(self, status: Status) -> float:
        """Take a status.

        Returns:
            Seconds after which it is to come again, where what it asks for could not be done; or 0.
        """
        if status.kind == "recorded":
            return 0
        folder = await self._folder(status.run)
        if status.kind == "ended" and (status.life or 1) < folder.life:
            return 0  # of a life that another has followed
        await asyncio.to_thread(folder.add_status, status)
        return await self._finish(status.run, folder, status) if status.kind == "ended" else 0

    async def _finish(self, run: str, folder: RunFolder, ended: Status) -> float:
        del self._folders[run]
        try:
            await self._fill(run, folder)
            events = await self._events_of(run, folder) if folder.wants_events else None
            await self._seat.renew()
            manifest = await asyncio.to_thread(writing, self._base, folder.finish, events)
        except SeatLostError:
            raise
        except OSError as error:
            # It is tried again until there is room; who waits for the run need not wait as long.
            reason = f"{error}; it is tried again until that is mended"
            await self._tell(run, folder.path, folder.rows_written, reason, ended=ended)
            if _is_of_all(error):
                raise
            _log.error("a run's files can't be written", run=run, error=str(error))
            return _AGAIN_AFTER
        except Exception as error:
            # One run's trouble must not stop the recording of others; its parts stay on disk.
            _log.exception("a run's files could not be written", run=run)
            reason = f"{type(error).__name__}: {error}"
            await self._tell(run, folder.path, folder.rows_written, reason, ended=ended)
            return _ACK_WAIT
        if manifest["missing"]:
            _log.error("records are missing", run=run, count=manifest["missing"])
        _log.info("run recorded", run=run, rows=folder.rows_written, folder=str(folder.path))
        rows = folder.rows_written
        await self._tell(run, folder.path, rows, ended=ended, manifest=manifest)
        return 0

    async def _fill(self, run: str, folder: RunFolder) -> None:
        """Take what was on its way when a node of a cluster died.

        The consumer gives it again only after a while, when the run is over.

        Raises:
            BusError: the stream can't be read.
        """
        stream = self._subjects.stream_runs
        statuses = []
        async for message in self._bus.read(stream, (self._subjects.run_status(run),)):
            with contextlib.suppress(ValueError):
                statuses.append(Status.model_validate_json(message.data))
        restored = await asyncio.to_thread(folder.fill_statuses, statuses)
        await self._fill_messages(run, folder)
        if not folder.missing and not restored and not folder.cut_off:
            return
        if folder.missing:
            _log.warning("records are read again", run=run, count=folder.missing)
        async for message in self._bus.read(stream, (self._subjects.run_results(run),)):
            with contextlib.suppress(CodecError):  # said when it came first
                kind = (message.headers or {}).get(CONTENT_TYPE)
                folder.add({**from_public(message.data, kind), "fill": True})

    async def _fill_messages(self, run: str, folder: RunFolder) -> None:
        """The same for messages between agents, if the stream holds more than came."""
        stream, subject = self._subjects.stream_runs, self._subjects.run_messages(run)
        count, _ = await self._bus.held(stream, subject)
        if count <= folder.message_batches:
            return
        _log.warning("messages are read again", run=run, came=folder.message_batches, held=count)
        async for message in self._bus.read(stream, (subject,)):
            with contextlib.suppress(CodecError, KeyError, TypeError, ValueError):
                folder.add_messages(from_public(message.data))

    async def _events_of(self, run: str, folder: RunFolder) -> EventTable:
        """What the run's environments told, less what was of rounds that were played again.

        Of a run that was over before, the stream may hold the latest alone: it keeps them a day.

        Raises:
            BusError: it can't be read.
        """
        events = EventTable(run)
        await asyncio.to_thread(events.read, folder.events_file, folder.is_outdated)
        pattern = self._subjects.env_event(run, "*", ">")
        async for message in self._bus.read(self._subjects.stream_events, (pattern,)):
            try:
                told = from_public(message.data)
                if not folder.is_outdated(int(told.get("life", 1)), int(told["round"])):
                    events.add(told)
            except (CodecError, KeyError, TypeError, ValueError) as error:
                _log.error("an event can't be read", subject=message.subject, error=str(error))
        return events

    async def _tell(
        self,
        run: str,
        folder: Path,
        records: int | None,
        reason: str | None = None,
        *,
        ended: Status | None,
        manifest: dict[str, Any] | None = None,
    ) -> None:
        told = Status(
            kind="recorded",
            run=run,
            records=records,
            folder=str(folder),
            reason=reason,
            missing=(manifest or {}).get("missing") or None,
            events_missing=(manifest or {}).get("events_missing") or None,
        )
        # By what ended it: a run may have the name of one that was deleted a moment ago.
        which = f"{ended.life or 1}/{ended.time}" if ended is not None else "0"
        await append_patiently(
            self._bus,
            self._subjects.run_status(run),
            told.model_dump_json(exclude_none=True).encode(),
            headers={CONTENT_TYPE: JSON_TYPE},
            message_id=f"{run}/recorded/{which}/{'' if reason is None else 'not yet'}",
        )

    async def _flush(self) -> None:
        """Put everything on disk, then acknowledge it.

        Raises:
            SeatLostError: another recorder is at work by now; it gets what is not acknowledged.
            BusError: the broker does not answer.
            OSError: it can't be written.
        """
        await self._seat.renew()
        for run, folder in list(self._folders.items()):
            waiting = folder.waiting
            try:
                await asyncio.to_thread(writing, self._base, folder.flush)
            except OSError as error:
                if _is_of_all(error):
                    raise
                await self._hold_bad(run, error)
            except Exception:  # one run's trouble must not stop the recording of others
                _log.exception("a run's records can't be written", run=run)
                await self._hold(run, _ACK_WAIT)
            else:
                self.rows += waiting
        deliveries, self._unacknowledged = self._unacknowledged, []
        for _, delivery in deliveries:
            await delivery.ack()
        self._flushed = time.monotonic()

    async def _follow(self) -> None:
        while not self._context.stopping.is_set():
            try:
                await self._record()
            except SeatLostError as error:
                _log.warning(str(error))
                self._forget()
            except Exception as error:
                _log.error("recording starts anew", error=f"{type(error).__name__}: {error}")
                touched = [*self._folders, *([self._trying] if self._trying else [])]
                self._forget()
                if isinstance(error, OSError) and error.errno in _OF_ALL_RUNS:
                    await self._pause_runs(touched, f"its results can't be written: {error}")
                    await asyncio.sleep(_AGAIN_AFTER)
                await asyncio.sleep(_ANEW_AFTER)

    def _forget(self) -> None:
        """Drop what is in memory: it is made again from what is on disk, and what comes again."""
        self._folders.clear()
        self._unacknowledged.clear()
        self._held.clear()
        self._trying = ""

    async def _record(self) -> None:
        """Record until told to stop, once nobody else does.

        Raises:
            SeatLostError: another recorder is at work by now.
            BusError: the broker does not answer.
            OSError: results can't be written.
        """
        stopping = self._context.stopping
        if not await self._seat.take(stopping):
            return
        consumer = await self._bus.consumer(
            self._subjects.stream_runs,
            durable="recorder",
            ack_wait=_ACK_WAIT,
            max_waiting_acks=100_000,
            alone=True,
        )
        while not stopping.is_set():
            await self._seat.keep()
            for delivery in await consumer.fetch(200, timeout=1.0):
                await self._take(delivery)
            waiting = sum(f.waiting for f in self._folders.values())
            due = time.monotonic() - self._flushed > _FLUSH_EVERY
            if waiting >= _FLUSH_ROWS or (due and self._unacknowledged):
                await self._flush()

    async def _pause_runs(self, runs: list[str], reason: str) -> None:
        """Stop what would only fill the stream: it can go on once results can be written.

        Who waits for one that is over is told why it is not recorded yet. Neither is needed for
        what is recorded, so the recording goes on where the broker takes none of it.
        """

        async def pause(run: str) -> None:
            try:
                await ask(
                    self._bus,
                    self._subjects.run_control(run),
                    ControlRequest(action="pause", reason=reason),
                    ControlReply,
                    timeout=5,
                    patience=_TAKEN_WITHIN,  # it may just be beginning
                )
            except (BusError, RemoteError):
                if self._is_recorded(run):
                    return  # it was mended meanwhile
                told = f"{reason}; it is tried again until that is mended"
                await self._tell(run, self._base / run, None, told, ended=None)

        for done in await asyncio.gather(*map(pause, runs), return_exceptions=True):
            if isinstance(done, Exception):
                _log.warning("a run could not be told of its results", error=str(done))

    def _is_recorded(self, run: str) -> bool:
        return os.path.exists(self._base / run / "manifest.json")

    def stats(self) -> dict[str, Any]:
        """What is shown in STATS."""
        return {"runs": sorted(self._folders), "rows": self.rows, "folder": str(self._base)}

    async def run(self) -> None:
        """Record until told to stop.

        Raises:
            PopulaceError: the recording ended by itself; whoever runs this starts it again.
        """
        await ensure_streams(self._bus, self._subjects)
        await self._context.announce("Writes the results of runs to files", stats=self.stats)
        follow = asyncio.ensure_future(self._follow())
        _log.info("recorder is up", folder=str(self._base))
        stopping = asyncio.ensure_future(self._context.stopping.wait())
        await asyncio.wait({stopping, follow}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            stopping.cancel()
            why = None if follow.cancelled() else follow.exception()
            raise PopulaceError(f"the recording has ended by itself: {why!r}") from why
        # It ends between two steps: cut short, a flush in its thread would be done twice.
        await asyncio.wait({follow}, timeout=_END_WITHIN)
        if not follow.done():
            _log.error("the recorder ends in the middle of its work; the next one does it again")
            return
        for pausing in self._pausing.values():
            pausing.cancel()
        with contextlib.suppress(BusError):
            if self._unacknowledged:
                await self._flush()
            await self._seat.give_back()


def _is_of_all(error: OSError) -> bool:
    """Whether a trouble is not that of one run's folder: the disk's, say, or the connection's."""
    return error.errno in _OF_ALL_RUNS or isinstance(error, (TimeoutError, ConnectionError))


def _known_since(manifest: dict[str, Any]) -> float:
    """When the run was accepted that a manifest tells of; one that was refused never was."""
    return float(manifest.get("accepted") or manifest.get("ended") or 0.0)


async def main(context: ServiceContext) -> None:
    """The recorder service."""
    await RunRecorder(context).run()
