"""The model service over the bus in memory, with a back end that a test decides on."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from populace.models.accounts import KEPT_FOR, Spent
from populace.models.backends.base import Admit, Backend, let_in
from populace.models.client import QueuedModels
from services.models import server as server_module
from services.models.server import ModelServer
from shared.bus import MemoryBroker, MemoryBus
from shared.codec import from_public, pack_plain
from shared.errors import BusError
from shared.messages.control import CheckModel
from shared.messages.model import ModelRequest, ModelResponse, Terms, pool_name
from shared.messages.scenario import ModelSpec, Status
from shared.settings import Settings
from shared.streams import cache_stream, ensure_stream, ensure_streams
from tests.conftest import unique, wait_until

SETTINGS = Settings()
SUBJECTS = SETTINGS.subjects
SPEC = ModelSpec(backend="openai", base_url="http://127.0.0.1:9", model="m")


class Stub(Backend):
    """Answers at once, and keeps what it was asked."""

    name = "stub"
    slots = 16

    def __init__(self, start: Callable[[], Any] = lambda: None) -> None:
        self.asked: list[str] = []
        self.closed = False
        self._start = start
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self) -> None:
        if (wait := self._start()) is not None:
            await wait

    async def check(self) -> dict[str, Any]:
        return {}

    async def answer(self, request: ModelRequest, admit: Admit = let_in) -> ModelResponse:
        text = request.messages[-1]["content"]
        self.asked.append(text)
        await self.gate.wait()
        return ModelResponse(
            request.number, text=f"re: {text}", tokens_in=100, tokens_out=50, backend="stub"
        )

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
    """Back ends by the names of their models; "m" is there."""
    made: dict[str, Backend] = {"m": Stub()}
    monkeypatch.setattr(server_module, "make_backend", lambda spec, _: made[spec.model])
    return made


@pytest.fixture
async def server(broker: MemoryBroker, backends: Any) -> AsyncIterator[ModelServer]:
    bus = MemoryBus(broker, process=unique("models"))
    await ensure_streams(bus, SUBJECTS)
    await ensure_stream(bus, cache_stream(SUBJECTS))
    context: Any = types.SimpleNamespace(bus=bus, settings=SETTINGS, stopping=asyncio.Event())
    made = ModelServer(context)
    made.usage = await bus.bucket(SUBJECTS.bucket_usage, ttl=KEPT_FOR)
    await bus.subscribe(SUBJECTS.model_gone, made._hear_gone)
    watching = asyncio.ensure_future(made._watch_pools())
    yield made
    context.stopping.set()
    await asyncio.wait_for(watching, 10)
    await made._finish(dict(made._pools), 1)
    made.late.close()


async def client(broker: MemoryBroker, run: str = "r", **more: Any) -> QueuedModels:
    bus = MemoryBus(broker, process=unique("w"))
    models = QueuedModels(bus, SUBJECTS, {"default": SPEC}, run, **{"timeout": 10, **more})
    await models.start()
    return models


def prompt(models: QueuedModels, text: str, agent: int = 1) -> ModelRequest:
    return ModelRequest(
        models.next_number(), (1, "p", agent, 1, 0), [{"role": "user", "content": text}]
    )


async def register(server: ModelServer, spec: ModelSpec) -> None:
    bucket = await server.bus.bucket(SUBJECTS.bucket_pools)
    await bucket.put(pool_name(spec), spec.model_dump_json().encode())


async def test_a_run_that_goes_on_is_served_by_who_did_not_hear_of_it(
    broker: MemoryBroker, server: ModelServer
) -> None:
    """Its connection was away when that was told."""
    await server.pool(SPEC)
    told = Status(kind="ended", run="r", life=1, state="cancelled").model_dump_json().encode()
    server._status(types.SimpleNamespace(data=told))  # type: ignore[arg-type]
    first, second = await client(broker, timeout=0.5), await client(broker, life=2)
    assert (await first.request("default", prompt(first, "old"))).error_kind == "timeout"
    assert (await second.request("default", prompt(second, "new"))).text == "re: new"
    assert not server.is_over("r", 2)
    assert server.is_over("r", 1)
    for models in (first, second):
        await models.close()


async def test_whatever_a_back_end_raises_others_are_served(
    broker: MemoryBroker, server: ModelServer, backends: dict[str, Backend]
) -> None:
    def raises() -> None:
        raise RuntimeError("of whatever kind an engine likes")

    began = asyncio.Event()

    async def for_ever() -> None:
        began.set()
        await asyncio.Event().wait()

    backends |= {"bad": Stub(raises), "slow": Stub(for_ever)}
    for name in ("bad", "slow"):
        await register(server, SPEC.model_copy(update={"model": name}))
    await asyncio.wait_for(began.wait(), 10)
    await register(server, SPEC)
    await wait_until(lambda: pool_name(SPEC) in server._pools, 10, "the pool")
    checked = await asyncio.wait_for(server.check(CheckModel(spec=SPEC)), 5)
    assert checked.ok
    for task in list(server._starting.values()):
        task.cancel()
    # Nor does a message that can't be read stop it.
    subject = SUBJECTS.model_queue(pool_name(SPEC), "r")
    await server.bus.append(subject, pack_plain(["inbox", "r", [], Terms().plain(), "soon", 1]))
    models = await client(broker)
    assert (await models.request("default", prompt(models, "hi"))).text == "re: hi"
    await models.close()


async def test_a_pool_that_nobody_knows_any_more_is_registered_again(
    broker: MemoryBroker, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was closed, as nobody used it; and the first try to register it fails."""
    monkeypatch.setattr("populace.models.client._STALLED", 0.4)
    models = await client(broker)
    models._registered[pool_name(SPEC)] = float("-inf")
    bucket = await models._bus.bucket(SUBJECTS.bucket_pools)
    put, tried = bucket.put, []

    async def fails_first(key: str, value: bytes) -> int:
        tried.append(key)
        if len(tried) == 1:
            raise BusError("no answer")
        return await put(key, value)

    monkeypatch.setattr(bucket, "put", fails_first)
    assert (await models.request("default", prompt(models, "hi"))).text == "re: hi"
    assert len(tried) >= 2
    await models.close()


