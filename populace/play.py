"""Playing a scenario: setup, rounds, finish; and telling how it goes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from populace._runtime.records import Recorder, batch_of
from populace.answers import Answers
from populace.scenario import Scenario
from populace.world import World
from shared.errors import PopulaceError
from shared.logs import get_logger
from shared.messages.scenario import RoundRow, Status

_log = get_logger(__name__)

Publish = Callable[[Status], Awaitable[None]]

_PROGRESS_EVERY = 0.5


class Player:
    """Plays one scenario in a world.

    Args:
        world: where its agents live.
        scenario: what is played.
        publish: told of every step.
        results_format: of the result stream.
    """

    def __init__(
        self, world: World, scenario: Scenario, publish: Publish, *, results_format: str = "msgpack"
    ) -> None:
        self._world = world
        self._scenario = scenario
        self._publish = publish
        self._recorder = Recorder(world._bus, world._subjects, world.run, results_format)
        self.rows: list[RoundRow] = []
        """The rounds that were finished."""
        self.records = 0
        """Agents' answers and failures that went into the result stream, all rounds."""

    async def play(self) -> list[RoundRow]:
        """Play from setup to finish; returns a row per round.

        Whatever the scenario raises comes through.
        """
        scenario = self._scenario
        await scenario.setup()
        for number in range(1, scenario.rounds + 1):
            await self._round(number)
        await scenario.finish()
        return self.rows

    async def _round(self, number: int) -> None:
        world, scenario = self._world, self._scenario
        await self._publish(
            Status(
                kind="round_started",
                run=world.run,
                round=number,
                rounds=scenario.rounds,
                agents=scenario.agents,
            )
        )
        world._caller.round = number
        world._recorded = []
        world._records = True
        scenario._recorded = {}
        began = time.monotonic()
        progress = asyncio.ensure_future(self._tell_progress(number))
        try:
            await scenario.round(number)
            # A round is over when all that it recorded is, whether awaited or not.
            for answers in world._recorded:
                while not await answers.wait():
                    pass
        finally:
            world._records = False
            progress.cancel()
            # Asked by wait, so that neither its errors nor its end hide what happens here.
            await asyncio.wait({progress})
            if not progress.cancelled() and progress.exception() is not None:
                _log.warning("progress could not be told", error=str(progress.exception()))
        await self._record_lost(number)
        row = self._row(number, time.monotonic() - began)
        self.rows.append(row)
        self.records += row.answers + row.failed
        await self._publish(
            Status(
                kind="round_finished",
                run=world.run,
                round=number,
                rounds=scenario.rounds,
                row=row,
            )
        )
        if row.failed and not row.answers:
            raise PopulaceError(
                f"no agent answered in round {number}: {row.failed} failed, the first with "
                f"{row.example}"
            )

    def _row(self, number: int, seconds: float) -> RoundRow:
        answered = failed = tokens = 0
        failures: Counter[str] = Counter()
        example = ""
        for answers in self._world._recorded:
            done, bad, used = _outcome(answers, failures)
            example = example or answers.first_failure
            answered += done - bad
            failed += bad
            tokens += used
        return RoundRow(
            round=number,
            answers=answered,
            failed=failed,
            failures=dict(sorted(failures.items())),
            example=example[:500],
            values=self._scenario._recorded,
            tokens=tokens,
            seconds=round(seconds, 3),
        )

    async def _record_lost(self, number: int) -> None:
        """Record the failures that no worker was left to record."""
        for i, answers in enumerate(self._world._recorded):
            for j, (first, size, error) in enumerate(answers.lost):
                await self._recorder.store(
                    {
                        **batch_of(
                            round_number=number,
                            population=answers._population.name,
                            method=answers._method,
                            call=(answers._record or {}).get("call", 0),
                            batch=f"lost/{number}/{i}/{j}",
                            agents=list(range(first, first + size)),
                            values=[None] * size,
                            errors=[[place, error[0], error[1]] for place in range(size)],
                        ),
                        # Some of them may have been recorded before their worker was lost.
                        "fill": True,
                    }
                )

    async def _tell_progress(self, number: int) -> None:
        told: Any = None
        while True:
            await asyncio.sleep(_PROGRESS_EVERY)
            recorded = list(self._world._recorded)
            sums = [sum(column) for column in zip(*(a.progress for a in recorded), strict=True)]
            if not sums or sums == told:
                continue
            told = sums
            await self._publish(
                Status(
                    kind="progress",
                    run=self._world.run,
                    round=number,
                    rounds=self._scenario.rounds,
                    agents=sum(a.count for a in recorded),
                    done=sums[0],
                    failed=sums[1],
                    tokens=sums[2],
                    mean=recorded[-1].mean_so_far,
                )
            )


def _outcome(answers: Answers[Any], failures: Counter[str]) -> tuple[int, int, int]:
    """(settled, of these failed, tokens); failures are counted by kind."""
    done, failed, tokens = answers.progress
    partial = answers._partial
    if partial is not None:
        failures.update(partial.failures)
        return partial.count + partial.failed, partial.failed, tokens
    failures.update(answers._failures)
    return done, failed, tokens
