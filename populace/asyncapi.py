"""The public subjects as an AsyncAPI document, for programs in any language.

``python -m populace.asyncapi > docs/asyncapi.yaml`` writes it; a test holds the file to this. The
payloads are those of ``shared/messages``; records and events, which are plain columns on the way,
are described here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from populace import __version__
from populace.interviews import InterviewAnswers, InterviewRequest
from shared.messages.control import ListenRequest, Rule
from shared.messages.inspection import Inspect, Inspected
from shared.messages.persona import (
    EnrichRequest,
    FitReply,
    FitRequest,
    JobInfo,
    JobRequest,
    Sampled,
    SampleRequest,
)
from shared.messages.scenario import (
    ControlReply,
    ControlRequest,
    ManageRequest,
    ScenarioSpec,
    Status,
    Submitted,
)
from shared.subjects import Subjects

_SCHEMAS = "#/components/schemas/"
_MESSAGES = "#/components/messages/"
_NUMBERS = {"type": "array", "items": {"type": "integer"}}
_OR_NULL: Any = [{"type": "null"}]

RECORDS: dict[str, Any] = {
    "type": "object",
    "description": "A batch of answers: columns, a place for each agent.",
    "required": ["run", "round", "population", "method", "call", "batch", "agents", "values"],
    "properties": {
        "run": {"type": "string"},
        "round": {"type": "integer", "minimum": 0},
        "population": {"type": "string"},
        "method": {"type": "string"},
        "call": {"type": "integer", "description": "Recorded population call of the run, from 1."},
        "batch": {"type": "string", "description": "Unique within a run; repeats tell by it."},
        "life": {"type": "integer", "minimum": 1},
        "agents": {**_NUMBERS, "description": "Numbers of the agents that answered."},
        "values": {"type": "array", "description": "What they answered; null: they failed."},
        "errors": {
            "type": "array",
            "description": "Place in the columns, kind, and message of each failure.",
            "items": {"type": "array", "minItems": 3, "maxItems": 3},
        },
        "tokens": {"anyOf": [_NUMBERS, *_OR_NULL]},
        "tokens_out": {"anyOf": [_NUMBERS, *_OR_NULL]},
        "seconds": {"anyOf": [{"type": "array", "items": {"type": "number"}}, *_OR_NULL]},
        "models": {"anyOf": [{"type": "array"}, *_OR_NULL]},
        "field": {"anyOf": [{"type": "string"}, *_OR_NULL]},
        "backends": {"type": "array", "items": {"type": "string"}},
        "backend_of": {"anyOf": [{"type": "array"}, *_OR_NULL]},
        "personas": {
            "anyOf": [{"type": "object", "additionalProperties": {"type": "array"}}, *_OR_NULL]
        },
    },
}
EVENT: dict[str, Any] = {
    "type": "object",
    "description": "What happened in an environment.",
    "required": ["run", "path", "name", "round", "number", "arguments", "value", "by", "storm"],
    "properties": {
        "run": {"type": "string"},
        "life": {"type": "integer", "minimum": 1, "description": "Which life of the run told it."},
        "path": {"type": "string", "description": "Of the environment, dots between its parts."},
        "name": {"type": "string"},
        "round": {"type": "integer", "minimum": 0},
        "number": {"type": "integer", "minimum": 1, "description": "Of this environment's events."},
        "arguments": {"type": "object"},
        "value": {"description": "What the method returned."},
        "by": {"type": "string", "description": "The agent that led to it; empty: the scenario."},
        "storm": {"type": "array", "items": {"type": "string"}},
    },
}
_BY_HAND = {"Records": RECORDS, "Event": EVENT}


@dataclass(frozen=True)
class _Channel:
    """One public subject: what goes there, from whom, and what comes back."""

    address: str
    said: str
    message: type[BaseModel] | str
    reply: type[BaseModel] | None = None
    told: bool = False
    """Whether Populace sends there, rather than to listen."""


def _channels(subjects: Subjects) -> dict[str, _Channel]:
    run, number = "{run}", "{round}"
    return {
        "submit": _Channel(
            subjects.scenario_submit,
            "Have a scenario played; answered once it is stored.",
            ScenarioSpec,
            Submitted,
        ),
        "scenarios": _Channel(
            subjects.scenario_event,
            "The same without an answer: kept until a director takes it. Name the run yourself.",
            ScenarioSpec,
        ),
        "manage": _Channel(
            subjects.run_manage,
            "Resume a run, give a finished one more rounds, or end one that is paused.",
            ManageRequest,
            ControlReply,
        ),
        "control": _Channel(
            subjects.run_control(run),
            "Cancel, pause or spread a run that is under way, or bring something into it.",
            ControlRequest,
            ControlReply,
        ),
        "status": _Channel(
            subjects.run_status(run), "How a run goes; kept by a stream.", Status, told=True
        ),
        "results": _Channel(
            subjects.run_results(run, number),
            "Answers in batches; kept by a stream. JSON if the scenario came as JSON, or says so.",
            "Records",
            told=True,
        ),
        "events": _Channel(
            subjects.env_event(run, "{event}", "{path}"),
            "What happens in environments; kept by a stream.",
            "Event",
            told=True,
        ),
        "listen": _Channel(
            subjects.run_owner(run, "listen"),
            "Have events that fulfil a condition sent to a subject of their own.",
            ListenRequest,
            Rule,
        ),
        "unlisten": _Channel(subjects.run_owner(run, "unlisten"), "End that.", Rule, Rule),
        "interview": _Channel(
            subjects.run_owner(run, "interview"),
            "Ask some agents of a run; it goes on as if nobody had.",
            InterviewRequest,
            InterviewAnswers,
        ),
        "inspect": _Channel(
            subjects.run_owner(run, "inspect"),
            "See what an agent or an environment holds, or how the whole is placed.",
            Inspect,
            Inspected,
        ),
        "sample": _Channel(
            subjects.persona("sample"), "Draw people of a population.", SampleRequest, Sampled
        ),
        "fit": _Channel(
            subjects.persona("fit"), "Compare people with what was asked.", FitRequest, FitReply
        ),
        "enrich": _Channel(
            subjects.persona("enrich"), "Have a model write people.", EnrichRequest, JobInfo
        ),
        "job": _Channel(
            subjects.persona("job"), "How far that is, or an end to it.", JobRequest, JobInfo
        ),
    }


_PARAMETERS = {
    "run": "The run's name.",
    "round": "The round, from 0 (the setup).",
    "event": "The event's name.",
    "path": "The environment's path; its parts are tokens of the subject.",
}


def _name(message: type[BaseModel] | str) -> str:
    return message if isinstance(message, str) else message.__name__


def document(prefix: str = "populace") -> dict[str, Any]:
    """The AsyncAPI 3.0 document.

    Args:
        prefix: first token of every subject.
    """
    channels = _channels(Subjects(prefix))
    models: set[type[BaseModel]] = set()
    for channel in channels.values():
        models.update(m for m in (channel.message, channel.reply) if isinstance(m, type))
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation") for model in ordered], ref_template=f"{_SCHEMAS}{{model}}"
    )
    names = [*(model.__name__ for model in ordered), *_BY_HAND]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Populace",
            "version": __version__,
            "description": "The public subjects. Payloads are JSON or msgpack, by the header "
            "content-type, else by the first byte; a reply is written as its request was. A "
            "request that can't be served is answered with {error: sentence}.",
        },
        "defaultContentType": "application/json",
        "channels": {
            **{name: _channel(channel) for name, channel in channels.items()},
            **{f"{n}Reply": _replies(c.reply) for n, c in channels.items() if c.reply is not None},
        },
        "operations": {name: _operation(name, channel) for name, channel in channels.items()},
        "components": {
            "messages": {name: {"payload": {"$ref": f"{_SCHEMAS}{name}"}} for name in names},
            "schemas": {**schemas["$defs"], **_BY_HAND},
        },
    }


def _channel(channel: _Channel) -> dict[str, Any]:
    name = _name(channel.message)
    found: dict[str, Any] = {
        "address": channel.address,
        "description": channel.said,
        "messages": {name: {"$ref": f"{_MESSAGES}{name}"}},
    }
    parameters = {
        n: {"description": t} for n, t in _PARAMETERS.items() if f"{{{n}}}" in found["address"]
    }
    return {**found, "parameters": parameters} if parameters else found


def _replies(reply: type[BaseModel]) -> dict[str, Any]:
    name = reply.__name__
    return {
        "address": None,
        "description": "The reply subject of the request.",
        "messages": {name: {"$ref": f"{_MESSAGES}{name}"}},
    }


def _operation(name: str, channel: _Channel) -> dict[str, Any]:
    def exchange(place: str, message: type[BaseModel] | str) -> dict[str, Any]:
        return {
            "channel": {"$ref": f"#/channels/{place}"},
            "messages": [{"$ref": f"#/channels/{place}/messages/{_name(message)}"}],
        }

    action = "send" if channel.told else "receive"
    found = {"action": action, "summary": channel.said, **exchange(name, channel.message)}
    if channel.reply is not None:
        found["reply"] = exchange(f"{name}Reply", channel.reply)
    return found


class _Dumper(yaml.SafeDumper):
    """Writes things out where they stand, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def text() -> str:
    """The document as YAML."""
    return yaml.dump(document(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


if __name__ == "__main__":
    sys.stdout.write(text())
