"""``populace sweep``: play a scenario many times, and show what came of each."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from populace.cli import show
from populace.cli.session import interrupts
from populace.runs import Outcome, control, find_run, follow, manage, submit
from populace.sweep import SweepRun, SweepSpec
from shared.bus import NatsBus
from shared.errors import InvalidInputError, PopulaceError
from shared.messages.scenario import ManageRequest
from shared.settings import Settings


class Sweep:
    """Plays the runs of a sweep, some at once; those that were finished before are not repeated.

    Args:
        bus: a connection.
        settings: of the installation.
        spec: the sweep.
        runs: its runs.
        quiet: say nothing meanwhile.
    """

    def __init__(
        self,
        bus: NatsBus,
        settings: Settings,
        spec: SweepSpec,
        runs: list[SweepRun],
        *,
        quiet: bool,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._spec = spec
        self._runs = runs
        self._quiet = quiet
        self._slots = asyncio.Semaphore(spec.at_once)
        self._under_way: set[str] = set()
        self._stopping = False
        self.outcomes: dict[str, Outcome] = {}

    async def play(self) -> bool:
        """Play all; returns False if it was interrupted, and the runs under way are paused."""
        interrupted = asyncio.Event()
        with interrupts(interrupted):
            tasks = [asyncio.ensure_future(self._one(run)) for run in self._runs]
            everything: asyncio.Future[Any] = asyncio.ensure_future(asyncio.gather(*tasks))
            signalled = asyncio.ensure_future(interrupted.wait())
            await asyncio.wait({everything, signalled}, return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
            if everything.done():
                await everything
                return True
            self._stopping = True
            show.complain("pausing the runs under way; the same command goes on with them")
            for run in list(self._under_way):
                try:
                    await control(self._bus, self._settings, run, "pause")
                except PopulaceError as error:
                    show.complain(f"{run}: {error}")
            await asyncio.wait({everything}, timeout=60)
            return False

    async def _one(self, run: SweepRun) -> None:
        async with self._slots:
            if self._stopping:
                return
            self._under_way.add(run.name)
            try:
                outcome = await self._play(run)
            except PopulaceError as error:  # the others are played all the same
                outcome = Outcome(run.name, reason=str(error))
            finally:
                self._under_way.discard(run.name)
            self.outcomes[run.name] = outcome
            self._say(f"{run.name}: {outcome.state}{_reason(outcome)}")

    async def _play(self, run: SweepRun) -> Outcome:
        info = await find_run(self._bus, self._settings, run.name)
        submitted = info is None
        if info is None:
            await submit(self._bus, self._settings, run.file.spec)
            self._say(f"{run.name}: {_values(run)}")
        elif info.state in ("paused", "failed", "cancelled"):
            budget = run.file.spec.budget
            request = ManageRequest(run=run.name, action="resume", budget=budget)
            try:
                await manage(self._bus, self._settings, request)
            except PopulaceError as error:
                return Outcome(run.name, state=info.state, reason=str(error))
        outcome = Outcome(run.name)
        async for told in follow(self._bus, self._settings, run.name, submitted=submitted):
            if told is not None:
                outcome.take(told)
        return outcome

    def _say(self, text: str) -> None:
        if not self._quiet:
            show.err.print(text, markup=False, soft_wrap=True)

    def rows(self) -> list[dict[str, Any]]:
        """What is known of each run, in the order of the sweep."""
        found = []
        for run in self._runs:
            outcome = self.outcomes.get(run.name)
            rows = sorted(outcome.rows, key=lambda r: r.round) if outcome is not None else []
            found.append(
                {
                    "run": run.name,
                    "variant": run.variant,
                    "values": run.values,
                    "cell": run.cell,
                    "state": outcome.state if outcome is not None else None,
                    "reason": outcome.reason if outcome is not None else "",
                    "rounds": len(rows),
                    "answers": sum(r.answers for r in rows),
                    "failed": sum(r.failed for r in rows),
                    "tokens": sum(r.tokens for r in rows),
                    "last": rows[-1].values if rows else {},
                }
            )
        return found

    def write(self) -> Path:
        """Write down which runs there are; returns the file."""
        path = self._settings.runs_dir / f"{self._spec.name}.sweep.json"
        text = json.dumps(self.rows(), indent=2, ensure_ascii=False, default=str)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        except OSError as error:
            raise InvalidInputError(f"the sweep can't be written down: {error}") from None
        return path


def _values(run: SweepRun) -> str:
    values = ", ".join(f"{key}={value}" for key, value in run.values.items())
    return f"{run.variant}: {values}" if run.variant and values else run.variant or values


def _reason(outcome: Outcome) -> str:
    return f" ({outcome.reason})" if outcome.reason else ""


def table(rows: list[dict[str, Any]]) -> Table:
    """A sweep's runs, one in a row."""
    keys = list(dict.fromkeys(key for row in rows for key in row["values"]))
    lasts = list(
        dict.fromkeys(
            key for row in rows for key, value in row["last"].items() if not _is_long(value)
        )
    )
    found = Table(box=None, pad_edge=False)
    variants = any(row["variant"] for row in rows)
    for heading in (
        "run",
        *(["variant"] if variants else []),
        *(key.rpartition(".")[2] for key in keys),
        "state",
        "rounds",
        "answers",
        "failed",
        *lasts,
    ):
        found.add_column(heading)
    for row in rows:
        found.add_row(
            row["run"],
            *([row["variant"]] if variants else []),
            *(show.number(row["values"].get(key)) for key in keys),
            row["state"] or "not played",
            *(show.number(row[name]) for name in ("rounds", "answers", "failed")),
            *(show.number(row["last"].get(key)) for key in lasts),
        )
    return found


def _is_long(value: Any) -> bool:
    return isinstance(value, (dict, list)) or (isinstance(value, str) and len(value) > 20)
