"""How a worker asks models: what an earlier life of its run was answered."""

from __future__ import annotations

import asyncio

from populace.models.client import QueuedModels
from populace.models.kept import KeptAnswers
from populace.models.replayed import ReplayedModels
from shared.bus import MemoryBroker, MemoryBus
from shared.messages.model import ModelRequest, ModelResponse
from shared.messages.scenario import ModelSpec, ReplaySpec
from shared.settings import Settings
from shared.streams import ensure_streams
from tests.conftest import unique

SUBJECTS = Settings().subjects


def prompt(models: QueuedModels, agent: int, content: object = "hi") -> ModelRequest:
    return ModelRequest(
        models.next_number(), (1, "p", agent, 1, 0), [{"role": "user", "content": content}]
    )


async def test_another_life_has_answers_to_the_very_prompts_alone() -> None:
    """What an agent asks may follow from who was first: then it may ask something else now."""
    bus = MemoryBus(MemoryBroker(), process=unique("p"))
    await ensure_streams(bus, SUBJECTS)
    spec = ModelSpec(backend="openai", base_url="http://127.0.0.1:9", model="m")
    models = QueuedModels(bus, SUBJECTS, {"default": spec}, "r", timeout=0.5, recall=[1])
    kept = KeptAnswers(bus, SUBJECTS)
    for content, text in (("hi", "one"), ("hi", "two"), ("ho", "three")):
        await kept.keep("r", [(prompt(models, 1, content), ModelResponse(1, text=text))])
    await kept.keep("r", [(prompt(models, 2), ModelResponse(2, error_kind="timeout"))])
    await models.start()
    found = await models.request("default", prompt(models, 1))
    assert (found.text, found.details) == ("one", {"kept": True})
    assert (await models.request("default", prompt(models, 1, "ho"))).text == "three"
    for asked in (prompt(models, 1, "something else"), prompt(models, 2), prompt(models, 3)):
        assert (await models.request("default", asked)).error_kind == "timeout"
    unfit = await models.request("default", prompt(models, 1, object()))
    assert unfit.error_kind == "internal"
    await models.close()


async def test_who_gives_up_takes_nothing_from_others() -> None:
    """A run that is played again: all agents of a round wait for one reading."""
    bus = MemoryBus(MemoryBroker(), process=unique("p"))
    await ensure_streams(bus, SUBJECTS)
    spec = ModelSpec(backend="openai", base_url="http://127.0.0.1:9", model="m")
    queued = QueuedModels(bus, SUBJECTS, {"default": spec}, "new", timeout=0.5)
    kept = KeptAnswers(bus, SUBJECTS)
    for agent in range(3):
        await kept.keep("old", [(prompt(queued, agent, "hi"), ModelResponse(1, text="ho"))])
    # Played again by a later life, which asked something else: each is answered with its own.
    await kept.keep("old", [(prompt(queued, 2, "other"), ModelResponse(1, text="hu"))])
    models = ReplayedModels(queued, kept, ReplaySpec(run="old", strict=True))
    waiting = [
        asyncio.ensure_future(models.request("default", prompt(queued, i))) for i in range(3)
    ]
    await asyncio.sleep(0)
    waiting[0].cancel()
    assert [(await w).text for w in waiting[1:]] == ["ho", "ho"]
    assert (await models.request("default", prompt(queued, 2, "other"))).text == "hu"
    assert (await models.request("default", prompt(queued, 0))).text == "ho"
    await queued.close()
