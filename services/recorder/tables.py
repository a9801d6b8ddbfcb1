"""A run's folder: records in, files out, each answer once.

While a run is under way its answers lie in ``answers.parts/``, a small complete Parquet file
every few seconds, so that a crash loses nothing that was acknowledged and a reader can look
meanwhile. At the end they become one ``answers.parquet``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from populace.recorded import answers_schema, concat_answers, fit_answers
from services.recorder.events import EventTable
from services.recorder.messages import (
    MessageTable,
    column_of,
    json_text,
    keep_rounds,
    put_in_place,
    read_part,
    read_whole,
    write_table,
)
from shared.errors import CodecError
from shared.messages.scenario import RoundRow, Status

_TEXT = pa.string()
SCHEMA = pa.schema(
    [
        pa.field("run", _TEXT),
        pa.field("round", pa.int32()),
        pa.field("population", _TEXT),
        pa.field("agent", pa.int64()),
        pa.field("method", _TEXT),
        pa.field("call", pa.int32()),
        pa.field("value", pa.float64()),
        pa.field("answer", pa.string()),
        pa.field("error", _TEXT),
        pa.field("message", pa.string()),
        pa.field("tokens", pa.int64()),
        pa.field("tokens_out", pa.int64()),
        pa.field("seconds", pa.float32()),
        pa.field("model", _TEXT),
        pa.field("backend", _TEXT),
    ]
)
"""``call``: which recorded call of the run, from 1. ``value``: the answer as a number, if it is
or holds one. ``answer``: all of it, as text or JSON, if it is more than that number. ``error`` and
``message``: why there is no answer. ``tokens``: prompt and answer tokens, ``tokens_out``: those of
the answers among them. ``seconds``: from the call's start to its end, where it waited. ``model``:
which of the scenario's models was asked, ``backend``: what answered; "scripted" means that no
model did."""

_SORT_UP_TO = 5_000_000
"""Rows that are put into order (round, population, agent) at the end; beyond, as they came."""

_FOUND_OUT = frozenset(
    {
        *("run", "name", "state", "reason", "accepted", "started", "ended", "rounds"),
        *("answers", "failed", "repeated", "missing", "backends", "scenario", "messages"),
    }
)
"""What of a manifest follows from what was told of a run, and from its records."""

_MOST_AGENTS = 1 << 30
_NAME_LENGTH = 64
"""Letters that a run's name may have."""

_Row = tuple[Any, ...]


class FolderChangedError(FileNotFoundError):
    """A folder is not as it was left here: another process has written to it."""