async def test_a_pool_that_is_closed_is_closed(
    broker: MemoryBroker, server: ModelServer, backends: dict[str, Backend]
) -> None:
    """Its registration goes first; where that fails, or another has made it anew, it stays."""
    await register(server, SPEC)
    await wait_until(lambda: pool_name(SPEC) in server._pools, 10, "the pool")
    first = backends["m"]
    bucket = await server.bus.bucket(SUBJECTS.bucket_pools)
    entry = await bucket.get(pool_name(SPEC))
    assert entry is not None
    pool = server._pools[pool_name(SPEC)]
    now = await bucket.put(pool_name(SPEC), entry.value)
    pool.used_at -= 10_000
    await server._close_idle(bucket, {pool_name(SPEC): entry.revision})
    assert server._pools == {pool_name(SPEC): pool}
    pool.used_at -= 10_000
    await server._close_idle(bucket, {pool_name(SPEC): now})
    assert (server._pools, await bucket.get(pool_name(SPEC))) == ({}, None)
    await wait_until(lambda: not server._closing, 10, "the pool's end")
    assert isinstance(first, Stub)
    assert first.closed
    backends["m"] = second = Stub()
    await register(server, SPEC)
    models = await client(broker)
    texts = [str(i) for i in range(40)]
    found = await asyncio.gather(*(models.request("default", prompt(models, t)) for t in texts))
    assert [r.text for r in found] == [f"re: {t}" for t in texts]
    assert (first.asked, sorted(second.asked, key=int)) == ([], texts)
    await models.close()


