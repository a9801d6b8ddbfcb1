"""What a scenario will ask of its models, told beforehand from a sample of its own prompts.

The scenario is played in this process with a few of its agents and no model: every prompt is made
as it will be, and answered by words of a likely length. What that takes is scaled up, to all agents
and to rounds beyond the first sixty; to prompts that hold what all others said, by playing half as
many agents as well; and to models of a mixture by their weights.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from populace.models.accounts import Accounts, PriceTable, Usage, money_of
from populace.models.mixture import bounds
from populace.personas.people import find_people
from populace.play import Player
from populace.scenario import Scenario
from populace.world import local
from shared.errors import PopulaceError
from shared.messages.model import Terms
from shared.messages.scenario import ModelSpec, ScenarioSpec, ScriptSpec, Status
from shared.settings import Settings

_WORD = "answer "
_LETTERS_PER_TOKEN = 4
_MOST_ROUNDS = 60
"""Rounds that are played for an estimate."""
_GROWS = 1.15
"""Times as long as with half the agents, from which on prompts are taken to grow with their number;
less may be chance."""


@dataclass
class Estimate:
    """Sums over a whole run."""

    agents: int
    sampled: int
    rounds: int
    played: int = 0
    """Rounds that were played; beyond these it goes on as it went."""
    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    money: float | None = None
    """None: the price of a model is not known."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    by_round: list[dict[str, Any]] = field(default_factory=list)
    """Of the rounds that were played."""
    growing: list[str] = field(default_factory=list)
    """Models whose prompts grow with the number of agents."""

    @property
    def tokens(self) -> int:
        """Prompt and answer tokens."""
        return self.tokens_in + self.tokens_out