class RunFolder:
    """Collects one run's records and writes its files.

    Args:
        path: the folder; made if needed.
        run: the run's name.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run
        self.rows_written = 0
        self.failed = 0
        self.repeated = 0
        """Records that came a second time and were left out."""
        self.late = 0
        """Records of an earlier life that came when another had begun, and were left out."""
        self._life = 1
        self._restored: list[tuple[int, int]] = []
        """Lives, and the rounds from whose end they went on."""
        self._messages = MessageTable(path, run)
        self._columns: list[list[Any]] = [[] for _ in SCHEMA]
        self._personas: dict[str, list[Any]] = {}
        """Attributes of the agents' personas, beside the columns."""
        self._seen: dict[tuple[int, str, str, int], bytearray] = {}
        self._rounds: dict[int, RoundRow] = {}
        self._statuses: dict[str, Status] = {}
        self._backends: set[str] = set()
        self._part = 0
        self._parts = path / "answers.parts"
        self._parts.mkdir(parents=True, exist_ok=True)
        self._restore()

    def _restore(self) -> None:
        """Take up what a recorder before this one had written."""
        self._read_parts()
        notes = self._parts / "statuses.jsonl"
        if notes.exists():
            for line in notes.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last one, cut short by a crash
                    self._take_status(Status.model_validate_json(line))

    def _read_parts(self) -> None:
        self.rows_written = self.failed = 0
        self._seen.clear()
        for file in sorted(self._parts.glob("*.parquet")):
            wanted = ["round", "population", "method", "call", "agent", "error", "backend"]
            table = read_part(file, wanted)
            if table is None:
                continue
            columns = (table.column(name).to_pylist() for name in wanted)
            for round_number, population, method, call, agent, error, backend in zip(
                *columns, strict=True
            ):
                self._first_time((round_number, population, method, call), agent)
                self.failed += error is not None
                self._backends.update((backend or "").split(",") if backend else ())
            self.rows_written += table.num_rows
            self._part = max(self._part, int(file.stem))

    def _restore_to(self, round_number: int) -> None:
        """Forget what earlier lives recorded of later rounds than this one.

        The run goes on from that round's end; a record that comes late of an earlier life counts
        no more.
        """
        self.flush()
        self._messages.restore(round_number)
        for file in sorted(self._parts.glob("*.parquet")):
            keep_rounds(file, round_number)
        self._read_parts()

    @property
    def waiting(self) -> int:
        """Rows that are not on disk yet."""
        return len(self._columns[0]) + self._messages.waiting

    def add_status(self, status: Status) -> None:
        """Take a status event."""
        if status.kind == "restored":
            self._restore_to(status.round or 0)
        if status.kind in ("accepted", "started", "round_finished", "restored", "ended"):
            with (self._parts / "statuses.jsonl").open("a") as notes:
                # A line before may have been cut short, when the disk was full.
                notes.write("\n" + status.model_dump_json(exclude_none=True) + "\n")
            self._take_status(status)

    def _take_status(self, status: Status) -> None:
        if status.kind == "restored":
            self._life = max(self._life, status.life or 1)
            self._restored.append((status.life or 1, status.round or 0))
            self._rounds = {n: r for n, r in self._rounds.items() if n <= (status.round or 0)}
            self._statuses.pop("ended", None)
        elif status.row is not None:
            self._rounds[status.row.round] = status.row
        else:
            self._statuses[status.kind] = status

    def fill_statuses(self, statuses: list[Status]) -> bool:
        """Take what is missing of all that was told of the run, in its order.

        Returns:
            Whether a later life had begun of which nobody knew: records are to be read again.
        """
        known = set(self._restored)
        missed = [
            s for s in statuses if s.kind == "restored" and (s.life or 1, s.round or 0) not in known
        ]
        ended = self._statuses.get("ended")
        for status in missed:
            self._restore_to(status.round or 0)
            self._take_status(status)
        if ended is not None:
            self._statuses["ended"] = ended
        rounds: dict[int, RoundRow] = {}
        for status in statuses:
            if status.kind == "restored":
                rounds = {n: r for n, r in rounds.items() if n <= (status.round or 0)}
            elif status.row is not None:
                rounds[status.row.round] = status.row
            elif status.kind in ("accepted", "started"):
                # The last counts: a director that died in between has it told once more.
                held = self._statuses.get(status.kind)
                if held is None or held.time < status.time:
                    self._statuses[status.kind] = status
        self._rounds = {**rounds, **self._rounds}
        return bool(missed)

    @property
    def missing(self) -> int:
        """Records that the run has published, as its end says, and that are not here.

        It counts whole rounds alone. Of one that was cut off in a round, some of that round's may
        be here; they make up for none of another.
        """
        ended = self._statuses.get("ended")
        if ended is None or ended.records is None:
            return 0
        last = self._last_whole(ended.records) if self.cut_off else None
        here = sum(
            agents.count(1)
            for (round_number, *_), agents in self._seen.items()
            if last is None or round_number <= last
        )
        return max(0, ended.records - here)

    def _last_whole(self, records: int) -> int:
        """The last round that so many records hold as a whole."""
        told = sum(row.answers + row.failed for row in self._rounds.values())
        # Cut off as it was told of a round, a run has counted one more.
        return max(self._rounds, default=0) + (records > told)

    @property
    def cut_off(self) -> bool:
        """Whether the run ended in the middle: the records of a round may be there in part."""
        ended = self._statuses.get("ended")
        return ended is not None and ended.state != "finished"

    def add(self, record: dict[str, Any]) -> None:
        """Take a batch of records.

        Raises:
            CodecError: it hasn't the columns of one.
        """
        try:
            self._add(record)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise CodecError(f"a batch of records has the wrong shape: {error!r}") from None

    def add_messages(self, told: dict[str, Any]) -> None:
        """Take a batch of messages between agents.

        Raises:
            CodecError: it hasn't the columns of one.
        """
        if self.is_outdated(int(told.get("life", 1)), int(told["round"])):
            self._messages.leave_out(told)
        else:
            self._messages.add(told)

    @property
    def message_batches(self) -> int:
        """How many batches of messages between agents came."""
        return self._messages.batches

    def is_outdated(self, life: int, round_number: int) -> bool:
        """Whether a round was played again by a later life than this one."""
        return any(life < later and round_number > kept for later, kept in self._restored)

    def _add(self, record: dict[str, Any]) -> None:
        if self.is_outdated(int(record["life"]), int(record["round"])):
            self.late += len(record["agents"])
            return
        round_number, population = record["round"], record["population"]
        method, field, call = str(record["method"]), record["field"], int(record["call"])
        round_number, population = int(round_number), str(population)
        agents, values = [int(a) for a in record["agents"]], list(record["values"])
        errors = {int(place): (str(kind), str(text)) for place, kind, text in record["errors"]}
        tokens = [int(t) for t in record["tokens"] or [0] * len(agents)]
        tokens_out = [int(t) for t in record.get("tokens_out") or [0] * len(agents)]
        models = list(record.get("models") or [None] * len(agents))
        seconds = [s and float(s) for s in record["seconds"] or [None] * len(agents)]
        backend = ",".join(record["backends"]) or None
        # Of a batch that several have answered each row tells its own.
        backends = list(record.get("backend_of") or [backend] * len(agents))
        self._backends.update(record["backends"])
        personas = record.get("personas") or {}
        for name, cells in personas.items():
            if len(cells) != len(agents):
                raise ValueError(f"the persona column {name!r} has another length")
            if name not in self._personas:
                self._personas[name] = [None] * len(self._columns[0])
        key = (round_number, population, method, call)
        lengths = {len(c) for c in (agents, values, tokens, tokens_out, models, seconds, backends)}
        if len(lengths) > 1:
            raise ValueError("columns of different lengths")
        for place, agent in enumerate(agents):
            if not self._first_time(key, agent):
                self.repeated += 0 if record.get("fill") else 1
                continue
            number, text = _split(values[place], field)
            kind, message = errors.get(place, (None, None))
            if kind is not None:
                self.failed += 1
                number = text = None
            row: _Row = (
                self.run,
                round_number,
                population,
                agent,
                method,
                call,
                number,
                text,
                kind,
                message,
                tokens[place],
                tokens_out[place],
                seconds[place],
                models[place],
                backends[place],
            )
            for column, cell in zip(self._columns, row, strict=True):
                column.append(cell)
            for name, cells in self._personas.items():
                cells.append(personas[name][place] if name in personas else None)

    def _first_time(self, key: tuple[int, str, str, int], agent: int) -> bool:
        if not 0 <= agent < _MOST_AGENTS:
            raise ValueError(f"there is no agent {agent}")
        seen = self._seen.setdefault(key, bytearray())
        if agent >= len(seen):
            seen.extend(bytes(agent + 1 - len(seen)))
        if seen[agent]:
            return False
        seen[agent] = 1
        return True

    def flush(self) -> None:
        """Write what waits as a part of its own."""
        self._messages.flush()
        count = len(self._columns[0])
        if not count:
            return
        table = pa.table(
            [column_of(c, f.type) for c, f in zip(self._columns, SCHEMA, strict=True)],
            schema=SCHEMA,
        )
        for name, cells in self._personas.items():
            table = table.append_column(_persona_field(name, table), _column(cells))
        self._personas = {}
        self._part += 1
        file = self._parts / f"{self._part:06d}.parquet"
        if file.exists():
            raise FolderChangedError(f"another recorder has written {str(file)!r}")
        write_table(table, file)
        self._columns = [[] for _ in SCHEMA]
        self.rows_written += count

    @property
    def life(self) -> int:
        """Which life the run is in, as far as this folder knows."""
        return self._life

    @property
    def events_file(self) -> Path:
        """Where the events are, once the run was over."""
        return self.path / "events.parquet"

    @property
    def wants_events(self) -> bool:
        """Whether the scenario asks for its environments' events."""
        accepted = self._statuses.get("accepted")
        return bool(accepted and (accepted.scenario or {}).get("record_events"))

    def finish(self, events: EventTable | None = None) -> dict[str, Any]:
        """Write all files; returns the manifest."""
        self.flush()
        self._merge()
        rounds = [self._rounds[n].model_dump() for n in sorted(self._rounds)]
        self._write_json("rounds.json", rounds)
        manifest = self._manifest(len(rounds))
        messages = self._messages.finish()
        if messages:
            manifest["messages"] = messages
        if events is not None:
            events.write(self.events_file, self._life)
            manifest["events"] = events.count
            manifest["events_missing"] = events.missing
        self._write_json("manifest.json", manifest)
        shutil.rmtree(self._parts)
        return manifest

    def _merge(self) -> None:
        target, draft = self.path / "answers.parquet", self.path / "answers.parquet.tmp"
        files = sorted(self._parts.glob("*.parquet"))
        if self.rows_written <= _SORT_UP_TO:
            tables = [read_whole(file) for file in files]
            whole = concat_answers(tables) if tables else SCHEMA.empty_table()
            whole = whole.sort_by(
                [(name, "ascending") for name in ("round", "call", "population", "agent")]
            )
            pq.write_table(whole, draft, compression="zstd", row_group_size=1 << 17)
        else:
            schema = answers_schema([pq.read_schema(file) for file in files])
            with pq.ParquetWriter(draft, schema, compression="zstd") as writer:
                for file in files:
                    writer.write_table(fit_answers(read_whole(file), schema))
        count = pq.read_metadata(draft).num_rows
        if count != self.rows_written:
            draft.unlink()
            raise FolderChangedError(
                f"another recorder has changed {str(self._parts)!r}: it holds {count:,} records, "
                f"not {self.rows_written:,}"
            )
        put_in_place(draft, target)

    def _manifest(self, rounds: int) -> dict[str, Any]:
        accepted, ended = self._statuses.get("accepted"), self._statuses.get("ended")
        started = self._statuses.get("started")
        told = (ended and ended.manifest) or (started and started.manifest) or {}
        if self._life > 1:  # one that ended before it had begun again tells of the last one's
            told = {**told, "life": max(int(told.get("life") or 1), self._life)}
        return {
            "run": self.run,
            "name": (accepted or ended or Status(kind="ended", run=self.run)).name,
            "state": ended.state if ended is not None else None,
            "reason": ended.reason or None if ended is not None else None,
            "accepted": accepted.time if accepted else None,
            "started": started.time if started else None,
            "ended": ended.time if ended else None,
            "rounds": rounds,
            "answers": self.rows_written - self.failed,
            "failed": self.failed,
            "repeated": self.repeated,
            "missing": self.missing,
            "backends": sorted(self._backends),
            "scenario": accepted.scenario if accepted else None,
            **told,
        }

    def _write_json(self, name: str, value: Any) -> None:
        draft = self.path / f"{name}.tmp"
        draft.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        put_in_place(draft, self.path / name)


