"""A recorded run as a report needs it: columns of numbers and words, by round and by group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from populace.recorded import RecordedRun
from populace.report.spec import ReportSpec, Variable
from populace.report.statistics import Numbers
from shared.errors import InvalidInputError

_OWN = frozenset(
    ("run", "round", "population", "agent", "method", "call", "value", "answer", "error")
) | frozenset(("message", "tokens", "tokens_out", "seconds", "model", "backend"))
"""Columns that every run has; others are of personas."""
_MOST_GROUPS = 12


class RunData:
    """One run's answers, and what its scenario says of them.

    Args:
        run: as it was recorded.

    Raises:
        InvalidInputError: it is not over, or can't be read.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.run = run.run
        self.manifest = run.manifest
        self.rounds = [_with_all_tokens(row) for row in run.rounds]
        self.table = run.to_arrow()
        self.spec = ReportSpec.model_validate(self.manifest.get("report") or {})
        if not self.spec.variables:
            self.spec.variables = self._usual()
        self._columns: dict[str, pa.Array] = {}
        self._parsed: list[Any] | None = None

    def _usual(self) -> list[Variable]:
        if self.table.num_rows and self.table["value"].null_count < self.table.num_rows:
            return [Variable(name="value", label="answer")]
        return []

    @property
    def scripted(self) -> bool:
        """Whether a script stood in for a model."""
        asked = any((row.get("usage") or {}).get("requests") for row in self.rounds)
        backends = self.manifest.get("backends") or []
        asked = asked or any(name.startswith("scripted") for name in backends)
        return asked and bool(self.manifest.get("scripted"))

    @property
    def by(self) -> list[str]:
        """Columns by which answers can be divided."""
        names = self.spec.by or persona_columns(self.table)
        found = [n for n in names if n in self.table.column_names and self._few(n)]
        return [*found, "model"] if self._few("model") else found

    def _few(self, name: str) -> bool:
        kind = self.table.schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            return False
        values = pc.unique(pc.drop_null(self.table[name]))
        return 1 < len(values) <= _MOST_GROUPS

    def _answers(self) -> list[Any]:
        """All answers as they were given, where they are more than a number."""
        if self._parsed is None:
            self._parsed = [_parsed(text) for text in self.table["answer"].to_pylist()]
        return self._parsed

    def column(self, variable: Variable) -> pa.Array:
        """A variable's values, one for each row of the table; null where there is none."""
        held = self._columns.get(variable.name)
        if held is None:
            held = self._columns[variable.name] = self._read(variable)
        return held

    def _read(self, variable: Variable) -> pa.Array:
        cells: list[Any]
        if variable.field is None and variable.kind == "number":
            found = self.table["value"].combine_chunks()
        else:
            if variable.field is None:
                cells = [a if isinstance(a, str) else None for a in self._answers()]
            else:
                cells = [
                    a.get(variable.field) if isinstance(a, dict) else None for a in self._answers()
                ]
            if variable.kind == "number":
                numbers = [
                    float(c) if isinstance(c, (int, float)) and not isinstance(c, bool) else None
                    for c in cells
                ]
                found = pa.array(numbers, pa.float64())
            else:
                words = [_word(c) for c in cells]
                found = pa.array(words, pa.string())
        if variable.method is not None:
            here = pc.equal(self.table["method"], variable.method).combine_chunks()
            found = pc.if_else(here, found, pa.scalar(None, found.type))
        return found

    def numbers(self, variable: Variable, round_number: int | None = None) -> Numbers:
        """A variable's numbers, of one round or all."""
        return _numbers(self._some(variable, round_number, None, None))

    def words(self, variable: Variable, round_number: int | None = None) -> list[str]:
        """A variable's words, of one round or all."""
        found: list[str] = pc.drop_null(self._some(variable, round_number, None, None)).to_pylist()
        return found

    def groups(
        self, variable: Variable, column: str, round_number: int | None = None
    ) -> dict[str, Numbers]:
        """A variable's numbers by the values of a column, in the order of their names."""
        values = sorted(pc.unique(pc.drop_null(self.table[column])).to_pylist(), key=str)
        return {
            str(value): _numbers(self._some(variable, round_number, column, value))
            for value in values
        }

    def _some(
        self, variable: Variable, round_number: int | None, column: str | None, value: Any
    ) -> pa.Array:
        held = self.column(variable)
        if round_number is not None:
            here = pc.equal(self.table["round"], round_number).combine_chunks()
            held = pc.filter(held, here)
            if column is not None:
                return pc.filter(
                    held, pc.filter(pc.equal(self.table[column], value).combine_chunks(), here)
                )
            return held
        if column is not None:
            return pc.filter(held, pc.equal(self.table[column], value).combine_chunks())
        return held

    @property
    def played(self) -> list[int]:
        """Numbers of the rounds of which there are answers."""
        return sorted(pc.unique(self.table["round"]).to_pylist())

    def recorded(self, name: str) -> dict[int, float]:
        """A figure that the scenario recorded, by round."""
        return {
            row["round"]: float(row["values"][name])
            for row in self.rounds
            if _is_number(row.get("values", {}).get(name))
        }

    def series(self, name: str) -> dict[str, dict[int, float]]:
        """A recorded dict (or list) of numbers, as a line over the rounds for each entry."""
        found: dict[str, dict[int, float]] = {}
        for row in self.rounds:
            held = row.get("values", {}).get(name)
            entries = held.items() if isinstance(held, dict) else enumerate(held or [], 1)
            if isinstance(held, (dict, list)):
                for key, value in entries:
                    if _is_number(value):
                        found.setdefault(str(key), {})[row["round"]] = float(value)
        return found

    def lines(self) -> dict[str, dict[int, float]]:
        """Recorded figures to draw over the rounds."""
        names = self.spec.lines or list(
            dict.fromkeys(name for row in self.rounds for name in row.get("values", {}))
        )
        found = {name: self.recorded(name) for name in names}
        return {name: points for name, points in found.items() if points}

    def texts(self) -> Iterator[tuple[int, str, int, str]]:
        """(round, population, agent, text) of all answers that hold a text of some length."""
        rounds, populations, agents = (
            self.table[n].to_pylist() for n in ("round", "population", "agent")
        )
        messages = self.table["message"].to_pylist()
        for place, answer in enumerate(self._answers()):
            text = answer.get("text") if isinstance(answer, dict) else answer
            if not isinstance(text, str) or not text:
                text = messages[place]  # what could not be read is told as the failure's message
            if isinstance(text, str) and text:
                yield rounds[place], populations[place], agents[place], text


