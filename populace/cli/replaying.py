"""``populace replay``: what is played again of a run, and what it is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from populace.play import FINISH
from populace.recorded import RecordedRun
from shared.errors import InvalidInputError
from shared.ids import new_id
from shared.messages.scenario import ReplaySpec, ScenarioSpec

if TYPE_CHECKING:
    import pyarrow as pa


class FinishedRounds(RecordedRun):
    """A recorded run without what belongs to a round that it did not finish.

    Args:
        recorded: the run.
        rounds: how many it has finished.
    """

    def __init__(self, recorded: RecordedRun, rounds: int) -> None:
        super().__init__(recorded.folder)
        self._rounds = rounds

    def to_arrow(self) -> pa.Table:
        """See ``RecordedRun.to_arrow``."""
        import pyarrow.compute as pc

        table = super().to_arrow()
        # What was asked at the end, in a round of its own, is of a finished run.
        kept = pc.or_(pc.less_equal(table["round"], self._rounds), pc.equal(table["round"], FINISH))
        return table.filter(kept)


def replay_of(spec: ScenarioSpec, run: str, rounds: int, *, strict: bool) -> ScenarioSpec:
    """The scenario that plays a run again from its kept answers.

    Args:
        spec: the run's own; it may be a replay itself.
        run: its name.
        rounds: how many it has finished: of no others are all answers kept.
        strict: whether a prompt that differs ends it.

    Raises:
        InvalidInputError: it has finished none.
    """
    if rounds < 1:
        raise InvalidInputError(
            f"the run {run!r} has finished no round, so there is nothing to play again"
        )
    # A replay asks nothing, so nothing is kept under its own name.
    source = run if spec.replay is None else spec.replay.run
    return spec.model_copy(
        update={
            "run": new_id(f"{run[:40]}-again"),
            "rounds": rounds,
            "replay": ReplaySpec(run=source, strict=strict),
            "budget": None,
        }
    )
