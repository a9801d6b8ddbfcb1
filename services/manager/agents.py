"""Agents of runs: what is known of each, in pages; and one of them from all sides.

What agents answered is read from the run's files, of runs under way from the parts that the
recorder has written. A run's index (the last answer of each agent, with sums) is made once and kept
while the files stay as they are; pages, filters and orders are taken from it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from populace.inspection import inspect, stored_agent
from populace.models.kept import KeptAnswers
from populace.personas.people import attributes, load_people
from shared.errors import BusError, CodecError, InvalidInputError, PopulaceError, RemoteError
from shared.logs import get_logger

if TYPE_CHECKING:
    from services.manager.manager import Manager

_log = get_logger(__name__)

PAGE = 50
"""Agents on a page."""
MOST_ANSWERS = 500
MOST_EXCHANGES = 100
_HELD = 6
_PAUSE_TIMES = 5
_READ_HELD = 2000
_EXCHANGES_WITHIN = 10.0
_KNOWN = (
    "run",
    "round",
    "population",
    "agent",
    "method",
    "call",
    "value",
    "answer",
    "error",
    "message",
    "tokens",
    "tokens_out",
    "seconds",
    "model",
    "backend",
)
_TAKEN = ("round", "population", "agent", "method", "value", "answer", "error", "message")
_SUMS = ("answers", "failed", "tokens")
OPERATORS = ("=", "≠", "<", "≤", ">", "≥", "contains")
Operator = Literal["=", "≠", "<", "≤", ">", "≥", "contains"]


@dataclass(frozen=True)
class Filter:
    """A condition on a column."""

    column: str
    operator: str
    value: str


@dataclass
class Index:
    """The last answer of each agent of a run."""

    table: pa.Table
    """By population and agent; then the columns of the answer, sums, and persona columns."""
    personas: list[str]
    """Names of the persona columns."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Agents by population."""


@dataclass
class _Sums:
    """Of one population, while an index is made."""

    seen: Any = field(default_factory=lambda: np.zeros(0, bool))
    counts: dict[str, Any] = field(
        default_factory=lambda: {name: np.zeros(0, np.int64) for name in _SUMS}
    )

    def grow(self, size: int) -> None:
        """Have room for so many agents."""
        if size > len(self.seen):
            more = size - len(self.seen)
            self.seen = np.concatenate([self.seen, np.zeros(more, bool)])
            for name, held in self.counts.items():
                self.counts[name] = np.concatenate([held, np.zeros(more, np.int64)])


def answer_files(folder: Path) -> list[Path]:
    """The files that hold a run's answers, oldest first."""
    whole = folder / "answers.parquet"
    return [whole] if whole.exists() else sorted((folder / "answers.parts").glob("*.parquet"))


def persona_columns(file: Path) -> list[str]:
    """Names of the persona columns of a file of answers.

    Raises:
        InvalidInputError: it can't be read.
    """
    try:
        return [name for name in pq.read_schema(file).names if name not in _KNOWN]
    except (OSError, pa.ArrowInvalid) as error:
        raise InvalidInputError(f"the answers can't be read: {error}") from None


def _stamp(files: list[Path]) -> Any:
    return tuple((str(f), (s := f.stat()).st_mtime_ns, s.st_size) for f in files)


def make_index(files: list[Path]) -> Index:
    """Read files, from the last row to the first; memory grows with agents, not with answers.

    Raises:
        InvalidInputError: a file can't be read.
    """
    sums: dict[str, _Sums] = {}
    pieces: list[pa.Table] = []
    try:
        for file in reversed(files):
            with pq.ParquetFile(file) as parquet:
                names = parquet.schema_arrow.names
                wanted = [*_TAKEN, *(n for n in names if n not in _KNOWN)]
                for group in reversed(range(parquet.num_row_groups)):
                    rows = _latest_of_group(parquet, group, sums)
                    if len(rows):
                        whole = parquet.read_row_group(group, columns=wanted)
                        pieces.append(_texts(whole.take(pa.array(rows))))
    except (OSError, pa.ArrowInvalid) as error:
        raise InvalidInputError(f"the answers can't be read: {error}") from None
    table = pa.concat_tables(pieces, promote_options="permissive") if pieces else None
    if table is None:
        return Index(pa.table({"population": [], "agent": []}), [])
    agents = table["agent"].to_numpy()
    populations = table["population"].combine_chunks().dictionary_encode()
    codes = populations.indices.to_numpy(zero_copy_only=False)
    for name in _SUMS:
        column = np.zeros(len(agents), np.int64)
        for code, population in enumerate(populations.dictionary.to_pylist()):
            here = codes == code
            column[here] = sums[population].counts[name][agents[here]]
        table = table.append_column(name, pa.array(column))
    table = table.sort_by([("population", "ascending"), ("agent", "ascending")]).combine_chunks()
    personas = [n for n in table.column_names if n not in (*_KNOWN, *_SUMS)]
    sizes = {name: int(one.seen.size) for name, one in sorted(sums.items())}
    return Index(table, personas, sizes)


