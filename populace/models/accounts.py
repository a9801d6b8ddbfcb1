"""What models were asked and what it cost: counted by round and model; and budgets."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shared.bus import KeyValue
from shared.errors import BusError, InvalidInputError, RevisionConflictError
from shared.ids import new_id
from shared.logs import get_logger
from shared.messages.model import ModelResponse
from shared.messages.scenario import ModelSpec, Price, ScenarioSpec
from shared.problems import first_problem

_log = get_logger(__name__)

_MILLION = 1e6
_CHARGED = ("openai", "vllm")
"""Back ends that may cost money; the others cost none."""
_ROUNDS_TOGETHER = 32
KEPT_FOR = 7 * 86400.0
"""Seconds for which the broker keeps what runs have used and spent; manifests keep it for good."""


@dataclass(slots=True)
class Usage:
    """Sums over requests."""

    requests: int = 0
    """Prompts that were answered by asking, whatever came of it."""
    attempts: int = 0
    """Requests that left for an endpoint, those that were tried again and repairs included."""
    kept: int = 0
    """Prompts that were answered from kept answers: nothing was asked, nothing is charged."""
    failed: int = 0
    refused: int = 0
    """Prompts that were not asked, since the budget was spent."""
    tokens_in: int = 0
    tokens_out: int = 0
    cached: int = 0
    """Of the prompt tokens, those that the engine had at hand, where it tells."""
    money: float = 0.0
    repaired: int = 0
    """Answers that fitted their schema at the second time."""
    shortened: int = 0
    """Prompts of which messages were left out."""
    cut: int = 0
    """Prompts of which the middle of a message was left out."""
    ended_early: int = 0
    """Answers that the token limit ended."""
    estimated: int = 0
    """Answers whose token counts the endpoint did not tell, or told wrongly."""

    def add(self, response: ModelResponse, price: tuple[float, float] | None) -> None:
        """Count a response."""
        details = response.details
        if details.get("kept"):
            self.kept += 1
            return
        if response.error_kind == "budget":  # at once, or when it was to be tried again
            self.refused += 1
            self.attempts += int(details.get("attempts", 0))
            return
        if response.error_kind == "not_kept":
            self.failed += 1  # nothing was asked
            return
        attempts = int(details.get("attempts", 1))
        self.requests += attempts > 0  # it may have failed before it could leave
        self.attempts += attempts
        self.failed += bool(response.error_kind)
        self.tokens_in += response.tokens_in
        self.tokens_out += response.tokens_out
        self.cached += int(details.get("cached", 0))
        self.repaired += bool(details.get("repaired"))
        self.shortened += bool(details.get("shortened"))
        self.cut += bool(details.get("cut"))
        self.ended_early += response.finish == "length"
        self.estimated += "usage" in details
        if price is not None:
            self.money += money_of(response.tokens_in, response.tokens_out, price)

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add another's sums."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + other.get(one.name, 0))

    def plain(self) -> dict[str, Any]:
        """As it is written; zeros are left out."""
        return {k: round(v, 6) for k, v in asdict(self).items() if v}


def money_of(tokens_in: int, tokens_out: int, price: tuple[float, float]) -> float:
    """What so many tokens cost."""
    return (tokens_in * price[0] + tokens_out * price[1]) / _MILLION


@dataclass
class Accounts:
    """A run's usage, by round and model."""

    by: dict[tuple[int, str], Usage] = field(default_factory=dict)
    _dirty: set[int] = field(default_factory=set)
    name: str = field(default_factory=lambda: new_id("a"))
    """Part of the keys under which they are written: a run that goes on begins others."""

    def add(
        self,
        round_number: int,
        model: str,
        response: ModelResponse,
        price: tuple[float, float] | None,
    ) -> None:
        """Count a response."""
        usage = self.by.get((round_number, model))
        if usage is None:
            usage = self.by[round_number, model] = Usage()
        usage.add(response, price)
        self._dirty.add(round_number // _ROUNDS_TOGETHER)

    def changed(self) -> dict[int, bytes]:
        """What a process writes down: by block of rounds, those that changed since the last call.

        In blocks, so that no message grows with a run's length.
        """
        dirty, self._dirty = self._dirty, set()
        blocks: dict[int, list[Any]] = {block: [] for block in dirty}
        for (round_number, model), usage in self.by.items():
            if (block := round_number // _ROUNDS_TOGETHER) in blocks:
                blocks[block].append([round_number, model, usage.plain()])
        return {block: json.dumps(rows).encode() for block, rows in blocks.items()}

    def again(self, block: int) -> None:
        """A block could not be written; it counts as changed."""
        self._dirty.add(block)

    def take_json(self, data: bytes) -> None:
        """Add what a process wrote down."""
        for round_number, model, sums in json.loads(data):
            self.by.setdefault((int(round_number), str(model)), Usage()).merge(sums)

    def merge(self, other: Accounts) -> None:
        """Add another's sums."""
        for key, usage in other.by.items():
            self.by.setdefault(key, Usage()).merge(asdict(usage))

    def total(self, round_number: int | None = None, model: str | None = None) -> Usage:
        """The sum over rounds and models."""
        found = Usage()
        for (r, m), usage in self.by.items():
            if round_number in (None, r) and model in (None, m):
                found.merge(asdict(usage))
        return found

    def by_model(self) -> dict[str, dict[str, Any]]:
        """Each model's sums."""
        names = dict.fromkeys(m for _, m in self.by)
        return {name: self.total(model=name).plain() for name in names}


class PriceTable:
    """Money for a million tokens, by model.

    Args:
        path: a YAML file: model (as its endpoint names it) to ``{input, output}``; None: there is
            no table.

    Raises:
        InvalidInputError: the file can't be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._prices: dict[str, Price] = {}
        if path is None:
            return
        try:
            raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            said = " ".join(str(error).split())[:200]
            raise InvalidInputError(f"the price table {path} can't be used: {said}") from None
        if not isinstance(raw, dict):
            raise InvalidInputError(f"the price table {path} must map models to input and output")
        for model, price in raw.items():
            try:
                self._prices[str(model)] = Price.model_validate(price)
            except ValidationError as error:
                said = first_problem(error, Price)
                raise InvalidInputError(f"the price table {path}: {model}: {said}") from None

    def of(self, spec: ModelSpec) -> tuple[float, float] | None:
        """A model's price for tokens in and out; None if nobody knows it."""
        price = spec.price or self._prices.get(spec.model or spec.backend)
        return None if price is None else (price.input, price.output)

    def of_all(self, models: Mapping[str, ModelSpec]) -> dict[str, tuple[float, float]]:
        """The prices of those whose price is known."""
        found = {name: self.of(spec) for name, spec in models.items()}
        return {name: price for name, price in found.items() if price is not None}

    def check_budget(self, spec: ScenarioSpec) -> None:
        """Make sure that a budget of money can be kept.

        Raises:
            InvalidInputError: nobody knows what one of the models costs.
        """
        if spec.budget is None or spec.budget.money is None or spec.replay is not None:
            return
        priced = self.of_all(spec.models)
        unknown = [
            name
            for name, model in spec.models.items()
            if name not in priced and model.mixture is None and model.backend in _CHARGED
        ]
        if unknown:
            raise InvalidInputError(
                f"budget: money can't be counted, as no price of {', '.join(unknown)} is known; "
                f"give models.{unknown[0]}.price, or a table (POPULACE_PRICES)"
            )


# Budgets
@dataclass(slots=True)
class Spent:
    """What of a budget is gone, and what is promised to requests under way."""

    tokens: int = 0
    money: float = 0.0
    requests: int = 0

    def add(self, other: Spent, sign: int = 1) -> None:
        """Add, or with -1 take away."""
        self.tokens += sign * other.tokens
        self.money += sign * other.money
        self.requests += sign * other.requests

    def reaches(self, budget: Mapping[str, Any]) -> str | None:
        """Which part of a budget it reaches, in words."""
        for name, unit in (
            ("tokens", " tokens"),
            ("money", " of money"),
            ("requests", " requests"),
        ):
            limit = budget.get(name)
            if limit is not None and getattr(self, name) >= limit - 1e-12:
                return f"{limit:,}{unit}"
        return None


class BudgetStore(abc.ABC):
    """Where it stands what a run has spent: ``{process: [spent, promised, at]}``."""

    @abc.abstractmethod
    async def read(self) -> tuple[dict[str, Any], int]:
        """All processes' parts, and the revision."""

    @abc.abstractmethod
    async def write(self, parts: dict[str, Any], revision: int) -> bool:
        """Write, unless it was changed since; whether it was written."""


class OwnBudget(BudgetStore):
    """A budget that one process alone spends."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}

    async def read(self) -> tuple[dict[str, Any], int]:
        """See ``BudgetStore.read``."""
        return dict(self._parts), 0

    async def write(self, parts: dict[str, Any], revision: int) -> bool:
        """See ``BudgetStore.write``."""
        self._parts = parts
        return True


class SharedBudget(BudgetStore):
    """A budget that several processes spend together.

    Args:
        bucket: where it stands.
        run: whose it is.
    """

    def __init__(self, bucket: KeyValue, run: str) -> None:
        self._bucket = bucket
        self._run = run

    async def read(self) -> tuple[dict[str, Any], int]:
        """See ``BudgetStore.read``."""
        entry = await self._bucket.get(self._run)
        return ({}, 0) if entry is None else (json.loads(entry.value), entry.revision)

    async def write(self, parts: dict[str, Any], revision: int) -> bool:
        """See ``BudgetStore.write``."""
        data = json.dumps(parts).encode()
        try:
            await self._bucket.write(self._run, data, revision)
        except RevisionConflictError:
            return False
        return True


_LOST_AFTER = 40.0
HEARTBEAT = 5.0
"""Seconds after which a keeper with requests under way tells of itself, whatever happens."""
_AGAIN = 0.25
_CONFLICT = 0.003
_CLOSING_TRIES = 4


class BudgetKeeper:
    """Lets requests of one run through for as long as its budget lasts.

    What is asked is promised first and paid when it is answered. While what was paid is below the
    budget, but with what is promised would go beyond, requests wait for others to be paid; so the
    budget is passed by no more than what was under way.

    Args:
        budget: as in ``Budget``.
        store: where it stands what is spent.
        process: this process's name.
    """

    def __init__(self, budget: Mapping[str, Any], store: BudgetStore, process: str) -> None:
        self._budget = budget
        self._store = store
        self._process = process
        self._paid = Spent()
        self._promised = Spent()
        self._others = Spent()
        self._others_promised = Spent()
        self._changing = asyncio.Lock()
        self._dirty = False
        self._telling: asyncio.Task[None] | None = None
        self._told_at = time.monotonic()
        self._paid_here = asyncio.Event()

    def allow(self, budget: Mapping[str, Any]) -> None:
        """Take a budget that may have been changed since."""
        self._budget = budget

    async def admit(self, presumed: Spent) -> str | None:
        """Promise what a request will presumably cost.

        Returns:
            None, or which budget is spent.
        """
        while True:
            await self._exchange()
            over = self._total().reaches(self._budget)
            if over is not None:
                return over
            ahead = self._total()
            ahead.add(self._promised)
            ahead.add(self._others_promised)
            under_way = self._promised.requests or self._others_promised.requests
            if ahead.reaches(self._budget) is None or not under_way:
                self._promised.add(presumed)
                self._dirty = True
                return None
            self._paid_here.clear()
            with contextlib.suppress(TimeoutError):  # others may have paid
                await asyncio.wait_for(self._paid_here.wait(), _AGAIN)

    def pay(self, presumed: Spent, actual: Spent) -> None:
        """Pay what was promised for a request, now that it is answered."""
        self._promised.add(presumed, -1)
        self._paid.add(actual)
        self._dirty = True
        self._paid_here.set()
        self._tell()

    def beat(self) -> None:
        """Tell the others that what is promised here is still under way."""
        if self._promised.requests and time.monotonic() - self._told_at > HEARTBEAT:
            self._dirty = True
        if self._dirty:
            self._tell()

    async def close(self) -> None:
        """Tell what has not been told yet."""
        for _ in range(_CLOSING_TRIES):
            if self._telling is not None:
                await self._telling
            if not self._dirty:  # what is paid while an exchange is under way goes with the next
                return
            self._tell()

    def _tell(self) -> None:
        if self._telling is None or self._telling.done():
            self._telling = asyncio.ensure_future(self._exchange())

    def _total(self) -> Spent:
        total = Spent()
        total.add(self._paid)
        total.add(self._others)
        return total

    async def _exchange(self) -> None:
        """Tell the others, and hear of them; what gathers meanwhile goes with the next."""
        async with self._changing:
            for _ in range(100):
                try:
                    parts, revision = await self._store.read()
                    mine = parts.get(self._process)
                    if mine is not None and not self._paid.requests and not self._promised.requests:
                        self._paid = Spent(*mine[0])  # an earlier life of this process
                    self._hear(parts)
                    if not self._dirty:
                        return
                    self._dirty = False
                    parts[self._process] = [
                        _plain(self._paid), _plain(self._promised), time.time()
                    ]  # fmt: skip
                    if await self._store.write(parts, revision):
                        self._told_at = time.monotonic()
                        return
                    self._dirty = True
                except BusError as error:
                    self._dirty = True  # what was to be told has not been
                    _log.warning("a budget can't be read for now", error=str(error))
                    await asyncio.sleep(0.5)
                    continue
                await asyncio.sleep(_CONFLICT)

    def _hear(self, parts: Mapping[str, Any]) -> None:
        self._others, self._others_promised = Spent(), Spent()
        for process, (paid, promised, at) in parts.items():
            if process == self._process:
                continue
            self._others.add(Spent(*paid))
            if time.time() - at < _LOST_AFTER:  # promises of the dead are void
                self._others_promised.add(Spent(*promised))


def _plain(spent: Spent) -> list[Any]:
    return [spent.tokens, round(spent.money, 9), spent.requests]