async def estimate(
    spec: ScenarioSpec,
    cls: type[Scenario],
    params: BaseModel,
    settings: Settings,
    *,
    sample: int = 24,
    answer_tokens: int = 60,
) -> Estimate:
    """Estimate a scenario.

    Args:
        spec: the scenario.
        cls: its class.
        params: its parameters.
        settings: of this process.
        sample: agents that are played; all of them, if there are no more.
        answer_tokens: how long answers are assumed to be, where the model is not scripted.

    Raises:
        PopulaceError: the scenario can't be played without its models.
    """
    count = min(spec.agents.count, max(sample, 1))
    if spec.agents.groups is not None:
        count = min(spec.agents.count, max(count, spec.agents.groups))
    prices = PriceTable(settings.prices).of_all(spec.models)
    played = min(spec.rounds, _MOST_ROUNDS)
    people = None
    if spec.agents.personas is not None:
        folder = Path(spec.folder) if spec.folder else None
        people = find_people(spec.agents.personas, folder, settings.personas_dir)
    models = {name: _silent(model, answer_tokens) for name, model in spec.models.items()}

    async def nobody(_: Status) -> None:
        """Nobody follows."""

    async def play(agents: int) -> Accounts:
        terms = Terms(prices=prices, keep=False)
        async with local(seed=spec.seed, models=models, settings=settings, terms=terms) as world:
            scenario = cls(
                world,
                params=params,
                seed=spec.seed,
                rounds=played,
                agents=agents,
                isolated=False,
                groups=spec.agents.groups,
                personas=people,
            )
            await Player(world, scenario, nobody).play()
            return world.accounts

    try:
        accounts = await play(count)
    except PopulaceError as error:
        raise PopulaceError(f"the scenario can't be played for an estimate: {error}") from error
    longer: dict[str, float] = {}
    if spec.agents.count > count and spec.agents.groups is None:
        try:
            fewer = await play(count // 2)
        except PopulaceError:  # it can't be played with so few
            fewer = accounts
        longer = _longer(spec, fewer, accounts, count)
    return _scaled(spec, accounts, count, prices, played, longer)


def _longer(
    spec: ScenarioSpec, fewer: Accounts, accounts: Accounts, count: int
) -> dict[str, float]:
    """How many times as long prompts will be with all agents, by model, where they grow so."""
    found = {}
    for name in accounts.by_model():
        half, whole = fewer.total(model=name), accounts.total(model=name)
        if not half.requests or not whole.requests:
            continue
        before, now = half.tokens_in / half.requests, whole.tokens_in / whole.requests
        if now < _GROWS * before:
            continue
        wanted = now + (now - before) / (count - count // 2) * (spec.agents.count - count)
        context = spec.models[name].context if name in spec.models else None
        found[name] = min(wanted, context or math.inf) / now
    return found


def _by_weight(spec: ScenarioSpec, sums: dict[str, Usage], count: int) -> dict[str, Usage]:
    """What all agents will ask: of a mixture's models by their weights, whoever was sampled."""
    factor = spec.agents.count / count
    found = {name: _times(usage, factor) for name, usage in sums.items()}
    for model in spec.models.values():
        weights = model.mixture.weights if model.mixture is not None else None
        if not weights:
            continue
        together = Usage()
        for name in weights:
            together.merge(asdict(sums.get(name, Usage())))
        sampled, whole = (_shares(tuple(weights.values()), n) for n in (count, spec.agents.count))
        for name, some, all_ in zip(weights, sampled, whole, strict=True):
            if some and name in sums:
                found[name] = _times(sums[name], all_ / some)
            elif all_ and together.requests:  # none of the few that were played asks it
                found[name] = _times(together, all_ / count)
    return found


def _shares(weights: tuple[float, ...], size: int) -> list[int]:
    """How many of so many agents each weight gets."""
    return [b - a for a, b in itertools.pairwise((0, *bounds(weights, size)))]


def _times(usage: Usage, factor: float) -> Usage:
    return Usage(
        requests=math.ceil(usage.requests * factor),
        tokens_in=math.ceil(usage.tokens_in * factor),
        tokens_out=math.ceil(usage.tokens_out * factor),
    )


def _beyond(accounts: Accounts, spec: ScenarioSpec, played: int) -> dict[str, Usage]:
    """What the rounds after those that were played will ask, by model.

    They are like the last third of those in the mean, with prompts that grow as they grew since
    the third before it: memories do, up to what a model can take. So rounds may differ.
    """
    count, third = spec.rounds - played, played // 3
    found: dict[str, Usage] = {}
    for name in dict.fromkeys(model for _, model in accounts.by) if count > 0 else ():
        before, last = Usage(), Usage()
        for (number, model), usage in accounts.by.items():
            if model == name and number > played - third:
                last.merge(asdict(usage))
            elif model == name and number > played - 2 * third:
                before.merge(asdict(usage))
        each = last.tokens_in / third
        growth = max(0.0, (last.tokens_in - before.tokens_in) / third) / third
        context = spec.models[name].context if name in spec.models else None
        most = math.inf if context is None else context * last.requests / third
        # The mean is that of the middle of the third; from there on it grows, as far as it may.
        first = min(each + growth * (third / 2 + 1), most)
        grows = count
        if growth > 0 and most < math.inf:
            grows = min(count, int((most - first) / growth) + 1)
        whole = grows * first + growth * grows * (grows - 1) / 2
        if grows < count:
            whole += (count - grows) * most
        found[name] = Usage(
            requests=math.ceil(last.requests / third * count),
            tokens_in=math.ceil(whole),
            tokens_out=math.ceil(last.tokens_out / third * count),
        )
    return found


def _silent(model: ModelSpec, answer_tokens: int) -> ModelSpec:
    """A model that says as much as the real one may, and asks nobody."""
    if model.mixture is not None:
        return model
    if model.backend == "scripted":
        script = (model.script or ScriptSpec()).model_copy(update={"latency": 0.0})
    else:
        tokens = min(answer_tokens, model.max_tokens)
        words = _WORD * max(1, tokens * _LETTERS_PER_TOKEN // len(_WORD))
        # A number is named at its end, for scenarios that look for one.
        script = ScriptSpec(text=f"{words.rstrip()}. My number is {{number}}.")
    return ModelSpec(
        backend="scripted",
        script=script,
        temperature=model.temperature,
        max_tokens=model.max_tokens,
        context=model.context,
        memory=model.memory,
    )


def _scaled(
    spec: ScenarioSpec,
    accounts: Accounts,
    count: int,
    prices: dict[str, tuple[float, float]],
    played: int,
    longer: dict[str, float],
) -> Estimate:
    factor = spec.agents.count / count
    found = Estimate(agents=spec.agents.count, sampled=count, rounds=spec.rounds, played=played)
    found.growing = sorted(longer)
    beyond = _beyond(accounts, spec, played)
    sums = {}
    for name in accounts.by_model():
        usage = sums[name] = accounts.total(model=name)
        usage.merge(asdict(beyond.get(name, Usage())))
        usage.tokens_in = math.ceil(usage.tokens_in * longer.get(name, 1.0))
    for name, usage in _by_weight(spec, sums, count).items():
        price = prices.get(name)
        found.models[name] = {
            "requests": usage.requests,
            "tokens_in": usage.tokens_in,
            "tokens_out": usage.tokens_out,
            "money": None
            if price is None
            else round(money_of(usage.tokens_in, usage.tokens_out, price), 6),
        }
    for part in ("requests", "tokens_in", "tokens_out"):
        setattr(found, part, sum(one[part] for one in found.models.values()))
    costs = [one["money"] for one in found.models.values()]
    if costs and None not in costs:
        found.money = sum(costs)
    by_round: dict[int, Usage] = {}
    for (number, name), one in accounts.by.items():
        tokens_in = math.ceil(one.tokens_in * longer.get(name, 1.0))
        by_round.setdefault(number, Usage()).merge({**asdict(one), "tokens_in": tokens_in})
    for number, usage in sorted(by_round.items()):
        if usage.requests:
            found.by_round.append(
                {
                    "round": number,
                    "requests": math.ceil(usage.requests * factor),
                    "tokens": math.ceil((usage.tokens_in + usage.tokens_out) * factor),
                }
            )
    return found


def as_json(found: Estimate) -> dict[str, Any]:
    """For a program."""
    return {**asdict(found), "tokens": found.tokens}