def _texts(table: pa.Table) -> pa.Table:
    """The table with texts as texts, which can be put into order."""
    for place, one in enumerate(table.schema):
        if pa.types.is_dictionary(one.type):
            table = table.set_column(place, one.name, table[one.name].cast(pa.string()))
    return table


def _latest_of_group(parquet: pq.ParquetFile, group: int, sums: dict[str, _Sums]) -> Any:
    """Rows of a row group that are the last of their agents; all of its rows are summed up."""
    counted = [name for name in ("error", "tokens") if not _says_nothing(parquet, group, name)]
    part = parquet.read_row_group(group, columns=["population", "agent", *counted])
    agents = part["agent"].to_numpy()
    failed = part["error"].is_valid().to_numpy() if "error" in counted else None
    tokens = pc.fill_null(part["tokens"], 0).to_numpy() if "tokens" in counted else None
    populations = part["population"].combine_chunks().dictionary_encode()
    codes = populations.indices.to_numpy(zero_copy_only=False)
    found = []
    alone = len(codes) and codes[0] == codes[-1] and (codes == codes[0]).all()
    for code, population in enumerate(populations.dictionary.to_pylist()):
        if alone and code != codes[0]:
            continue
        held = sums.setdefault(population, _Sums())
        rows = slice(None) if alone else np.flatnonzero(codes == code)
        who = agents[rows]
        size = int(who.max()) + 1
        held.grow(size)
        counts = np.bincount(who, minlength=size)
        if failed is not None:
            lost = np.bincount(who[failed[rows]], minlength=size)
            held.counts["failed"][:size] += lost
            counts = counts - lost
        held.counts["answers"][:size] += counts
        if tokens is not None:
            spent = np.bincount(who, weights=tokens[rows], minlength=size)
            held.counts["tokens"][:size] += spent.astype(np.int64)
        if held.seen[who].all():
            continue
        last = np.full(size, -1, np.int64)
        # Of several rows of one agent, the last one stays.
        last[who] = np.arange(len(agents))[rows]
        new = (last >= 0) & ~held.seen[:size]
        found.append(last[new])
        held.seen[:size] |= new
    return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)


def _says_nothing(parquet: pq.ParquetFile, group: int, name: str) -> bool:
    """Whether the statistics of a row group say that a column has no value but 0 there."""
    place = parquet.schema_arrow.names.index(name)
    rows = parquet.metadata.row_group(group)
    told = rows.column(place).statistics
    if told is None or not told.has_null_count:
        return False
    if told.null_count == rows.num_rows:
        return True
    return bool(told.has_min_max and told.min == 0 and told.max == 0)


def select(
    index: Index,
    population: str,
    filters: list[Filter],
    sort: str,
    start: int,
    *,
    size: int = PAGE,
) -> dict[str, Any]:
    """One page of agents.

    Args:
        index: the run's.
        population: whose; empty: all.
        filters: conditions that all hold.
        sort: a column, with ``-`` before it for the largest first.
        start: number of the first one on the page.
        size: how many.

    Raises:
        InvalidInputError: there is no such column, or a value can't be compared with it.
    """
    table = index.table
    if population:
        table = table.filter(pc.equal(table["population"], population))
    for one in filters:
        table = table.filter(_mask(table, one))
    name = sort.removeprefix("-")
    if name and table.num_rows:
        if name not in table.column_names:
            raise InvalidInputError(f"there is no column {name!r}")
        order = "descending" if sort.startswith("-") else "ascending"
        # A page is all that is needed of the order, and equal values stay in the agents' order.
        keys = [(name, order), ("population", "ascending"), ("agent", "ascending")]
        best = pc.select_k_unstable(table, min(start + size, table.num_rows), keys)
        rows = table.take(best[start:])
    else:
        rows = table.slice(start, size)
    return {
        "matching": table.num_rows,
        "total": index.table.num_rows,
        "start": start,
        "columns": [n for n in table.column_names if n not in ("message",)],
        "personas": index.personas,
        "rows": rows.to_pylist(),
    }


