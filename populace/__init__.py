"""Populace: very large populations of LLM-driven agents on a message broker.

What a scenario author imports. Nothing in here needs words of the broker.
"""

from populace._runtime.driver import sleep
from populace.agent import Agent
from populace.answers import AnswerBatch, Answers, Results, Summary, each
from populace.environment import Environment, EnvironmentProxy, event, readonly
from populace.errors import (
    AgentError,
    CallCycleError,
    CallTimeoutError,
    Failure,
    InvalidInputError,
    ModelFailure,
    PlaceholderLostError,
    PlacementError,
    PopulaceError,
    ScenarioError,
    WorkerLostError,
)
from populace.events import Event
from populace.memory import Memory
from populace.placeholder import Placeholder, resolve
from populace.population import Population
from populace.proxy import AgentProxy
from populace.recorded import RecordedRun, results
from populace.scenario import Scenario
from populace.world import World, connect, local
from shared import __version__
from shared.messages.scenario import ModelSpec, ScriptSpec

__all__ = [
    "Agent",
    "AgentError",
    "AgentProxy",
    "AnswerBatch",
    "Answers",
    "CallCycleError",
    "CallTimeoutError",
    "Environment",
    "EnvironmentProxy",
    "Event",
    "Failure",
    "InvalidInputError",
    "Memory",
    "ModelFailure",
    "ModelSpec",
    "Placeholder",
    "PlaceholderLostError",
    "PlacementError",
    "PopulaceError",
    "Population",
    "RecordedRun",
    "Results",
    "Scenario",
    "ScenarioError",
    "ScriptSpec",
    "Summary",
    "WorkerLostError",
    "World",
    "__version__",
    "connect",
    "each",
    "event",
    "local",
    "readonly",
    "resolve",
    "results",
    "sleep",
]
