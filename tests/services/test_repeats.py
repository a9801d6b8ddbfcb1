"""What the broker gives out again: who has it in hand, and what was answered of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from populace.models.kept import KeptAnswers
from services.models.late import LateAnswers
from services.models.peers import Peers
from shared.bus import MemoryBroker, MemoryBus
from shared.errors import BusError
from shared.messages.model import ModelRequest, ModelResponse
from shared.settings import Settings
from shared.streams import ensure_stream, kept_stream
from tests.conftest import unique

SUBJECTS = Settings().subjects


def request(agent: int, text: str = "hi", number: int = 1) -> ModelRequest:
    return ModelRequest(number, (1, "p", agent, 1, 0), [{"role": "user", "content": text}])


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


async def kept_answers(broker: MemoryBroker) -> KeptAnswers:
    bus = MemoryBus(broker, process=unique("p"))
    await ensure_stream(bus, kept_stream(SUBJECTS))
    return KeptAnswers(bus, SUBJECTS)


async def test_an_answer_is_for_its_prompt_alone(broker: MemoryBroker) -> None:
    """Another that has the same key, as whoever uses a name again, is asked."""
    kept = await kept_answers(broker)
    await kept.keep("r", [(request(1), ModelResponse(1, text="hello"))])
    await kept.keep("r", [(request(2), ModelResponse(2, error_kind="timeout", error="no"))])
    late = LateAnswers(kept)
    late.read()
    await late.ready()
    assert late.watchful
    assert late.doubts(time.time() - 1)
    assert not late.doubts(time.time() + 5)
    same, other = request(1, number=77), request(1, "something else")
    found = late.get("r", same)
    assert found is not None
    assert found.text == "hello"
    assert late.get("r", other) is None
    assert late.get("r", request(2)) is None  # it may be answered now
    assert late.get("another", same) is None
    assert await late.find("r", [same, request(2)]) == {same.key: found}
    assert await late.find("r", [other]) == {}
    late.put("r", other, ModelResponse(1, text="else"))
    assert late.get("r", same) is None
    late.forget("r")
    assert late.get("r", other) is None
    assert late._characters == 0
    late.close()


async def test_kept_answers_are_read_once_for_many(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = await kept_answers(broker)
    await kept.keep("r", [(request(i), ModelResponse(i, text=str(i))) for i in range(20)])
    late = LateAnswers(kept)
    original, readings = kept.find, []

    async def find(run: str, wanted: Any, newest: int = 0) -> Any:
        readings.append(len(list(wanted)))
        await asyncio.sleep(0.05)
        return await original(run, wanted, newest)

    monkeypatch.setattr(kept, "find", find)
    found = await asyncio.gather(*(late.find("r", [request(i)]) for i in range(20)))
    assert [next(iter(f.values())).text for f in found] == [str(i) for i in range(20)]
    assert readings == [20]

    async def broken(run: str, wanted: Any, newest: int = 0) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(kept, "find", broken)
    with pytest.raises(BusError, match="out of order"):
        await asyncio.wait_for(late.find("r", [request(1)]), 5)
    waiting = asyncio.ensure_future(late.find("r", [request(1)]))
    monkeypatch.setattr(kept, "find", find)
    await asyncio.sleep(0)
    late.close()
    with pytest.raises(BusError):
        await asyncio.wait_for(waiting, 5)


async def test_who_has_it_in_hand_says_so(broker: MemoryBroker) -> None:
    held: set[tuple[str, int]] = {("pool", 7)}
    one = Peers(MemoryBus(broker, process=unique("p")), SUBJECTS, lambda pool, number: False)
    two = Peers(
        MemoryBus(broker, process=unique("p")),
        SUBJECTS,
        lambda pool, number: (pool, number) in held,
    )
    await one.start()
    assert not await one.hold("pool", 7)  # nobody else is there
    await two.start()
    assert await one.hold("pool", 7)
    assert not await one.hold("pool", 8)
    assert not await two.hold("pool", 7)  # one's own does not count
    held.clear()
    assert not await one.hold("pool", 7)


async def test_who_finds_the_broker_again_later_is_waited_for(broker: MemoryBroker) -> None:
    one = Peers(MemoryBus(broker, process=unique("p")), SUBJECTS, lambda pool, number: False)
    bus = MemoryBus(broker, process=unique("p"))
    two = Peers(bus, SUBJECTS, lambda pool, number: True)
    await one.start()
    one._known.add(bus.process)
    one.reconnected()
    asking = asyncio.ensure_future(one.hold("pool", 7))
    asyncio.get_running_loop().call_later(1.3, lambda: asyncio.ensure_future(two.start()))
    assert await asyncio.wait_for(asking, 10)
    gone = Peers(MemoryBus(broker, process=unique("p")), SUBJECTS, lambda pool, number: False)
    gone._known.add("nobody")
    await gone.start()
    two._holds = lambda pool, number: False
    assert not await asyncio.wait_for(gone.hold("pool", 7), 5)
    assert "nobody" not in gone._known
