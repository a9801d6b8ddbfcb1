"""Playing a scenario: setup, rounds, finish; and telling how it goes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from populace._runtime.records import Recorder, batch_of
from populace.answers import Answers
from populace.commits import Commit, Commits
from populace.errors import RunBrokenError, ScenarioError, StateError
from populace.injections import Injections
from populace.scenario import Scenario
from populace.world import World
from shared.codec import writable
from shared.errors import BusError, PopulaceError
from shared.logs import get_logger
from shared.messages.scenario import RoundRow, Status

_log = get_logger(__name__)

Publish = Callable[[Status], Awaitable[None]]

FINISH = 1_000_001
"""The round of what ``finish`` does: one that no run reaches, so that it is the same whatever comes
before, and models' answers to it are not taken for others."""
_PROGRESS_EVERY = 0.5
_STOP_WITHIN = 2.0


async def _nothing() -> None:
    pass


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
        self._commits: Commits | None = None
        self.injections: Injections | None = None
        """What comes from outside before a round, if anything may."""
        self.strict = False
        """Whether an answer that was not kept, of a run that is played again, ends it."""
        self.must_commit = False
        """Whether a run whose state can't be kept is to fail, rather than to go on without."""
        self.on_taken_up: Callable[[], Awaitable[None]] = _nothing
        """Called once all are there again, where a run goes on after a commit."""
        self.on_uncommitted: Callable[[str], None] = lambda why: None
        """Told why the run's state can't be kept, if it can't."""
        self.number = 0
        """The round under way, or the last."""
        self.rows: list[RoundRow] = []
        """The rounds that were finished."""
        self.records = 0
        """Agents' answers and failures that went into the result stream, all rounds."""

    async def play(
        self, commits: Commits | None = None, commit: Commit | None = None
    ) -> list[RoundRow]:
        """Play from setup to finish; returns a row per round.

        Args:
            commits: commits each round, where the run is to survive crashes.
            commit: the round to go on after, instead of beginning with the setup.

        Raises:
            RunBrokenError: the world lost processes without which it can't go on; another world
                can, from the last committed round.
            StateError: something that has to be kept can't be.

        Whatever the scenario raises comes through as well.
        """
        scenario = self._scenario
        self._commits = commits
        if commit is None:
            await self._unless_broken(scenario.setup())
            await self._commit(0)
        else:
            assert commits is not None
            await self._unless_broken(commits.take_up(commit))
            await self.on_taken_up()
            self.rows, self.records = commit.rows, commit.records
            if self.injections is not None:
                self.injections.skip(len(self.rows))
        for number in range(len(self.rows) + 1, scenario.rounds + 1):
            await self._round(number)
        self._world._caller.round = FINISH
        await self._unless_broken(scenario.finish())
        if commits is not None:
            await commits.close()
        return self.rows

    async def _unless_broken(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something in the world, for as long as that is whole."""
        task = asyncio.ensure_future(work)
        broken = self._world.broken
        try:
            await asyncio.wait({task, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not broken.done():
                await task
                return
        finally:
            if not task.done():
                task.cancel()
                # With a bound: the scenario's own code may not heed it.
                await asyncio.wait({task}, timeout=_STOP_WITHIN)
        if task.done() and not task.cancelled():
            task.exception()  # seen
        raise RunBrokenError(broken.result())

    async def _commit(self, number: int) -> None:
        if self._commits is None:
            return
        try:
            await self._unless_broken(self._commits.commit(number, self.rows, self.records))
        except StateError as error:
            if self.must_commit:
                raise
            _log.warning(
                "the run can't be taken up again after a crash", run=self._world.run, why=str(error)
            )
            self.on_uncommitted(str(error))
            self._commits = None
            self._world.durable = False

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
        world._caller.round = self.number = number
        world._recorded = []
        world._records = True
        scenario._recorded = {}
        began = time.monotonic()
        progress = asyncio.ensure_future(self._tell_progress(number))
        try:
            await self._unless_broken(self._inject(number))
            await self._unless_broken(self._play_round(number))
        finally:
            world._records = False
            progress.cancel()
            # Asked by wait, so that neither its errors nor its end hide what happens here.
            await asyncio.wait({progress}, timeout=_STOP_WITHIN)
            if progress.done() and not progress.cancelled() and progress.exception() is not None:
                _log.warning("progress could not be told", error=str(progress.exception()))
        await self._record_lost(number)
        row = self._row(number, time.monotonic() - began)
        self.rows.append(row)
        self.records += row.answers + row.failed
        await self._tell_row(row)
        if self.strict and row.failures.get("model_not_kept"):
            raise PopulaceError(f"the run can't be played again as it was: {row.example}")
        if row.failed and not row.answers:
            raise PopulaceError(
                f"no agent answered in round {number}: {row.failed} failed, the first with "
                f"{row.example}"
            )
        # Last, so that a run that ends here, its budget spent, plays this round again if it is
        # taken up with more.
        await self._commit(number)

    async def _inject(self, number: int) -> None:
        """Bring what comes before a round."""
        if self.injections is None:
            return
        for name, event in await self.injections.due(number):
            try:
                await self._scenario.injected(event)
            except (BusError, RunBrokenError):
                raise
            except Exception as error:
                why = str(error) if isinstance(error, PopulaceError) else repr(error)
                if name.startswith("planned-"):
                    raise ScenarioError(f"the event {event.name!r}: {why}") from error
                # A slip of somebody's hand must not end a run.
                await self.injections.refuse(name, event, why)
                _log.warning("an event is refused", run=self._world.run, error=why)

    async def _play_round(self, number: int) -> None:
        await self._scenario.round(number)
        # A round is over when all that it recorded is, whether awaited or not.
        for answers in self._world._recorded:
            while not await answers.wait():
                pass

    async def _tell_row(self, row: RoundRow) -> None:
        await self._publish(
            Status(
                kind="round_finished",
                run=self._world.run,
                round=row.round,
                rounds=self._scenario.rounds,
                row=row,
            )
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
            example=writable(example[:500]),
            values=writable(self._scenario._recorded),
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
                            batch=f"{self._world.life}/lost/{number}/{i}/{j}",
                            life=self._world.life,
                            agents=list(answers._population.numbers[first : first + size]),
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
