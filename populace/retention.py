"""What the broker will drop of a run, said beforehand."""

from __future__ import annotations

from shared.messages.scenario import ScenarioSpec
from shared.settings import Settings
from shared.streams import kept_stream, runs_stream

_RECORD = 60
"""Bytes of one answer in a batch of results; measured: 40 to 70 with numbers and short texts."""
_KEPT = 1500
"""Bytes of one model's answer as it is kept, with what was asked; texts of some hundred tokens."""


def retention_notes(spec: ScenarioSpec, settings: Settings) -> list[str]:
    """A sentence for each stream that is too small for a run, as far as can be told.

    It is taken that each agent answers once a round, and asks a model once for it.

    Args:
        spec: the scenario.
        settings: of the installation.
    """
    answers = spec.agents.count * spec.rounds
    asks = any(model.backend != "scripted" for model in spec.models.values())
    notes = []
    results = runs_stream(settings.subjects).max_bytes
    if answers * _RECORD > results:
        notes.append(
            f"some {answers * _RECORD / 1e9:.1f} GB of results will go through a stream that keeps "
            f"{results / 1e9:.1f} GB: the oldest leave it first, so subscribe before the run; the "
            "recorder's files hold all"
        )
    kept = kept_stream(settings.subjects).max_bytes
    if asks and answers * _KEPT > kept:
        notes.append(
            f"some {answers * _KEPT / 1e9:.1f} GB of models' answers will be kept in a stream of "
            f"{kept / 1e9:.1f} GB: the oldest leave it first; a crash costs nothing more, but the "
            "run can't be replayed as a whole"
        )
    return notes