async def test_what_was_paid_last_is_told_at_a_runs_end(
    broker: MemoryBroker, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = await server._budget("r", {"tokens": 10_000})
    store, gate = keeper._store, asyncio.Event()
    write = store.write

    async def slowly(parts: dict[str, Any], revision: int) -> bool:
        await gate.wait()
        return await write(parts, revision)

    for _ in range(2):
        await keeper.admit(Spent(100, 0, 1))
    monkeypatch.setattr(store, "write", slowly)
    keeper.pay(Spent(100, 0, 1), Spent(150, 0, 1))
    await asyncio.sleep(0)  # that is being told
    keeper.pay(Spent(100, 0, 1), Spent(150, 0, 1))
    told = Status(kind="ended", run="r", life=1, state="cancelled").model_dump_json().encode()
    server._status(types.SimpleNamespace(data=told))  # type: ignore[arg-type]
    gate.set()
    await wait_until(lambda: not server._budgets, 10, "the keeper's end")
    parts, _ = await store.read()
    assert [part[0][0] for part in parts.values()] == [300]


async def test_accounts_that_could_not_be_written_are_written_later(
    broker: MemoryBroker, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await server.pool(SPEC)
    put = server.usage.put

    async def fails(key: str, value: bytes) -> int:
        raise BusError("no answer")

    monkeypatch.setattr(server.usage, "put", fails)
    models = await client(broker)
    assert (await models.request("default", prompt(models, "hi"))).text == "re: hi"
    monkeypatch.setattr(server.usage, "put", put)
    await wait_until(lambda: not pool._giving, 10, "the answers' leaving")
    assert await server.usage.entries() == []
    await pool.count_rest()
    (entry,) = await server.usage.entries()
    ((_, _, counted),) = from_public(entry.value)
    assert (counted["tokens_in"], counted["tokens_out"]) == (100, 50)
    await models.close()


async def test_one_prompt_that_cannot_travel_fails_alone(
    broker: MemoryBroker, server: ModelServer
) -> None:
    await server.pool(SPEC)
    models = await client(broker)
    asked = [prompt(models, "half \ud83d" if i == 3 else "fine", agent=i) for i in range(8)]
    found = await asyncio.gather(*(models.request("default", one) for one in asked))
    assert [r.error_kind for r in found] == ["", "", "", "internal", "", "", "", ""]
    await models.close()
    late = await asyncio.wait_for(models.request("default", asked[0]), 5)
    assert late.error_kind == "internal"  # whoever asks when all is closed


async def test_kept_answers_that_cannot_be_read_for_a_while(
    broker: MemoryBroker, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that comes again waits for that, however often; nobody has died of it."""
    monkeypatch.setattr("services.models.pool._READ_AGAIN", 0.01)
    pool = await server.pool(SPEC)
    find, tries = server.late.find, []

    async def fails(run: str, wanted: Any) -> Any:
        tries.append(run)
        if len(tries) < 10:
            raise BusError("no leader")
        return await find(run, wanted)

    monkeypatch.setattr(server.late, "find", fails)
    pool._newest = 1_000_000  # so all seem to have been given out before
    models = await client(broker)
    assert (await models.request("default", prompt(models, "hi"))).text == "re: hi"
    assert len(tries) == 10
    await models.close()


async def test_what_nobody_waits_for_is_not_asked(
    broker: MemoryBroker, server: ModelServer, backends: dict[str, Backend]
) -> None:
    """A call was cancelled; a process ends. What has left already is answered."""
    stub = backends["m"]
    assert isinstance(stub, Stub)
    pool = await server.pool(SPEC)
    pool.gate.slots = 2
    stub.gate.clear()
    one, two = await client(broker), await client(broker, run="other")
    waiting = [
        asyncio.ensure_future(one.request("default", prompt(one, str(i), agent=i)))
        for i in range(8)
    ]
    await wait_until(lambda: len(stub.asked) == 2, 10, "two prompts under way")
    others = [
        asyncio.ensure_future(two.request("default", prompt(two, f"o{i}", agent=i)))
        for i in range(3)
    ]
    for task in waiting[2:7]:
        task.cancel()
    await wait_until(lambda: len(server.gone) == 5, 10, "what is called off")
    await wait_until(lambda: len(two._queued) == 3, 10, "the other's prompts")
    await two.close()
    assert {(await w).error_kind for w in others} == {"internal"}
    stub.gate.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [r.text for r in found if isinstance(r, ModelResponse)] == ["re: 0", "re: 1", "re: 7"]
    await wait_until(lambda: not pool._in_hand, 10, "all to be done with")
    assert sorted(stub.asked) == ["0", "1", "7"]
    assert pool.gate.used == 0
    assert (await server.bus.held(SUBJECTS.stream_models, SUBJECTS.model_queue(pool.name)))[0] == 0
    await one.close()
