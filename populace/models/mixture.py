"""Which of several models an agent asks."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from populace._random import shuffled_place
from populace.errors import ModelFailure
from shared.messages.scenario import Mixture, ModelSpec
from shared.problems import instead

if TYPE_CHECKING:
    from populace.agent import Agent


def mixture_notes(models: Mapping[str, ModelSpec], attributes: list[str]) -> list[str]:
    """A sentence for each mixture that goes by what is not known of the people.

    Args:
        models: of the scenario, by name.
        attributes: what is known of its people.
    """
    notes = []
    for name, model in models.items():
        by = model.mixture.by if model.mixture is not None else None
        if by is not None and by not in attributes:
            assert model.mixture is not None
            rest = model.mixture.choose.get("*")
            then = f"all of them ask {rest!r}" if rest else "what they ask of it fails"
            notes.append(
                f"the mixture {name!r} goes by {by!r}, which is not among the attributes of the "
                f"agents' personas{instead(by, attributes).rstrip('?')}; {then}"
            )
    return notes


def chosen(mixture: Mixture, name: str, agent: Agent) -> str:
    """The model that a mixture means for an agent.

    By weight, each model gets its share of the population exactly (largest remainder), and which
    agents those are follows from the run's seed and the mixture's name alone.

    Raises:
        ModelFailure: the mixture goes by a column, and the agent's persona has none of its values.
    """
    if mixture.by is not None:
        persona = agent.persona
        value = None if persona is None else persona.get(mixture.by)
        found = mixture.choose.get(str(value), mixture.choose.get("*"))
        if found is None:
            raise ModelFailure(
                "model_refused",
                f"the mixture {name!r} says nothing of {mixture.by} = {value!r}; add '*' for the "
                "rest",
            )
        return found
    assert mixture.weights is not None
    shard = agent._home()
    size = len(agent.agents)
    places = bounds(tuple(mixture.weights.values()), size)
    place = shuffled_place(
        shard.worker.seed, f"mixture/{name}/{shard.population}", agent.number, size
    )
    for model, bound in zip(mixture.weights, places, strict=True):
        if place < bound:
            return model
    return next(reversed(mixture.weights))


@functools.lru_cache(maxsize=64)
def bounds(weights: tuple[float, ...], size: int) -> tuple[int, ...]:
    """Up to which place each model goes."""
    total = math.fsum(weights)
    wanted = [w / total * size for w in weights]
    counts = [math.floor(w + 1e-9) for w in wanted]
    order = sorted(range(len(weights)), key=lambda i: counts[i] - wanted[i])
    for i in order[: size - sum(counts)]:
        counts[i] += 1
    found, so_far = [], 0
    for count in counts:
        so_far += count
        found.append(so_far)
    return tuple(found)
