"""What operators do to hosts: look closely, stop workers, drain, clean up after runs."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from shared.errors import BusError, InvalidInputError
from shared.ids import check_token
from shared.messages.control import (
    HostChange,
    HostDetail,
    HostDetails,
    HostInfo,
    Released,
    ReleaseWorkers,
    StopWorker,
)
from shared.service import ask

if TYPE_CHECKING:
    from services.manager.manager import Manager
    from services.manager.watcher import Seen

_LIVES = 1 << 30
"""More lives than a run has."""
_WITHIN = 30.0


def _readable(line: str) -> str:
    """A log line as a person reads it: when, how grave, what, and the rest as pairs."""
    try:
        told = json.loads(line)
        when, level, event = (str(told.pop(n)) for n in ("timestamp", "level", "event"))
    except (ValueError, KeyError, AttributeError):
        return line
    told.pop("logger", None)
    told.pop("service", None)
    trace = told.pop("exception", "")
    pairs = " ".join(f"{name}={value}" for name, value in told.items())
    return f"{when[:19].replace('T', ' ')} {level:<7} {event} {pairs}".rstrip() + (
        f"\n{trace}" if trace else ""
    )


class Hosting:
    """Looks after hosts.

    Args:
        manager: whose.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def find(self, host: str, kind: str) -> Seen:
        """A host that is there, or was.

        Raises:
            InvalidInputError: there is none of that name.
        """
        watcher = self._manager.watcher
        known = watcher.keepers if kind == "environments" else watcher.hosts
        found = known.get(check_token(host, "the host's name"))
        if found is None:
            raise InvalidInputError(f"there is no host {host!r} for {kind}")
        return found

    async def detail(self, host: str, kind: str, lines: int = 100) -> dict[str, Any]:
        """A host, its workers, and what it logged last.

        Raises:
            InvalidInputError: there is none of that name.
        """
        seen = self.find(host, kind)
        told: dict[str, Any] = {
            "kind": kind,
            "here": seen.here,
            "heard": seen.heard,
            "info": seen.info.model_dump(mode="json"),
            "workers": [],
            "log": [],
            "problem": "",
        }
        if not seen.here:
            return told
        try:
            subject = self._manager.settings.subjects.host(host, "detail")
            found = await ask(
                self._manager.bus, subject, HostDetail(lines=lines), HostDetails, timeout=5
            )
        except BusError as error:
            told["problem"] = f"it does not answer: {error}"
            return told
        told |= found.model_dump(mode="json")
        told["log"] = [_readable(line) for line in found.log]
        return told

    async def change(
        self, host: str, kind: str, draining: bool | None = None, per_run: int | None = None
    ) -> HostInfo:
        """Have a host do otherwise.

        Raises:
            InvalidInputError: its workers would find no other host.
            RemoteError: the host refuses.
            BusError: it does not answer.
        """
        info = self.find(host, kind).info
        if draining:
            watcher = self._manager.watcher
            known = watcher.keepers if kind == "environments" else watcher.hosts
            others = [
                seen.info
                for name, seen in known.items()
                if name != host and seen.here and not seen.info.draining
            ]
            if info.workers and not any(other.free for other in others):
                raise InvalidInputError(
                    f"no other host for {kind} has room, and {host} has {info.workers} workers: "
                    "start another host first, or pause its runs"
                )
        return await self._ask(host, "change", HostChange(draining=draining, per_run=per_run))

    async def _ask(self, host: str, verb: str, request: HostChange) -> HostInfo:
        subject = self._manager.settings.subjects.host(host, verb)
        told = await ask(self._manager.bus, subject, request, HostInfo, timeout=_WITHIN)
        await self._manager.watcher.refresh()
        return told

    async def stop_worker(self, host: str, kind: str, worker: str) -> Released:
        """End one worker; its run goes on with others.

        Raises:
            RemoteError: there is no such worker.
            BusError: the host does not answer.
        """
        self.find(host, kind)
        check_token(worker, "the worker's name")
        subject = self._manager.settings.subjects.host(host, "stop")
        request = StopWorker(worker=worker)
        told = await ask(self._manager.bus, subject, request, Released, timeout=_WITHIN)
        await self._manager.watcher.refresh()
        return told

    async def clean_up(self, run: str, host: str | None = None) -> Released:
        """End whatever a run has on one host, or on all: for runs whose owner is gone.

        Raises:
            InvalidInputError: the run is under way.
            BusError: no host answers.
        """
        check_token(run, "the run's name")
        await self._manager.watcher.refresh()  # it may have begun, or gone on, just now
        if self._manager.is_live(run):
            raise InvalidInputError(
                f"the run {run!r} is under way: cancel or pause it, which ends its workers as well"
            )
        watcher = self._manager.watcher
        if host is not None:
            names = [check_token(host, "the host's name")]
            if host not in watcher.hosts and host not in watcher.keepers:
                raise InvalidInputError(f"there is no host {host!r}")
        else:
            names = [
                n for n, seen in (*watcher.hosts.items(), *watcher.keepers.items()) if seen.here
            ]
        request = ReleaseWorkers(run=run, before=_LIVES, kill=True)
        subjects = self._manager.settings.subjects
        outcomes = await asyncio.gather(
            *(
                ask(self._manager.bus, subjects.host(n, "release"), request, Released, timeout=10)
                for n in dict.fromkeys(names)
            ),
            return_exceptions=True,
        )
        failures = [o for o in outcomes if isinstance(o, BaseException)]
        if failures and len(failures) == len(outcomes):
            raise failures[0]
        await watcher.refresh()
        return Released(workers=sum(o.workers for o in outcomes if isinstance(o, Released)))