def _mask(table: pa.Table, wanted: Filter) -> Any:
    if wanted.column not in table.column_names:
        known = ", ".join(table.column_names)
        raise InvalidInputError(f"there is no column {wanted.column!r} (there are: {known})")
    if wanted.operator not in OPERATORS:
        raise InvalidInputError(f"conditions are one of {' '.join(OPERATORS)}")
    column = table[wanted.column]
    if wanted.operator == "contains":
        text = pc.cast(column, pa.string())
        return pc.fill_null(pc.match_substring(text, wanted.value, ignore_case=True), False)
    value: Any = wanted.value
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        try:
            value = float(wanted.value)
        except ValueError:
            raise InvalidInputError(
                f"{wanted.column} holds numbers, and {wanted.value!r} is none"
            ) from None
    elif pa.types.is_boolean(column.type):
        value = wanted.value.strip().lower() in ("true", "yes", "1")
    elif wanted.operator not in ("=", "≠"):
        raise InvalidInputError(f"{wanted.column} holds texts, which have no order: use = or ≠")
    compare = {
        "=": pc.equal,
        "≠": pc.not_equal,
        "<": pc.less,
        "≤": pc.less_equal,
        ">": pc.greater,
        "≥": pc.greater_equal,
    }[wanted.operator]
    return pc.fill_null(compare(column, value), False)


def by_group(files: list[Path], column: str, most: int = 12) -> dict[str, Any]:
    """The mean of the answers' numbers by round and by the value of a persona column.

    Returns:
        ``{"rounds": [...], "lines": {value: [mean or None, ...]}}``.

    Raises:
        InvalidInputError: no file has such a column.
    """
    tables = []
    for file in files:
        if column in pq.read_schema(file).names:
            tables.append(pq.read_table(file, columns=["round", column, "value"]))
    if not tables:
        raise InvalidInputError(f"no answers have a column {column!r}")
    table = pa.concat_tables(tables, promote_options="permissive")
    table = table.filter(table["value"].is_valid())
    found = table.group_by(["round", column]).aggregate([("value", "mean"), ("value", "count")])
    rounds = sorted(set(found["round"].to_pylist()))
    place = {number: i for i, number in enumerate(rounds)}
    lines: dict[str, list[float | None]] = {}
    weight: dict[str, int] = {}
    for row in found.to_pylist():
        name = str(row[column])
        line = lines.setdefault(name, [None] * len(rounds))
        line[place[row["round"]]] = row["value_mean"]
        weight[name] = weight.get(name, 0) + row["value_count"]
    kept = sorted(lines, key=lambda n: -weight[n])[:most]
    return {"rounds": rounds, "lines": {name: lines[name] for name in sorted(kept)}}


@dataclass(frozen=True)
class _Held:
    """Something that was made of a run's files."""

    value: Any
    stamp: Any
    at: float
    took: float


