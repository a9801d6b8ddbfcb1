"""Persona services as processes: any client may ask, several share the work, none is lost."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from populace.personas.jobs import people_job, write_people
from populace.personas.people import Persona, load_people
from populace.personas.sampling import Sampler
from populace.personas.spec import TEMPLATES, PopulationFile
from shared.bus import NatsBus
from shared.errors import RemoteError
from shared.messages.persona import EnrichRequest, JobInfo, JobRecord
from shared.messages.scenario import ModelSpec, ScriptSpec
from shared.service import everybody
from shared.settings import Settings
from tests.conftest import Broker, Services, start_service, unique, wait_until
from tests.endpoint import Endpoint, answer

SCRIPT = ModelSpec(backend="scripted", script=ScriptSpec(text="You {words}. And {words}."))


@pytest.fixture
async def bus(services: Services) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(services.settings(), services.broker.url)
    yield made
    await made.drain()


async def request(services: Services, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    """As a program asks that has nothing but a NATS client."""
    client = await nats.connect(services.broker.url)
    try:
        subject = f"populace.persona.{verb}"
        reply = await client.request(subject, json.dumps(body).encode(), timeout=30)
        found: dict[str, Any] = json.loads(reply.data)
        return found
    finally:
        await client.close()


async def write(bus: NatsBus, settings: Settings, within: float = 60, **fields: Any) -> JobInfo:
    """Have a population written, and wait for it."""
    async with asyncio.timeout(within):
        told = [info async for info in write_people(bus, settings, EnrichRequest(**fields))]
    return told[-1]


async def test_any_client_may_sample(services: Services) -> None:
    whole = await request(services, "sample", {"people": "education", "size": 50})
    assert whole["count"] == 50
    assert whole["fit"]["margins"][0]["variation"] == 0
    expected = Sampler(PopulationFile(TEMPLATES / "education.yaml", {"size": 50})).rows()
    assert whole["rows"] == expected.to_pylist()
    part = await request(
        services, "sample", {"people": "education", "size": 50, "start": 7, "stop": 9}
    )
    assert part["rows"] == whole["rows"][7:9]
    assert part["fit"] is None
    inline = {"attributes": {"luck": {"quotas": {"good": 0.5, "bad": 0.5}}}}
    found = await request(services, "sample", {"population": inline, "size": 10})
    assert sorted(r["luck"] for r in found["rows"]) == ["bad"] * 5 + ["good"] * 5


async def test_what_cannot_be_sampled(services: Services) -> None:
    for body, reason in (
        ({}, "give one of people, population and rows"),
        ({"people": "martians"}, "there are no people named 'martians'"),
        ({"people": "/etc/passwd"}, "outside the folders"),
        ({"people": "template:../../../../etc/x"}, "there is no template"),
        ({"population": {"attributes": {"x": {"derive": "1 if (2 > 1) else 'a' << 2"}}}}, "LShift"),
        ({"people": "education", "start": 5, "stop": 2}, "start and stop"),
        ({"people": "education", "size": 100_000}, "more than one message holds"),
        ({"population": {"attributes": {"x": {"shares": {"a": 0.5, "b": 0.3}}}}}, "add up to 1"),
        ({"people": "education", "sizes": 3}, "sizes: is not a key"),
        ({"population": {"joint": [{"file": "x.csv"}]}}, "tables can be named in a file alone"),
    ):
        assert reason in (await request(services, "sample", body))["error"]


async def test_stored_people_and_fit(services: Services) -> None:
    name = unique("p")
    stored = await request(
        services, "sample", {"people": "education", "size": 100_000, "store": name}
    )
    assert stored["rows"] is None
    assert pq.read_metadata(stored["file"]).num_rows == 100_000
    found = await request(services, "fit", {"population": "education", "people": name})
    assert found["fit"]["rows"] == 100_000
    rows = [{"education": "Ph.D.", "gender": "male", "age": 40}]
    lopsided = await request(services, "fit", {"population": "education", "people": rows})
    assert lopsided["fit"]["margins"][0]["variation"] == pytest.approx(0.8)


async def test_the_service_shows_itself(services: Services) -> None:
    client = await nats.connect(services.broker.url)
    try:
        reply = await client.request("$SRV.INFO.persona_service", b"", timeout=5)
    finally:
        await client.close()
    info = json.loads(reply.data)
    subjects = {endpoint["subject"] for endpoint in info["endpoints"]}
    assert subjects >= {f"populace.persona.{v}" for v in ("sample", "fit", "enrich", "job")}


async def test_a_thousand_people_are_written(services: Services, bus: NatsBus) -> None:
    name = unique("p")
    info = await write(
        bus, services.settings(), name=name, people="education", size=1000, model=SCRIPT,
        names="en_GB",
    )  # fmt: skip
    assert (info.state, info.written, info.failed) == ("finished", 1000, 0), info
    assert (info.requests, info.rewritten, info.alike) == (1000, 0, 0)
    assert info.backend == "scripted"
    assert info.tokens_in > 0
    table = pq.read_table(info.file)
    expected = Sampler(PopulationFile(TEMPLATES / "education.yaml", {"size": 1000})).rows()
    assert table.select(expected.column_names).to_pylist() == expected.to_pylist()
    assert len(set(table["text"].to_pylist())) == 1000
    assert json.loads(table.schema.metadata[b"populace"])["written"]["names"] == "en_GB"
    # It is there by name, and isn't written again:
    again = await write(
        bus, services.settings(), name=name, people="education", size=1000, model=SCRIPT,
        names="en_GB",
    )  # fmt: skip
    assert again.updated == info.updated
    people = load_people(info.file or "", [services.personas], 1000, 3, 5)
    person = Persona(people, 0)
    assert person.text.startswith(f"You are {person.name}. Facts about you: education: ")
    assert "text" not in people.columns([0])


async def test_who_is_alike_is_written_anew(
    services: Services, bus: NatsBus, endpoint: Endpoint
) -> None:
    """Two say the same until they are told of each other; one never says anything else."""
    common = "You collect stamps and old maps of your town, and you show them to your friends."

    def respond(body: dict[str, Any]) -> Any:
        prompt = body["messages"][-1]["content"]
        if "nearly the same" in prompt and "luck: 3" not in prompt:
            seed = random.Random(body["seed"])
            words = " ".join(seed.choice("abcdefgh") * seed.randrange(2, 9) for _ in range(30))
            return answer(json.dumps({"background": f"You {words}."}))
        return answer(json.dumps({"background": common}))

    endpoint.respond = respond
    model = ModelSpec(backend="openai", base_url=endpoint.url, model="m")
    rows = [{"luck": f"luck: {i}"} for i in range(4)]
    info = await write(bus, services.settings(), name=unique("p"), rows=rows, model=model)
    assert (info.state, info.written, info.anew, info.alike) == ("finished", 4, 4, 1), info
    texts = [text.partition("\n")[2] for text in pq.read_table(info.file)["text"].to_pylist()]
    assert texts[0] == texts[3] == common
    assert len(set(texts)) == 3


async def test_failures_are_shown_and_tried_again(
    services: Services, bus: NatsBus, endpoint: Endpoint
) -> None:
    wrong = True

    def respond(body: dict[str, Any]) -> Any:
        prompt = body["messages"][-1]["content"]
        if wrong and "age: 8;" in prompt:
            return answer(json.dumps({"background": "You are a 70-year-old pilot. You fly a lot."}))
        return answer(json.dumps({"background": f"You play with number {body['seed']} all day."}))

    endpoint.respond = respond
    model = ModelSpec(backend="openai", base_url=endpoint.url, model="m")
    fields = {
        "name": unique("p"),
        "rows": [{"age": age, "town": "A"} for age in (7, 8, 9)],
        "model": model,
        "attempts": 2,
        "alike": None,
    }
    info = await write(bus, services.settings(), **fields)
    assert (info.state, info.written, info.failed) == ("finished", 2, 1), info
    assert "70-year-old" in info.examples[0]
    table = pq.read_table(info.file)
    assert table["text"][1].as_py() is None
    assert "age is 8" in table["problem"][1].as_py()
    assert len(endpoint.requests) == 5  # one of them the check of the model
    wrong = False
    info = await write(bus, services.settings(), **fields)
    assert (info.total, info.to_write, info.written, info.failed) == (3, 1, 1, 0), info
    assert len(endpoint.requests) == 7
    assert pq.read_table(info.file)["problem"].to_pylist() == [None] * 3


async def test_a_model_that_never_answers_stops_the_work(
    services: Services, bus: NatsBus, endpoint: Endpoint
) -> None:
    from aiohttp import web

    first = True

    def respond(body: dict[str, Any]) -> Any:
        nonlocal first
        if first:
            first = False
            return answer("yes")
        return web.Response(status=400, text="no such model")

    endpoint.respond = respond
    model = ModelSpec(backend="openai", base_url=endpoint.url, model="m")
    info = await write(
        bus, services.settings(), name=unique("p"), people="education", size=1000, model=model
    )
    assert info.state == "failed"
    assert "no such model" in info.reason
    assert len(endpoint.requests) < 600


async def test_what_cannot_be_written(services: Services, bus: NatsBus) -> None:
    for fields, reason in (
        ({"people": "martians"}, "no people named 'martians'"),
        ({"people": "education", "names": "xx"}, "no names for 'xx'"),
        ({"people": "education", "language": "la"}, "no template 'la'"),
        (
            {
                "people": "education",
                "model": ModelSpec(backend="openai", base_url="http://127.0.0.1:9", model="m"),
            },
            "can't be reached",
        ),
    ):
        with pytest.raises(RemoteError, match=reason):
            await write(
                bus, services.settings(), **{"name": unique("p"), "model": SCRIPT, **fields}
            )
    with pytest.raises(RemoteError, match="no population named 'nobody'"):
        await people_job(bus, services.settings(), "nobody")


@pytest.fixture
def crew(own_broker: Callable[..., Broker], tmp_path: Path) -> Any:
    """A broker, a model service, and persona services that a test may kill."""
    broker = own_broker()
    started = []

    def start(module: str) -> Any:
        started.append(
            start_service(
                module,
                broker,
                tmp_path / "services.log",
                POPULACE_PERSONAS_DIR=str(tmp_path / "personas"),
            )
        )
        return started[-1]

    start("services.models")
    yield broker.settings(personas_dir=tmp_path / "personas"), start
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        process.wait(20)


QUICK = "tests.persona_service.quick_personas"


def talkative(body: dict[str, Any]) -> Any:
    """Writes something else for everyone."""
    source = random.Random(body["messages"][-1]["content"])
    words = " ".join(source.choice(("sun", "rain", "wind", "snow", "fog")) for _ in range(30))
    return answer(json.dumps({"background": f"You know {words}."}))


async def wait_for_instances(bus: NatsBus, ping: str, count: int) -> None:
    """Until so many instances of a service answer."""
    async with asyncio.timeout(20):
        while len(await everybody(bus, ping, bus.process + ".pings")) < count:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("services_count", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_a_kill_in_the_middle_of_writing(
    crew: Any, endpoint: Endpoint, services_count: int
) -> None:
    """Nobody is written twice, nobody is missing, and only what was under way is asked again."""
    settings, start = crew
    endpoint.respond = talkative
    endpoint.delay = 0.3
    victim = start(QUICK)
    bus = await NatsBus.connect(settings, settings.nats_url)
    try:
        if services_count == 2:
            other = start(QUICK)
            ping = settings.subjects.service_ping("persona_service")
            await wait_for_instances(bus, ping, 2)
            assert other.poll() is None
        rows = [{"number": f"n{i}", "town": "A"} for i in range(200)]
        fields: dict[str, Any] = {
            "name": "two-hundred",
            "rows": rows,
            "model": ModelSpec(backend="openai", base_url=endpoint.url, model="m", concurrency=20),
            "alike": None,
        }
        writing = asyncio.ensure_future(write(bus, settings, within=90, **fields))
        await wait_until(lambda: len(endpoint.requests) > 90, 60, "the middle")
        victim.kill()
        victim.wait()
        if services_count == 1:
            start(QUICK)
        info = await writing
    finally:
        await bus.drain()
    assert (info.state, info.total, info.written, info.failed) == ("finished", 200, 200, 0), info
    table = pq.read_table(info.file)
    assert table["number"].to_pylist() == [f"n{i}" for i in range(200)]
    assert None not in table["text"].to_pylist()
    asked: dict[str, int] = {}
    for body in endpoint.requests[1:]:
        prompt = body["messages"][-1]["content"]
        asked[prompt] = asked.get(prompt, 0) + 1
    assert len(asked) == 200
    # At most what one service had under way (32 entries of 4) is asked a second time.
    assert sum(asked.values()) <= 200 + 128
    assert info.requests == 200


async def test_a_cancelled_writing_goes_on(crew: Any, endpoint: Endpoint) -> None:
    settings, start = crew
    endpoint.respond = talkative
    endpoint.delay = 0.1
    start(QUICK)
    bus = await NatsBus.connect(settings, settings.nats_url)
    try:
        fields: dict[str, Any] = {
            "name": "some",
            "rows": [{"number": f"n{i}", "town": "A"} for i in range(100)],
            "model": ModelSpec(backend="openai", base_url=endpoint.url, model="m", concurrency=4),
            "alike": None,
        }
        writing = asyncio.ensure_future(write(bus, settings, **fields))
        await wait_until(lambda: len(endpoint.requests) > 30, 60, "the middle")
        assert (await people_job(bus, settings, "some", cancel=True)).state == "cancelled"
        stopped = await writing
        assert stopped.state == "cancelled"
        before = len(endpoint.requests)
        assert before < 100
        info = await write(bus, settings, **fields)
    finally:
        await bus.drain()
    assert (info.state, info.written) == ("finished", 100)
    prompts = [
        body["messages"][-1]["content"] for body in endpoint.requests if len(body["messages"]) > 1
    ]
    assert len(set(prompts)) == 100
    assert len(prompts) <= 100 + 100  # prompts that waited in the queue are asked again


async def test_texts_belong_to_their_rows(crew: Any, endpoint: Endpoint) -> None:
    """After a stop, whoever has become another person is written anew."""
    settings, start = crew
    endpoint.respond = talkative
    endpoint.delay = 0.1
    start(QUICK)
    bus = await NatsBus.connect(settings, settings.nats_url)
    model = ModelSpec(backend="openai", base_url=endpoint.url, model="m", concurrency=4)
    fields: dict[str, Any] = {"name": "changing", "model": model, "alike": None}

    def rows(town: str) -> list[dict[str, Any]]:
        return [{"number": f"n{i}", "town": town if i % 2 else "same"} for i in range(60)]

    try:
        writing = asyncio.ensure_future(write(bus, settings, rows=rows("old"), **fields))
        await wait_until(lambda: len(endpoint.requests) > 24, 60, "the middle")
        await people_job(bus, settings, "changing", cancel=True)
        await writing
        endpoint.delay = 0
        info = await write(bus, settings, rows=rows("new"), **fields)
        assert (info.state, info.written) == ("finished", 60), info
        people = pq.read_table(info.file).to_pylist()
        assert all(f"town: {p['town']}" in p["text"] for p in people)
        # A finished population is looked at again, not believed:
        info = await write(bus, settings, rows=rows("newer"), **fields)
        assert (info.state, info.to_write) == ("finished", 30), info
        people = pq.read_table(info.file).to_pylist()
        assert all(f"town: {p['town']}" in p["text"] for p in people)
    finally:
        await bus.drain()


@pytest.mark.slow
async def test_a_foreman_that_was_away_gives_way(crew: Any, endpoint: Endpoint) -> None:
    settings, start = crew
    endpoint.respond = talkative
    endpoint.delay = 0.2
    first = start(QUICK)
    bus = await NatsBus.connect(settings, settings.nats_url)
    model = ModelSpec(backend="openai", base_url=endpoint.url, model="m", concurrency=10)
    rows = [{"number": f"n{i}", "town": "A"} for i in range(300)]
    bucket = await bus.bucket(settings.subjects.bucket_persona_jobs)

    async def owner() -> str:
        entry = await bucket.get("away")
        return "" if entry is None else json.loads(entry.value)["owner"]

    try:
        writing = asyncio.ensure_future(
            write(bus, settings, within=100, name="away", rows=rows, model=model, alike=None)
        )
        await wait_until(lambda: len(endpoint.requests) > 20, 60, "the beginning")
        before = await owner()
        second = start(QUICK)
        await wait_for_instances(bus, settings.subjects.service_ping("persona_service"), 2)
        first.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(30):
                while await owner() == before:
                    await asyncio.sleep(0.1)
        finally:
            first.send_signal(signal.SIGCONT)
        info = await writing
        assert second.poll() is None
    finally:
        await bus.drain()
    assert (info.state, info.written) == ("finished", 300), info
    assert None not in pq.read_table(info.file)["text"].to_pylist()


async def test_what_no_service_has_in_hand_is_taken_up(services: Services, bus: NatsBus) -> None:
    """A service died between writing down a work and queueing it."""
    settings = services.settings()
    name = unique("p")
    request = EnrichRequest(name=name, people="education", size=5, model=SCRIPT)
    record = JobRecord(request=request, info=JobInfo(name=name), generation="g-lost")
    bucket = await bus.bucket(settings.subjects.bucket_persona_jobs)
    await bucket.create(name, record.model_dump_json().encode())
    info = await write(bus, settings, name=name, people="education", size=5, model=SCRIPT)
    assert (info.state, info.written) == ("finished", 5)


async def test_what_was_paid_for_outlives_a_full_disk(
    services: Services, bus: NatsBus, endpoint: Endpoint
) -> None:
    endpoint.respond = talkative
    name = unique("p")
    fields: dict[str, Any] = {
        "name": name,
        "rows": [{"number": f"n{i}", "town": "A"} for i in range(5)],
        "model": ModelSpec(backend="openai", base_url=endpoint.url, model="m"),
        "alike": None,
    }
    blocked = services.personas / f"{name}.parquet"
    blocked.mkdir()
    info = await write(bus, services.settings(), **fields)
    assert info.state == "failed"
    assert "can't be written" in info.reason
    asked = len(endpoint.requests)
    blocked.rmdir()
    info = await write(bus, services.settings(), **fields)
    assert (info.state, info.written) == ("finished", 5)
    assert len(endpoint.requests) == asked + 1  # the check of the model


async def test_strange_rows(services: Services, bus: NatsBus) -> None:
    rows = [{"age": 30.0}, {"age": float("nan")}, {"age": float("inf")}, {"age": None}]
    info = await write(bus, services.settings(), name=unique("p"), rows=rows, model=SCRIPT)
    assert (info.state, info.written) == ("finished", 4), info


def test_frames_and_lists_are_people(tmp_path: Path) -> None:
    from populace.personas.store import store_people
    from shared.errors import InvalidInputError

    settings = Settings(personas_dir=tmp_path)
    rows = [{"Age": 3, "bio": "You are small."}, {"Age": 80, "bio": "You are old."}]
    path = store_people("mine", rows, columns={"Age": "age", "bio": "text"}, settings=settings)
    assert pq.read_table(path).column_names == ["age", "text"]
    people = load_people(str(path), [tmp_path], 2, 1, 2)
    assert Persona(people, 0).text == "You are old."
    for wrong, reason in (
        ({"x": "y"}, "there is no column 'x'"),
        ({"Age": "how old"}, "can't be an attribute's name"),
        ({"Age": "bio"}, "two columns would be named 'bio'"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            store_people("mine", pa.Table.from_pylist(rows), columns=wrong, settings=settings)
    with pytest.raises(InvalidInputError, match="come as a DataFrame"):
        store_people("mine", 3, settings=settings)