def _with_all_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """A round with the tokens of what was not recorded, such as calls of agents to one another."""
    usage = row.get("usage") or {}
    asked = usage.get("tokens_in", 0) + usage.get("tokens_out", 0)
    return {**row, "tokens": max(row.get("tokens") or 0, asked)}


def model_name(model: dict[str, Any]) -> str:
    """How a model of a manifest is called: as it was asked for, or as it reports itself."""
    if model.get("mixture"):
        return "a mixture"
    reported = (model.get("reported") or {}).get("model")
    return str(model.get("model") or reported or model.get("backend") or "the embedded model")


def persona_columns(table: pa.Table) -> list[str]:
    """Columns that hold what agents' personas say."""
    return [name for name in table.column_names if name not in _OWN]


def _numbers(array: pa.Array) -> Numbers:
    held = np.asarray(pc.drop_null(array).to_numpy(zero_copy_only=False), dtype=np.float64)
    return held[np.isfinite(held)]


def _parsed(text: str | None) -> Any:
    if text is None or text[:1] not in '{["':
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _word(cell: Any) -> str | None:
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, (list, tuple)):
        return ", ".join(map(str, cell))
    return str(cell)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def load(run: RecordedRun) -> RunData:
    """Read a run for a report.

    Raises:
        InvalidInputError: it is not over, or can't be read.
    """
    try:
        return RunData(run)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{run.folder} can't be reported on: {error}") from error
