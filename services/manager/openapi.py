"""The description of the JSON interface, as OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from populace.interviews import InterviewAnswers, InterviewRequest
from shared.messages.control import HostChange, HostInfo, Released, StopWorker
from shared.messages.persona import EnrichRequest, JobInfo, SampleRequest
from shared.messages.scenario import PlannedEvent, ScenarioSpec

_MODELS: tuple[type[BaseModel], ...] = (
    ScenarioSpec,
    PlannedEvent,
    InterviewRequest,
    InterviewAnswers,
    HostChange,
    HostInfo,
    StopWorker,
    Released,
    EnrichRequest,
    SampleRequest,
    JobInfo,
)


def openapi() -> dict[str, Any]:
    """The description."""
    schemas: dict[str, Any] = {}
    for model in _MODELS:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    return {
        "openapi": "3.1.0",
        "info": {"title": "Populace manager", "version": "1"},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
        "paths": _paths(),
    }


def _got(what: str, *query: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": what,
        "responses": {
            "200": {"description": what},
            "401": {"description": "the token is missing or wrong"},
            "422": {"description": "there is no such thing; says why"},
            "503": {"description": "the broker or a service does not answer"},
        },
    }
    if query:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": {"type": "string"}} for name in query
        ]
    return {"get": operation}


def _done(
    what: str,
    body: type[BaseModel] | dict[str, Any] | None = None,
    method: str = "post",
    status: str = "200",
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": what,
        "responses": {
            status: {"description": what},
            "403": {"description": "this token may only look"},
            "422": {"description": "not possible; says why"},
            "503": {"description": "the broker or a service does not answer"},
        },
    }
    if body is not None:
        schema = body
        if not isinstance(body, dict):
            schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return {method: operation}


def _object(**properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
    }


def _paths() -> dict[str, Any]:
    found = {
        "/api/overview": _got("hosts, workers, agents, runs, queues, broker, at a glance"),
        "/api/hosts": _got("machines that run agents or environments"),
        "/api/hosts/{host}/{kind}": _got("one, its workers, and what it logged last", "lines"),
        "/api/hosts/{host}/{kind}/change": _done("drain a host, or take it up again", HostChange),
        "/api/hosts/{host}/{kind}/stop": _done(
            "end a worker; its run goes on with others", StopWorker
        ),
        "/api/runs": {
            **_got("runs, latest first", "search"),
            **_done("start a run", ScenarioSpec, status="201"),
        },
        "/api/runs/{run}": {
            **_got("a run's state, rounds, manifest"),
            **_done("delete a run: its files, and what the broker keeps of it", method="delete"),
        },
        "/api/runs/{run}/usage": _got("what it asked of models, and what it cost"),
        "/api/runs/{run}/cancel": _done("end a run"),
        "/api/runs/{run}/pause": _done("stop a run where it is"),
        "/api/runs/{run}/spread": _done("take workers anew, on the hosts that there are now"),
        "/api/runs/{run}/resume": _done("go on with a run", _object(rounds="integer")),
        "/api/runs/{run}/events": _done("bring an event into a run", PlannedEvent),
        "/api/runs/{run}/interview": _done("ask agents something", InterviewRequest),
        "/api/runs/{run}/clean-up": _done(
            "end what is left of a run on hosts", _object(host="string")
        ),
        "/api/runs/{run}/agents": _got(
            "agents, 50 at a time; column, op and value say which",
            "population",
            "column",
            "op",
            "value",
            "sort",
            "start",
        ),
        "/api/runs/{run}/agents/{population}/{number}": _got(
            "one agent: persona, memory, attributes, answers, messages"
        ),
        "/api/runs/{run}/agents/{population}/{number}/exchanges": _got(
            "what it asked models, and what they said"
        ),
        "/api/runs/{run}/environments": _got("the environments, listeners and workers of a run"),
        "/api/runs/{run}/environments/{path}": _got("one environment: state, view, events"),
        "/api/runs/{run}/files": _got("the files of a run"),
        "/api/runs/{run}/files/{name}": _got("one of them"),
        "/api/runs/{run}/compare/{other}": _got("how the answers of two runs differ"),
        "/api/pools": _got("model pools: slots, queue, latency, limits, failures"),
        "/api/people": _got("stored populations, templates, and those being written"),
        "/api/people/{name}": _got("margins of a population, and some of its people", "seed"),
        "/api/people/write": _done("have a population written", EnrichRequest, status="202"),
        "/api/people/draw": _done(
            "draw a population and store it; with ?replace, in place of one of that name",
            SampleRequest,
            status="201",
        ),
        "/api/people/{name}/cancel": _done("stop the writing of a population"),
        "/api/scenarios": _got("scenario files that runs can be started from"),
        "/api/scenarios/{file}": _got("what one says, with a schema of its parameters"),
        "/metrics": _got("the same in figures, for Prometheus"),
    }
    for path, item in found.items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        if names:
            item["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
    return found