def reopen(path: Path, run: str) -> None:
    """Make a run's folder one of a run that is under way: it was over, and goes on.

    Cut short, it can be done again.
    """
    manifest = json.loads((path / "manifest.json").read_text())
    rows = json.loads((path / "rounds.json").read_text())
    parts = path / "answers.parts"
    parts.mkdir(exist_ok=True)
    if (path / "answers.parquet").exists():
        for left in parts.glob("*.parquet"):  # of a recorder that was killed at the run's end
            left.unlink()
        (path / "answers.parquet").rename(parts / "000000.parquet")
    told = [
        Status(
            kind="accepted",
            run=run,
            name=manifest["name"],
            time=manifest["accepted"] or 0.0,
            scenario=manifest["scenario"],
        ),
        Status(
            kind="started",
            run=run,
            time=manifest["started"] or 0.0,
            manifest=_told_before(manifest),
        ),
        *(Status(kind="round_finished", run=run, row=RoundRow.model_validate(r)) for r in rows),
    ]
    lines = [status.model_dump_json(exclude_none=True) + "\n" for status in told]
    (parts / "statuses.jsonl").write_text("".join(lines))
    (path / "manifest.json").unlink()


def _told_before(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """What a run itself has told for its manifest: seed, models, usage.

    It stands unless the run tells it anew: one may end before it has begun again.
    """
    told = {name: value for name, value in manifest.items() if name not in _FOUND_OUT}
    # Counted here, where events are recorded; else the list of what was injected.
    if "events_missing" in manifest:
        told = {name: told[name] for name in told if name not in ("events", "events_missing")}
    return told or None


def put_aside(path: Path) -> Path:
    """Give the folder of a run whose name another has by now a name of its own.

    That is a run's name again, by which it can be listed and read.
    """
    after = int(time.time())
    while True:
        ending = f"-before-{after}"
        aside = path.with_name(path.name[: _NAME_LENGTH - len(ending)] + ending)
        if not aside.exists():
            path.rename(aside)
            return aside
        after += 1


def _column(cells: list[Any]) -> pa.Array:
    """Values as a column; as texts, where an attribute's values are of several types."""
    try:
        return column_of(cells)
    except (pa.ArrowInvalid, TypeError, OverflowError):
        texts = [
            c if c is None or isinstance(c, str) else json.dumps(c, ensure_ascii=False, default=str)
            for c in cells
        ]
        return column_of(texts, pa.string())


def _persona_field(name: str, table: pa.Table) -> str:
    """The column's name: the attribute's own, unless the table has one of that name."""
    return name if name not in table.column_names else f"persona_{name}"


def _split(value: Any, field: str | None) -> tuple[float | None, str | None]:
    """An answer as a number, and as text where it is more than that."""
    if value is None:
        return None, None
    kind = type(value)
    number = _number(value.get(field) if field and kind is dict else value)
    if number is not None and kind is not dict:
        # A whole number beyond what a float holds exactly is told as text, too.
        return number, str(value) if kind is int and int(number) != value else None
    return number, value if kind is str else json_text(value)


def _number(value: Any) -> float | None:
    if type(value) not in (int, float, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number beyond what a float holds stays as text
        return None