class AgentBook:
    """Looks agents up, for pages and programs.

    Args:
        manager: whose.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()
        """By run and what it is."""
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._ahead: asyncio.Task[Index] | None = None
        self._read: OrderedDict[tuple[Any, ...], pa.Table] = OrderedDict()
        """One agent's answers of one file, as it was; used in threads, one at a time."""
        self._reading = threading.Lock()

    def folder(self, run: str) -> Path:
        """Where a run's files are."""
        return self._manager.settings.runs_dir / run

    async def index(self, run: str) -> Index:
        """A run's index, as new as its files, or nearly so where making it takes long.

        Raises:
            InvalidInputError: the files can't be read.
        """
        found: Index = await self._made_of((run, "index"), make_index)
        return found

    async def by_group(self, run: str, column: str) -> dict[str, Any] | None:
        """See ``by_group``; None: no answers have such a column (yet)."""
        try:
            found: dict[str, Any] = await self._made_of(
                (run, f"by {column}"), lambda files: by_group(files, column)
            )
        except InvalidInputError:
            return None
        return found

    async def _made_of(self, key: tuple[str, str], make: Callable[[list[Path]], Any]) -> Any:
        """Something made of a run's files, kept while they stay as they are.

        Of a run under way, whose files change all the time, it may be some seconds old: a sixth of
        the time at most is spent on making it.
        """
        async with self._locks.setdefault(key, asyncio.Lock()):
            files = await asyncio.to_thread(answer_files, self.folder(key[0]))
            stamp = await asyncio.to_thread(_stamp, files)
            held = self._held.get(key)
            began = time.monotonic()
            if held is not None:
                self._held.move_to_end(key)
                if held.stamp == stamp or began - held.at < _PAUSE_TIMES * held.took:
                    return held.value
            value = await asyncio.to_thread(make, files)
            now = time.monotonic()
            self._held[key] = _Held(value, stamp, now, now - began)
            while len(self._held) > _HELD:
                gone, _ = self._held.popitem(last=False)
                self._locks.pop(gone, None)
            return value

    async def personas(self, run: str) -> list[str]:
        """Names of a run's persona columns; its index is made meanwhile, as it is wanted next.

        Raises:
            InvalidInputError: the files can't be read.
        """
        files = await asyncio.to_thread(answer_files, self.folder(run))
        if not files:
            return []
        if (run, "index") not in self._held and self._ahead is None:
            self._ahead = asyncio.ensure_future(self.index(run))
            self._ahead.add_done_callback(self._made_ahead)
        return await asyncio.to_thread(persona_columns, files[0])

    def _made_ahead(self, task: asyncio.Task[Index]) -> None:
        self._ahead = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("an index can't be made", error=str(error))

    def forget(self, run: str) -> None:
        """A run was deleted."""
        for key in [key for key in self._held if key[0] == run]:
            del self._held[key]

    async def page(
        self, run: str, population: str, filters: list[Filter], sort: str, start: int
    ) -> dict[str, Any]:
        """A page of a run's agents, and which populations there are.

        Raises:
            InvalidInputError: a condition can't be used, or files can't be read.
        """
        index = await self.index(run)
        found = await asyncio.to_thread(select, index, population, filters, sort, start)
        sizes = dict(index.sizes)
        if self._manager.is_live(run):
            try:
                seen = await inspect(self._manager.bus, self._manager.settings.subjects, run)
                sizes |= {p.name: p.count for p in seen.populations}
            except (BusError, RemoteError):
                pass  # it has ended meanwhile, or is between two lives
        return {**found, "run": run, "populations": sizes}

    async def one(self, run: str, name: str) -> dict[str, Any]:
        """One agent: what it holds now, or held at the end, and what it answered.

        Raises:
            InvalidInputError: there is no such agent.
        """
        population, _, number = name.rpartition("/")
        if not population or not number.isdecimal():
            raise InvalidInputError(f"{name!r} is no agent; they are named as in players/17")
        manager = self._manager
        found: dict[str, Any] = {"run": run, "agent": name, "live": False, "where": "", "one": None}
        refused = f"nothing is known of an agent {name!r} of the run {run!r}"
        if manager.is_live(run):
            try:
                told = await inspect(manager.bus, manager.settings.subjects, run, agent=name)
                found["one"] = told.one and told.one.model_dump(mode="json")
                found |= {"live": True, "where": told.where}
            except (BusError, RemoteError) as error:
                # Between two lives agents are on their way: what was written down is shown.
                refused = str(error)
        if found["one"] is None:
            try:
                stored = await stored_agent(manager.bus, manager.settings.subjects, run, name)
            except (BusError, CodecError) as error:
                stored, found["problem"] = None, str(error)
            if stored is not None:
                found["one"] = stored.model_dump(mode="json")
        files = await asyncio.to_thread(answer_files, self.folder(run))
        found["answers"] = await asyncio.to_thread(self._answers_of, files, population, int(number))
        messages = await asyncio.to_thread(_messages_of, self.folder(run), name)
        found["messages"] = messages
        if found["one"] is None and not found["answers"]:
            raise InvalidInputError(refused)
        if found["one"] is None or found["one"]["persona"] is None:
            found["persona"], found["text"] = await self._persona(run, name, found["answers"])
        else:
            found["persona"], found["text"] = found["one"]["persona"], found["one"]["text"]
        return found

    def _answers_of(self, files: list[Path], population: str, number: int) -> list[dict[str, Any]]:
        """An agent's answers, oldest first, the last so many; each file is read for it once."""
        tables = []
        with self._reading:
            for file in files:
                status = file.stat()
                key = (str(file), status.st_mtime_ns, status.st_size, population, number)
                held = self._read.pop(key, None)
                if held is None:
                    wanted = [("population", "=", population), ("agent", "=", number)]
                    held = pq.read_table(file, filters=wanted)
                self._read[key] = held
                tables.append(held)
            while len(self._read) > _READ_HELD:
                self._read.popitem(last=False)
        if not tables:
            return []
        whole = pa.concat_tables(tables, promote_options="permissive")
        whole = whole.sort_by([("round", "ascending"), ("call", "ascending")])
        rows: list[dict[str, Any]] = whole.slice(max(0, whole.num_rows - MOST_ANSWERS)).to_pylist()
        return rows

    async def _persona(
        self, run: str, name: str, answers: list[dict[str, Any]]
    ) -> tuple[dict[str, Any] | None, str | None]:
        """Who the agent is, from where people are stored, or else from the answers' columns."""
        shown = {k: v for k, v in (answers[-1] if answers else {}).items() if k not in _KNOWN}
        columns = {k: v for k, v in shown.items() if v is not None}
        spec = await self._manager.spec(run)
        number = name.rpartition("/")[2]
        if spec is not None and spec.agents.personas is not None and columns:
            settings = self._manager.settings
            roots = (*settings.roots, settings.personas_dir.resolve())
            count, at = spec.agents.count, int(number)
            try:
                source = await self._manager.people_source(spec)
                people = await asyncio.to_thread(load_people, source, roots, count, at, at + 1)
                from populace.personas.people import Persona

                persona = Persona(people, 0)
                # Several populations may stand in one run; whose people these are is not told.
                if all(attributes(persona).get(k, v) == v for k, v in columns.items()):
                    return attributes(persona), persona.text
            except (PopulaceError, IndexError, OSError) as error:
                _log.info("a persona's text can't be had", agent=name, error=str(error))
        return columns or None, None

    async def exchanges(self, run: str, name: str) -> dict[str, Any]:
        """What models were asked by one agent, and what they said: the latest, oldest first.

        Raises:
            BusError: the broker does not answer.
        """
        population, _, number = name.rpartition("/")
        manager = self._manager
        info = manager.watcher.runs.get(run)
        last = max(1, info.rounds_done + 1 if info is not None else 1)
        kept = KeptAnswers(manager.bus, manager.settings.subjects)
        found: list[dict[str, Any]] = []
        cut = False
        until = time.monotonic() + _EXCHANGES_WITHIN
        for round_number in range(last, -1, -1):
            if len(found) >= MOST_EXCHANGES or time.monotonic() > until:
                cut = True
                break
            rows = await kept.of_agent(run, round_number, population, int(number))
            for request, response in reversed(rows):
                found.append(
                    {
                        "round": round_number,
                        "question": request.key[4] + 1,
                        "model": request.model,
                        "messages": list(request.messages),
                        "text": response.text,
                        "error": response.error or None,
                        "tokens_in": response.tokens_in,
                        "tokens_out": response.tokens_out,
                        "seconds": response.seconds,
                    }
                )
        found.reverse()
        return {"run": run, "agent": name, "exchanges": found[-MOST_EXCHANGES:], "cut": cut}


def _messages_of(folder: Path, name: str) -> list[dict[str, Any]] | None:
    """What an agent said to others and heard of them; None: the run does not record it."""
    whole = folder / "messages.parquet"
    files = [whole] if whole.exists() else sorted((folder / "messages.parts").glob("*.parquet"))
    if not files:
        return None
    wanted = [[("sender", "=", name)], [("receiver", "=", name)]]
    table = pa.concat_tables([pq.read_table(file, filters=wanted) for file in files])
    rows: list[dict[str, Any]] = table.slice(max(0, table.num_rows - MOST_ANSWERS)).to_pylist()
    return rows
