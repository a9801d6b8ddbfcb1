"""The guess game: pick a number; nearest to a target made of the average wins."""

from __future__ import annotations

import asyncio
import math

import prompts
from agents import Player
from baselines import BestResponse, CognitiveHierarchy, LevelK
from references import report
from rules import Params

from populace import Scenario, ScenarioError, each
from populace.environments import Group
from populace.report import ReportSpec
from shared.messages.scenario import PlannedEvent

_CHANGEABLE = frozenset(("target", "style", "notes", "variation", "near"))
"""Parameters that an event may change in the middle of a game."""


class GuessAverage(Scenario):
    """Every player guesses; the winning number is announced before the next round."""

    Params = Params

    async def setup(self) -> None:
        """Make the players."""
        params = self.params
        self.mean: float | None = None
        self.news: str | None = None
        self.group_environments = []
        if params.players.kind != "llm":
            await self._make_rule_players()
            return
        low, high = params.range
        await self._make_groups()
        experts = each([i == 0 for i in range(self.agents)]) if params.one_expert else None
        self.players = await self.population(
            Player,
            low,
            high,
            each(self.paths),
            each(self.uses),
            experts,
            name="players",
        )
        self.made_up = ""
        if params.made_up_by is not None:
            counts = await self.players.attribute(params.made_up_by).reduce("count")
            self.made_up = prompts.made_up(params.made_up_by, counts.counts)

    async def injected(self, event: PlannedEvent) -> None:
        """Take other parameters, as far as they can be other in the middle of a game."""
        before = self.params
        await super().injected(event)
        after, self.params = self.params, before
        for name in type(before).model_fields:
            if name not in _CHANGEABLE and getattr(before, name) != getattr(after, name):
                raise ScenarioError(f"params.{name} can't be changed while the game is played")
        self.params = after

    @property
    def rules(self) -> str:
        """The rules as they are now."""
        params = self.params
        low, high = params.range
        return prompts.rules(
            players=self.agents,
            low=low,
            high=high,
            formula=prompts.formula(
                params.target.offset, params.target.ratio, groups=bool(self.groups)
            ),
            groups=self.groups,
            variation=params.variation,
            notes=params.notes,
            made_up=self.made_up,
        )

    async def _make_rule_players(self) -> None:
        """Players who follow a rule instead of asking a model."""
        params = self.params
        if self.groups is not None:
            raise ScenarioError("agents.groups: players who follow a rule play without groups")
        given = params.range
        players = params.players
        if players.kind == "level_k":
            made = self.population(LevelK, *given, players.level, name="players")
        elif players.kind == "cognitive_hierarchy":
            made = self.population(CognitiveHierarchy, *given, players.tau, name="players")
        else:
            made = self.population(BestResponse, *given, name="players")
        self.players = await made

    async def _make_groups(self) -> None:
        """A group environment for each part of the players, within one for the whole game."""
        self.paths = [""] * self.agents
        self.uses = [self.params.model] * self.agents
        models = self.params.group_models
        if self.groups is None:
            if models:
                raise ScenarioError("params.group_models: there are no groups (agents.groups)")
            return
        game = await self.environment(Group, "game", self.groups)
        start = 0
        for i in range(self.groups):
            # As even as can be; nobody is left over.
            size = self.agents // self.groups + (i < self.agents % self.groups)
            group = await game.child(Group, f"g{i + 1}", size)
            here = slice(start, start + size)
            self.paths[here] = [group.path] * size
            if models:
                self.uses[here] = [models[i % len(models)]] * size
            self.group_environments.append(group)
            start += size

    async def round(self, n: int) -> None:
        """One round: guesses, their mean, the winning number."""
        if self.params.players.kind == "llm":
            question = prompts.question(self.params.style)
            guesses = self.players.guess(self.rules, question, self.news)
        else:
            target = self.params.target
            guesses = self.players.play(self.mean, target.offset, target.factor)
        field = "number" if self.params.players.kind == "llm" else None
        summary = await guesses.reduce("mean", field=field)
        if summary.mean is None:
            raise ScenarioError(
                f"no answer of round {n} could be used; the first failure was "
                f"{summary.failure_example}"
            )
        self.mean = summary.mean
        if self.group_environments:
            winning = await self._announce(n)
        else:
            winning = self.params.target.of(summary.mean)
            self.news = prompts.news(n, summary.mean, winning)
        self.record(parsed=summary.numbers, mean=summary.mean, winning=winning)
        near = self.players.options(record=False).nearness(winning, self.params.near)
        winners = dict((await near.reduce("count")).counts)
        winners.pop("", None)
        self.record(near=sum(winners.values()), winners=dict(sorted(winners.items())))

    async def _announce(self, n: int) -> float:
        """Ask every group for its number, tell all groups all numbers; returns the winning one.

        The target is made of the groups' numbers, however many members each has.
        """
        groups = self.group_environments
        found = await asyncio.gather(*(group.summary(n) for group in groups))
        means = [row["mean"] for row in found]
        known = [mean for mean in means if mean is not None]
        winning: float = self.params.target.of(math.fsum(known) / len(known))
        await asyncio.gather(
            *(
                group.announced(prompts.group_news(n, i, means, winning))
                for i, group in enumerate(groups)
            )
        )
        distances = {i: abs(m - winning) for i, m in enumerate(means) if m is not None}
        best = min(distances, key=lambda i: (distances[i], i))
        shown = ", ".join("-" if mean is None else f"{mean:.1f}" for mean in means)
        self.record(groups=shown, best_group=best + 1)
        return winning

    def report(self) -> ReportSpec:
        """What a report shows of the game, and sets beside it."""
        return report(self.params, self.rounds, self.groups, self.personas)
