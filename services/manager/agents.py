"""Agents of runs: what is known of each, in pages; and one of them from all sides.

What agents answered is read from the run's files, of runs under way from the parts that the
recorder has written. What is made of them (an index of the agents, say) is kept while they stay as
they are; pages, filters and orders are taken from it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from populace.inspection import inspect, stored_agent
from populace.models.kept import KeptAnswers
from populace.personas.people import Persona, attributes, load_people
from services.manager.answers import (
    KNOWN,
    Filter,
    Index,
    answer_files,
    answers_in,
    by_group,
    last_rows,
    make_index,
    message_files,
    messages_in,
    persona_columns,
    select,
    stamp_of,
)
from shared.errors import BusError, CodecError, InvalidInputError, PopulaceError, RemoteError
from shared.ids import check_token, is_token
from shared.logs import get_logger

if TYPE_CHECKING:
    from services.manager.manager import Manager

_log = get_logger(__name__)

R = TypeVar("R")

_MOST_EXCHANGES = 100
_EXCHANGES_WITHIN = 10.0
_HELD = 6
_PAUSE_TIMES = 5
_READ_HELD = 2000
_THREADS = 2
"""That read files: what takes long here must not keep others waiting."""


def split_name(name: str) -> tuple[str, int]:
    """An agent's population and number.

    Raises:
        InvalidInputError: it is no agent's name.
    """
    population, _, number = name.rpartition("/")
    if not (is_token(population) and number.isascii() and number.isdecimal() and len(number) < 12):
        raise InvalidInputError(f"{name[:100]!r} is no agent; they are named as in players/17")
    return population, int(number)


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
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="files")
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()
        """By run and what it is."""
        self._making: dict[tuple[str, str], asyncio.Task[Any]] = {}
        self._read: OrderedDict[tuple[Any, ...], pa.Table] = OrderedDict()
        """One agent's rows of one file, as it was."""
        self._asking = asyncio.Semaphore(1)

    def folder(self, run: str) -> Path:
        """Where a run's files are.

        Raises:
            InvalidInputError: that is no run's name.
        """
        return self._manager.settings.runs_dir / check_token(run, "the run's name")

    async def _in_thread(self, function: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    # What is made of a run's files
    async def index(self, run: str) -> Index:
        """A run's index, as new as its files, or nearly so where making it takes long.

        Raises:
            InvalidInputError: the files can't be read.
        """
        found: Index = await self._made_of(run, "index", make_index)
        return found

    async def by_group(self, run: str, column: str) -> dict[str, Any] | None:
        """See ``by_group``; None: no answers have such a column (yet), or it makes no groups."""
        try:
            found: dict[str, Any] = await self._made_of(
                run, f"by {column}", lambda files: by_group(files, column)
            )
        except InvalidInputError as error:
            _log.info("no means by group", run=run, column=column, error=str(error))
            return None
        return found

    async def _made_of(self, run: str, what: str, make: Callable[[list[Path]], Any]) -> Any:
        """Something made of a run's files, once for all who want it, and kept.

        Of a run under way, whose files change all the time, it may be some seconds old: a sixth of
        the time at most is spent on making it.
        """
        key, folder = (run, what), self.folder(run)
        task = self._making.get(key)
        if task is None:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                if time.monotonic() - held.at < _PAUSE_TIMES * held.took:
                    return held.value
            task = self._making[key] = asyncio.ensure_future(self._make(key, folder, make))
            task.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(task)

    async def _make(
        self, key: tuple[str, str], folder: Path, make: Callable[[list[Path]], Any]
    ) -> Any:
        held = self._held.get(key)

        def work() -> _Held:
            began = time.monotonic()
            files = answer_files(folder)
            stamp = tuple(map(stamp_of, files))
            if held is not None and held.stamp == stamp:
                return held
            value = make(files)
            return _Held(value, stamp, time.monotonic(), time.monotonic() - began)

        made = await self._again(work)
        self._held[key] = made
        self._held.move_to_end(key)
        while len(self._held) > _HELD:
            self._held.popitem(last=False)
        return made.value

    async def _again(self, work: Callable[[], R]) -> R:
        """Do something with files; once more if one was gone, since they have just been merged.

        Raises:
            InvalidInputError: they are gone for good.
        """
        try:
            return await self._in_thread(work)
        except FileNotFoundError:
            try:
                return await self._in_thread(work)
            except FileNotFoundError as error:
                raise InvalidInputError(f"the run's files are gone: {error}") from None

    async def personas(self, run: str) -> list[str]:
        """Names of a run's persona columns; its index is made meanwhile, as it is wanted next.

        Raises:
            InvalidInputError: the files can't be read.
        """
        folder = self.folder(run)

        def work() -> list[str] | None:
            files = answer_files(folder)
            return persona_columns(files[0]) if files else None

        found = await self._again(work)
        if found is None:
            return []
        if (run, "index") not in self._held and (run, "index") not in self._making:
            ahead = asyncio.ensure_future(self.index(run))
            ahead.add_done_callback(_made_ahead)
        return found

    def forget(self, run: str) -> None:
        """A run was deleted."""
        for key in [key for key in self._held if key[0] == run]:
            del self._held[key]

    async def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Pages
    async def page(
        self, run: str, population: str, filters: list[Filter], sort: str, start: int
    ) -> dict[str, Any]:
        """A page of a run's agents, and which populations there are.

        Raises:
            InvalidInputError: there is no such run, a condition can't be used, or files can't be
                read.
        """
        index = await self.index(run)
        if not index.table.num_rows and run not in self._manager.watcher.runs:
            raise InvalidInputError(f"there is no run named {run!r}")
        found = await self._in_thread(select, index, population, filters, sort, start)
        sizes = dict(index.sizes)
        if self._manager.is_live(run):
            try:
                seen = await inspect(
                    self._manager.bus, self._manager.settings.subjects, run, workers=False
                )
                sizes |= {p.name: p.count for p in seen.populations}
            except (BusError, RemoteError):
                pass  # it has ended meanwhile, or is between two lives
        return {**found, "run": run, "populations": sizes}

    # One agent
    async def one(self, run: str, name: str) -> dict[str, Any]:
        """One agent: what it holds now, or held at the end, and what it answered.

        Raises:
            InvalidInputError: there is no such agent, or files can't be read.
        """
        population, number = split_name(name)
        folder, manager = self.folder(run), self._manager
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
        found["answers"], found["messages"] = await self._again(
            lambda: self._rows(folder, population, number, name)
        )
        if found["one"] is None and not found["answers"]:
            raise InvalidInputError(refused)
        if found["one"] is None or found["one"]["persona"] is None:
            found["persona"], found["text"] = await self._persona(run, number, found["answers"])
        else:
            found["persona"], found["text"] = found["one"]["persona"], found["one"]["text"]
        return found

    def _rows(
        self, folder: Path, population: str, number: int, name: str
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Answers and messages of an agent (None: the run records none), in a thread."""
        answers = [
            self._read_once((file, "answers", name), lambda f: answers_in(f, population, number))
            for file in answer_files(folder)
        ]
        files = message_files(folder)
        messages = [
            self._read_once((file, "messages", name), lambda f: messages_in(f, name))
            for file in files
        ]
        return last_rows(answers, ("round", "call")), last_rows(messages, ()) if files else None

    def _read_once(self, key: tuple[Path, str, str], read: Callable[[Path], pa.Table]) -> pa.Table:
        """An agent's rows of a file, which is read for it once while it stays as it is."""
        whole = (stamp_of(key[0]), *key[1:])
        held = self._read.get(whole)
        if held is None:
            held = self._read[whole] = read(key[0])
            while len(self._read) > _READ_HELD:
                self._read.popitem(last=False)
        return held

    async def _persona(
        self, run: str, number: int, answers: list[dict[str, Any]]
    ) -> tuple[dict[str, Any] | None, str | None]:
        """Who the agent is, from where people are stored, or else from the answers' columns."""
        shown = {k: v for k, v in (answers[-1] if answers else {}).items() if k not in KNOWN}
        columns = {k: v for k, v in shown.items() if v is not None}
        if not columns:
            return None, None
        settings = self._manager.settings
        roots = (*settings.roots, settings.personas_dir.resolve())
        try:
            spec = await self._manager.spec(run)
            if spec is not None and spec.agents.personas is not None:
                source = await self._manager.people_source(spec)
                people = await self._in_thread(
                    load_people, source, roots, spec.agents.count, number, number + 1
                )
                persona = Persona(people, 0)
                # Several populations may stand in one run; whose people these are is not told.
                if all(attributes(persona).get(k, v) == v for k, v in columns.items()):
                    return attributes(persona), persona.text
        except (PopulaceError, LookupError, OSError) as error:
            _log.info("a persona's text can't be had", run=run, agent=number, error=str(error))
        return columns, None

    async def exchanges(self, run: str, name: str) -> dict[str, Any]:
        """What models were asked by one agent, and what they said: the latest, oldest first.

        Raises:
            InvalidInputError: that is no agent.
            BusError: the broker does not answer.
        """
        population, number = split_name(name)
        check_token(run, "the run's name")
        manager = self._manager
        info = manager.watcher.runs.get(run)
        last = max(1, info.rounds_done + 1 if info is not None else 1)
        kept = KeptAnswers(manager.bus, manager.settings.subjects)
        found: list[dict[str, Any]] = []
        cut = False
        async with self._asking:  # all prompts of a run are read for it: for one at a time
            until = time.monotonic() + _EXCHANGES_WITHIN
            for round_number in range(last, -1, -1):
                rows, whole = await kept.of_agent(run, round_number, population, number, until)
                cut = cut or not whole
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
                if len(found) >= _MOST_EXCHANGES or time.monotonic() > until:
                    cut = cut or round_number > 0
                    break
        found.reverse()
        return {"run": run, "agent": name, "exchanges": found[-_MOST_EXCHANGES:], "cut": cut}


def _made_ahead(task: asyncio.Task[Index]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("an index can't be made", error=str(error))
