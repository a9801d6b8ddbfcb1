"""What can go wrong for a scenario author; the trunk of the tree is in ``shared.errors``."""

from __future__ import annotations

from typing import Any

from shared.errors import (
    BusError,
    CodecError,
    CodeError,
    InvalidInputError,
    PopulaceError,
)

__all__ = [
    "AgentError",
    "BusError",
    "CallCycleError",
    "CallTimeoutError",
    "CodeError",
    "CodecError",
    "Failure",
    "InvalidInputError",
    "ModelFailure",
    "PlaceholderLostError",
    "PlacementError",
    "PopulaceError",
    "RunBrokenError",
    "ScenarioError",
    "StateError",
    "WireError",
    "WorkerLostError",
    "error_from_wire",
    "error_to_wire",
]

_PASSED_ON = "from "

WireError = list[Any]
"""An error on the wire: kind, message, traceback (may be empty)."""


class ScenarioError(InvalidInputError):
    """A scenario file, its class or its parameters can't be used."""


class PlacementError(PopulaceError):
    """No host offers the workers that were asked for."""


class StateError(PopulaceError):
    """What an agent, environment or scenario holds can't be written down."""


class RunBrokenError(PopulaceError):
    """Processes of a run are gone; it is to be taken up again from the last round's end."""


class Failure(PopulaceError):  # noqa: N818 - the field's word for a typed non-answer
    """An agent's way to say that it has no answer, and of what kind that is.

    It becomes a failure row (counted by kind), not a crash, and carries no traceback.

    Args:
        kind: a short name to count by, such as ``"out_of_range"``.
        message: one sentence.
    """

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind = kind


class BudgetSpentError(PopulaceError):
    """A run has spent what it may spend on models."""


class ModelFailure(Failure):
    """A model gave no usable answer.

    Kinds: ``model_unreachable``, ``model_timeout``, ``model_rate_limit`` (the endpoint went on
    asking for less), ``model_refused`` (it said no, or nothing that makes sense),
    ``model_schema`` (the answer does not fit what was asked for, not even at the second time;
    ``text`` holds it), ``model_context`` (the prompt is longer than the model can take),
    ``model_budget`` (the run's budget is spent), ``model_not_kept`` (a replay came to a prompt to
    which no answer was kept), ``model_internal``.
    """

    def __init__(self, kind: str, message: str = "", *, text: str = "") -> None:
        super().__init__(kind, message)
        self.text = text


class AgentError(PopulaceError):
    """A call to an agent failed.

    Attributes:
        agent: the agent's name.
        method: what was called.
        kind: the remote exception's class name, or a ``Failure``'s kind.
        message: the remote exception's text.
        remote_traceback: where it was raised, as text; empty for a ``Failure``.
    """

    def __init__(
        self, agent: str, method: str, kind: str, message: str, remote_traceback: str = ""
    ) -> None:
        text = f"{agent}.{method} failed: {kind}: {message}"
        if remote_traceback:
            text += f"\n--- raised in the agent's worker:\n{remote_traceback.rstrip()}"
        super().__init__(text)
        self.agent = agent
        self.method = method
        self.kind = kind
        self.message = message
        self.remote_traceback = remote_traceback


class CallTimeoutError(AgentError):
    """No answer came in time; the call was cancelled where it ran."""


class WorkerLostError(AgentError):
    """The worker process that held the agent is gone."""


class PlaceholderLostError(AgentError):
    """A value that a worker kept for others is gone; the message says why."""


class CallCycleError(AgentError):
    """Calls went round without an end; the message names them."""


_KINDS: dict[str, type[AgentError]] = {
    "timeout": CallTimeoutError,
    "worker_lost": WorkerLostError,
    "placeholder_lost": PlaceholderLostError,
    "call_cycle": CallCycleError,
}


def error_from_wire(agent: str, method: str, error: WireError) -> AgentError:
    """The exception that a caller gets for an error that travelled."""
    kind, message, trace = error
    return _KINDS.get(kind, AgentError)(agent, method, kind, message, trace)


def error_to_wire(error: BaseException, trace: str) -> WireError:
    """An exception as it travels; a traceback only for what nobody raised on purpose."""
    if isinstance(error, Failure):
        return [str(error.kind), _text(error), ""]
    if isinstance(error, AgentError):
        # Passed on by an agent that had called another: keep what the first one said.
        text = error.message
        if not text.startswith(_PASSED_ON) and not isinstance(error, CallCycleError):
            text = f"{_PASSED_ON}{error.agent}.{error.method}: {text}"
        return [error.kind, text, error.remote_traceback]
    return [type(error).__name__, _text(error), trace]


def _text(error: BaseException) -> str:
    """The exception's text, whatever its own ``__str__`` may do."""
    try:
        return str(error)
    except Exception:
        return "(its text can't be had)"
