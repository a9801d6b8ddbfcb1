"""The manager: who is let in, what is shown, what can be done."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from pydantic import SecretStr

from services.manager.auth import COOKIE, Doorkeeper, TooManyError
from services.manager.forms import form_of, overrides_of
from services.manager.manager import Manager
from services.manager.metrics import metrics
from shared.bus import NatsBus
from shared.errors import InvalidInputError
from shared.messages.scenario import RoundRow, RunInfo, Status
from shared.service import ServiceContext
from tests.conftest import Services, unique, wait_until
from tests.endpoint import Endpoint
from tests.services.test_recovery import diaries, respond
from tests.services.test_runs import game, play

EXAMPLES = {
    "run": "r1",
    "other": "r2",
    "name": "answers.csv",
    "action": "cancel",
    "way": "drain",
    "host": "h1",
    "kind": "agents",
    "population": "players",
    "number": "1",
    "path": "town",
    "file": "examples/scenario.yaml",
}
"""What stands for the parts of an address."""
OPERATOR, READER = "the-operators-token", "the-readers-token"
EVIL = "<script>alert(1)</script>"
Client = TestClient[web.Request, web.Application]


@pytest.fixture
async def manager(services: Services, tmp_path: Path) -> AsyncIterator[Manager]:
    settings = services.settings(
        manager_token=SecretStr(OPERATOR), manager_reader_token=SecretStr(READER)
    ).model_copy(update={"home": tmp_path})
    bus = await NatsBus.connect(settings, services.broker.url)
    made = Manager(ServiceContext("manager", settings, bus))
    watching = asyncio.ensure_future(made.watcher.run())
    await wait_until(lambda: bool(made.watcher.hosts), what="a look at the broker")
    yield made
    made.context.stopping.set()
    made.watcher.stop()
    await asyncio.wait({watching})
    await bus.drain()


@pytest.fixture
async def client(manager: Manager) -> AsyncIterator[Client]:
    async with TestClient(
        TestServer(manager.app()), cookie_jar=aiohttp.CookieJar(unsafe=True)
    ) as made:
        yield made


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def log_in(client: Client, token: str = OPERATOR) -> str:
    """Log in as a person does; returns the word that forms carry."""
    answer = await client.post("/login", data={"token": token})
    assert answer.status == 200, await answer.text()
    found = re.search(r'name="csrf" value="([^"]+)"', await answer.text())
    assert found is not None
    return found[1]


def guarded(manager: Manager) -> list[tuple[str, str]]:
    """Method and path of everything that needs a token."""
    found = []
    for route in manager.app().router.routes():
        assert route.resource is not None
        path = str(route.resource.canonical)
        for part, value in EXAMPLES.items():
            path = re.sub(rf"{{{part}(:[^}}]*)?}}", value, path)
        assert "{" not in path, path
        if not path.startswith(("/login", "/static", "/healthz")):
            found.append((route.method, path))
    assert len(found) > 70
    return found


# Who is let in
async def test_nothing_is_shown_without_a_token(manager: Manager, client: Client) -> None:
    for method, path in guarded(manager):
        for headers in ({}, bearer("wrong"), {"Cookie": f"{COOKIE}=made-up"}):
            manager.doors._wrong.clear()
            answer = await client.request(method, path, headers=headers, allow_redirects=False)
            text = await answer.text()
            assert answer.status in (401, 302), (method, path, headers, answer.status)
            if answer.status == 302:
                assert answer.headers["Location"].startswith("/login?next=/")
            assert "chaos" not in text
            assert "agent_host" not in text


async def test_requests_of_other_pages_are_refused(manager: Manager, client: Client) -> None:
    word = await log_in(client)
    for method, path in guarded(manager):
        if method in ("GET", "HEAD"):
            continue
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            answer = await client.request(method, path, headers=headers, data={"csrf": word})
            assert answer.status == 403, (method, path)
        for data in ({}, {"csrf": "guessed"}):
            answer = await client.request(method, path, data=data)
            assert answer.status == 403, (method, path)
            assert "form" in await answer.text()


async def test_a_reader_may_only_look(manager: Manager, client: Client) -> None:
    word = await log_in(client, READER)
    assert (await client.get("/")).status == 200
    assert (await client.get("/start")).status == 403
    assert 'action="/runs"><input type="hidden"' not in await (await client.get("/runs")).text()
    for method, path in guarded(manager):
        if method not in ("GET", "HEAD") and path != "/logout":
            answer = await client.request(method, path, data={"csrf": word})
            assert answer.status == 403, (method, path)
            answer = await client.request(method, path, headers=bearer(READER), json={})
            assert answer.status == 403, (method, path)
    await client.post("/logout", data={"csrf": word})
    assert (await client.get("/", allow_redirects=False)).status == 302


async def test_too_many_wrong_tokens(manager: Manager, client: Client) -> None:
    for _ in range(10):
        assert (await client.post("/login", data={"token": "guess"})).status == 401
    answer = await client.post("/login", data={"token": OPERATOR})
    assert answer.status == 429
    assert "wait a minute" in await answer.text()
    assert (await client.get("/api/runs", headers=bearer(OPERATOR))).status == 429
    manager.doors._wrong.clear()
    await log_in(client)


async def test_coming_and_going(client: Client) -> None:
    word = await log_in(client)
    (cookie,) = client.session.cookie_jar
    assert cookie["httponly"]
    assert cookie["samesite"] == "Strict"
    page = await client.get("/")
    assert page.status == 200
    assert (
        "script-src" in page.headers["Content-Security-Policy"]
        or "default-src 'self'" in (page.headers["Content-Security-Policy"])
    )
    await client.post("/logout", data={"csrf": word})
    answer = await client.get("/", allow_redirects=False)
    assert (answer.status, answer.headers["Location"]) == (302, "/login?next=/")
    for place in ("//evil.example", "https://evil.example", "/\\evil.example", "/runs?search=a"):
        data = {"token": OPERATOR, "next": place}
        answer = await client.post("/login", data=data, allow_redirects=False)
        inside = place if place.startswith("/runs") else "/"
        assert (answer.status, answer.headers["Location"]) == (303, inside)


def test_sessions_end() -> None:
    doors = Doorkeeper("a", None)
    names = [doors.open_session("operator") for _ in range(1001)]
    assert names[0] not in doors._sessions
    assert names[-1] in doors._sessions
    assert doors.role_of("", "1.2.3.4") is None
    for _ in range(10):
        assert doors.role_of("guess", "6.6.6.6") is None
    with pytest.raises(TooManyError):
        doors.role_of("a", "6.6.6.6")
    assert doors.role_of("a", "1.2.3.4") == "operator"  # others may come in


@pytest.mark.parametrize(("operator", "reader"), [("", None), ("same", "same")])
def test_tokens_that_would_let_anybody_in(operator: str, reader: str | None) -> None:
    with pytest.raises(InvalidInputError, match="needs a token"):
        Doorkeeper(operator, reader)


# What is shown
async def test_what_models_and_people_wrote_is_shown_as_text(
    manager: Manager, client: Client
) -> None:
    name = unique("evil")
    info = RunInfo(run=name, name=EVIL, state="failed", reason=EVIL)
    bucket = await manager.bus.bucket(manager.settings.subjects.bucket_runs)
    await bucket.put(name, info.model_dump_json().encode())
    await manager.watcher.refresh()
    row = RoundRow(round=1, answers=1, failed=1, failures={EVIL: 1}, example=EVIL)
    row.values = {EVIL: EVIL, "mean": 1.0}
    status = Status(kind="round_finished", run=name, round=1, row=row)
    manager.watcher._take_status(_message(status))
    await log_in(client)
    for path in ("/", "/runs", f"/runs/{name}", f"/runs?search={EVIL}"):
        page = await client.get(path)
        text = await page.text()
        assert page.status == 200, path
        assert EVIL not in text, path
        assert "&lt;script&gt;" in text or "\\u003cscript" in text, path
    await bucket.delete(name)


def _message(status: Status) -> Any:
    from shared.bus import Message

    return Message("x", status.model_dump_json().encode(), "", None)


async def test_hosts_services_and_models_are_listed(manager: Manager, client: Client) -> None:
    services = manager.watcher.services
    await wait_until(lambda: len(services) == 6 and all(services.values()), what="all services")
    headers = bearer(READER)
    told = await (await client.get("/api/overview", headers=headers)).json()
    assert told["broker"] == "up"
    assert told["hosts"] == 1
    assert told["services"]["director"] == 1
    hosts = await (await client.get("/api/hosts", headers=headers)).json()
    assert {h["kind"] for h in hosts} == {"agents", "environments"}
    text = await (await client.get("/metrics", headers=headers)).text()
    assert "populace_broker_up 1" in text
    assert 'populace_services{service="agent_host"} 1' in text
    described = await (await client.get("/api/openapi.json", headers=headers)).json()
    paths = {str(r.resource.canonical) for r in manager.app().router.routes() if r.resource}
    ours = {p for p in paths if p.startswith("/api/") and p != "/api/openapi.json"}
    plain = {p for p in ours if "{action" not in p}
    assert plain <= described["paths"].keys()
    page = await (await client.get("/hosts", headers=headers)).text()
    assert "python -m agent_host" in page


# What can be done
async def test_a_run_from_the_form_to_its_end(manager: Manager, client: Client) -> None:
    word = await log_in(client)
    name = unique("form")
    spec = {**game(params={"pause": 0.2}, rounds=50), "run": name}
    answer = await client.post("/runs", data={"csrf": word, "scenario": yaml.safe_dump(spec)})
    assert answer.status == 200, await answer.text()
    assert str(answer.url).endswith(f"/runs/{name}")
    await wait_until(
        lambda: name in manager.watcher.progress and len(manager.watcher.progress[name].rows) > 1,
        within=30,
        what="two rounds",
    )
    page = await (await client.get(f"/runs/{name}")).text()
    assert "data-chart" in page
    assert "unlucky" in page
    told = await client.post(f"/runs/{name}/pause", data={"csrf": word})
    assert "Asked for: pause" in await told.text()
    await wait_until(lambda: manager.watcher.runs[name].state == "paused", within=30)
    await client.post(f"/runs/{name}/resume", data={"csrf": word})
    await wait_until(lambda: manager.watcher.runs[name].state == "running", within=30)
    await client.post(f"/runs/{name}/cancel", data={"csrf": word})
    await wait_until(lambda: manager.watcher.runs[name].state == "cancelled", within=30)
    again = await client.post(f"/runs/{name}/cancel", data={"csrf": word})
    assert again.status == 422
    assert 'role="alert"' in await again.text()
    audit = [
        json.loads(line)
        for line in (manager.settings.home / "audit.jsonl").read_text().splitlines()
    ]
    assert [a["action"] for a in audit] == ["submit", "pause", "resume", "cancel"]
    assert {a["what"] for a in audit} == {name}


@pytest.mark.parametrize(
    ("scenario", "complaint"),
    [
        ("- a\n- b", "a mapping of keys"),
        ("name: [", "no YAML"),
        ("name: x\nscenario: games:Game\nround: 3", "round: is not a key"),
        (f"name: x\nscenario: nothing:Game\nrun: '{EVIL}'", "must be 1 to 64"),
    ],
)
async def test_scenarios_that_cannot_be_used(client: Client, scenario: str, complaint: str) -> None:
    word = await log_in(client)
    answer = await client.post("/runs", data={"csrf": word, "scenario": scenario})
    text = await answer.text()
    assert answer.status == 422
    assert complaint in text
    assert EVIL not in text


async def test_a_program_starts_and_ends_a_run(manager: Manager, client: Client) -> None:
    headers, name = bearer(OPERATOR), unique("api")
    spec = {**game(params={"pause": 0.2}, rounds=50), "run": name}
    answer = await client.post("/api/runs", headers=headers, json=spec)
    assert (answer.status, await answer.json()) == (201, {"run": name, "state": "accepted"})
    again = await client.post("/api/runs", headers=headers, json=spec)
    assert again.status == 422
    assert "already" in (await again.json())["error"]
    for body in (b"no json", b"[1]"):
        wrong = await client.post("/api/runs", headers=headers, data=body)
        assert wrong.status == 422
    await wait_until(lambda: name in manager.watcher.runs, within=10)
    answer = await client.get(f"/api/runs/{name}", headers=headers)
    assert (await answer.json())["info"]["agents"] == 50
    event = {"name": "storm", "data": {}}
    told = await client.post(f"/api/runs/{name}/events", headers=headers, json=event)
    assert told.status == 200, await told.text()
    done = await client.post(f"/api/runs/{name}/cancel", headers=headers)
    assert done.status == 200
    for path in ("/api/runs/nothing", "/api/runs/no.token"):
        assert (await client.get(path, headers=headers)).status == 422
    assert (await client.post("/api/runs/nothing/cancel", headers=headers)).status == 422


async def test_pages_hear_of_changes(manager: Manager, client: Client) -> None:
    await log_in(client)
    async with client.get("/events?since=0") as stream, asyncio.timeout(10):
        first = json.loads((await stream.content.readline()).removeprefix(b"data: "))
        assert first["broker"] == "up"
        status = Status(kind="progress", run="r", round=1, done=3)
        manager.watcher._take_status(_message(status))
        await stream.content.readline()
        second = json.loads((await stream.content.readline()).removeprefix(b"data: "))
        assert second["version"] > first["version"]


# All the rest, as programs see it
async def get(client: Client, path: str, status: int = 200) -> Any:
    answer = await client.get(path, headers=bearer(READER))
    assert answer.status == status, (path, await answer.text())
    return await answer.json()


async def do(client: Client, path: str, status: int = 200, **fields: Any) -> Any:
    answer = await client.post(path, headers=bearer(OPERATOR), json=fields)
    assert answer.status == status, (path, await answer.text())
    return await answer.json()


async def test_a_run_from_all_sides(
    manager: Manager, client: Client, services: Services, endpoint: Endpoint
) -> None:
    endpoint.respond = respond
    fields = diaries(endpoint, agents={"count": 30, "personas": "education"}, rounds=2)
    outcome = await play(services, {**fields, "record_events": True, "record_messages": True})
    run = outcome.run
    other = (await play(services, {**fields, "run": unique("r"), "seed": 12})).run
    await manager.watcher.refresh()
    told = await get(client, f"/api/runs/{run}")
    assert [row["round"] for row in told["rounds"]] == [1, 2]
    assert told["manifest"]["state"] == "finished"

    agents = await get(client, f"/api/runs/{run}/agents?sort=agent&start=20")
    assert [r["agent"] for r in agents["rows"]] == list(range(20, 30))
    assert agents["populations"] == {"people": 30}
    assert set(agents["personas"]) >= {"education"}
    where = "column=education&op=%3D&value=Ph.D."
    some = await get(client, f"/api/runs/{run}/agents?{where}")
    assert {r["education"] for r in some["rows"]} == {"Ph.D."}
    assert 0 < some["matching"] < 30
    await get(client, f"/api/runs/{run}/agents?sort=nothing", 422)
    await get(client, f"/api/runs/{run}/agents?start=many", 422)

    one = await get(client, f"/api/runs/{run}/agents/people/7")
    assert one["live"] is False
    assert one["persona"]["education"]
    assert one["text"].startswith("You are a person")
    assert [a["round"] for a in one["answers"]] == [1, 2]
    assert {a["name"]: a["text"] for a in one["one"]["attributes"]}["days"] == "2"
    assert [m["role"] for m in one["one"]["memory"]] == ["user", "assistant"] * 2
    assert {m["receiver"] for m in one["messages"]} == {"ledger"}
    said = await get(client, f"/api/runs/{run}/agents/people/7/exchanges")
    assert [(e["round"], e["question"]) for e in said["exchanges"]] == [(1, 1), (2, 1)]
    assert said["exchanges"][1]["text"] == one["one"]["memory"][3]["content"]
    for wrong in ("people/30", "nobody/1", "people/x"):
        await get(client, f"/api/runs/{run}/agents/{wrong}", 422)

    tree = await get(client, f"/api/runs/{run}/environments")
    assert [e["path"] for e in tree["environments"]] == ["ledger"]
    ledger = await get(client, f"/api/runs/{run}/environments/ledger")
    assert {a["name"]: a["text"] for a in ledger["one"]["attributes"]}["notes"] == "60"
    await get(client, f"/api/runs/{run}/environments/nothing", 422)

    files = await get(client, f"/api/runs/{run}/files")
    assert {f["name"] for f in files} >= {"answers.parquet", "answers.csv", "messages.parquet"}
    for file in files:
        answer = await client.get(f"/runs/{run}/files/{file['name']}", headers=bearer(READER))
        assert answer.status == 200
        assert f"{run}-{file['name']}" in answer.headers["Content-Disposition"]
        content = await answer.read()
        if file["name"] == "answers.csv":
            assert content.count(b"\n") == 61
    for wrong in ("nothing.txt", "..%2F..%2Faudit.jsonl", "%2Fetc%2Fpasswd"):
        answer = await client.get(f"/runs/{run}/files/{wrong}", headers=bearer(READER))
        assert answer.status in (404, 422), wrong
    compared = await get(client, f"/api/runs/{run}/compare/{other}")
    assert (compared["identical"], compared["differing"]) == (False, 60)
    await get(client, f"/api/runs/{run}/compare/{run}", 422)

    refused = await do(
        client, f"/api/runs/{run}/interview", 422, agents=["people/1"], question="Why?"
    )
    assert "not under way" in refused["error"]
    assert await do(client, f"/api/runs/{run}/clean-up") == {"workers": 0}
    answer = await client.delete(f"/api/runs/{run}", headers=bearer(OPERATOR))
    assert answer.status == 200
    assert not (services.runs / run).exists()
    for path in ("", "/agents/people/7", "/environments/ledger", f"/compare/{other}"):
        await get(client, f"/api/runs/{run}{path}", 422)
    assert (await client.delete(f"/api/runs/{run}", headers=bearer(OPERATOR))).status == 422


async def test_a_manager_that_starts_late_knows_earlier_rounds(
    manager: Manager, client: Client, services: Services
) -> None:
    run = (await play(services, game(rounds=3))).run
    manager.watcher.progress.clear()
    shutil.rmtree(services.runs / run)  # as on a machine without the recorder's folder
    await manager.watcher.refresh()
    told = await get(client, f"/api/runs/{run}")
    assert [row["round"] for row in told["rounds"]] == [1, 2, 3]


async def test_hosts_closely(manager: Manager, client: Client) -> None:
    host = manager.settings.host
    told = await get(client, f"/api/hosts/{host}/agents?lines=5")
    assert told["here"]
    assert len(told["log"]) <= 5
    assert told["info"]["per_run"] == 2
    await get(client, "/api/hosts/nowhere/agents", 422)
    path = f"/api/hosts/{host}/agents"
    assert (await do(client, f"{path}/change", per_run=3))["per_run"] == 3
    assert (await do(client, f"{path}/change", per_run=2))["per_run"] == 2
    wrong = await do(client, f"{path}/change", 422, per_run=0)
    assert "per_run" in wrong["error"]
    assert "no worker" in (await do(client, f"{path}/stop", 422, worker="w-nobody"))["error"]


async def test_the_last_host_is_not_drained_under_a_run(manager: Manager, client: Client) -> None:
    name, headers = unique("busy"), bearer(OPERATOR)
    spec = {**game(params={"pause": 0.2}, rounds=50), "run": name}
    await client.post("/api/runs", headers=headers, json=spec)
    await wait_until(lambda: any(s.info.workers for s in manager.watcher.hosts.values()), within=20)
    path = f"/api/hosts/{manager.settings.host}/agents/change"
    refused = await do(client, path, 422, draining=True)
    assert "no other host" in refused["error"]
    cleaned = await do(client, f"/api/runs/{name}/clean-up", 422)
    assert "cancel or pause" in cleaned["error"]
    await do(client, f"/api/runs/{name}/cancel")


async def test_populations(manager: Manager, client: Client, services: Services) -> None:
    name = unique("drawn")
    told = await do(
        client, "/api/people/draw", 201, people="template:education", store=name, size=200
    )
    assert told["count"] == 200
    everyone = await get(client, "/api/people")
    assert name in {p["name"] for p in everyone["stored"]}
    assert "education" in everyone["templates"]
    for which, count in ((name, 200), ("template:education-us", 1500)):
        one = await get(client, f"/api/people/{which}?seed=3")
        assert one["people"] == count
        assert len(one["sample"]) == 12
        margin = next(m for m in one["margins"] if m["name"] == "education")
        assert sum(margin["shares"]) == pytest.approx(1)
    asked = (await get(client, "/api/people/template:education-us"))["margins"][0]["asked"]
    assert sum(asked) == pytest.approx(1, abs=0.02)
    for wrong in ("nobody", "template:nobody", "..%2Fx"):
        await get(client, f"/api/people/{wrong}", 422)
    await do(client, "/api/people/draw", 422, people="template:nobody", store=name)
    written = unique("written")
    begun = await do(
        client,
        "/api/people/write",
        202,
        name=written,
        people="template:education",
        size=2,
        model={"backend": "scripted", "script": {"text": "A life in few words, {number}."}},
    )
    assert begun["name"] == written
    jobs = (await get(client, "/api/people"))["jobs"]
    assert written in {j["name"] for j in jobs}


async def test_scenarios_are_described_and_no_code_is_imported(
    client: Client, manager: Manager
) -> None:
    files = {s["file"]: s for s in await get(client, "/api/scenarios")}
    file = "examples/guess_average/scenario.yaml"
    assert file in files
    assert not any("sweep" in s or "experiments" in s for s in files)
    await get(client, f"/api/scenarios/{file}", 403)  # code is run for it
    answer = await client.get(f"/api/scenarios/{file}", headers=bearer(OPERATOR))
    told = await answer.json()
    assert told["params"]["values"]["target"]["ratio"] == "2/3"
    assert told["params"]["about"]["near"]
    for wrong in ("examples/nothing.yaml", "..%2F..%2Fetc%2Fpasswd", "pyproject.toml"):
        answer = await client.get(f"/api/scenarios/{wrong}", headers=bearer(OPERATOR))
        assert answer.status == 422
    assert "baselines" not in sys.modules  # a module beside that scenario


async def test_a_form_with_what_cannot_be_used(client: Client) -> None:
    word = await log_in(client)
    path = "/start/examples/guess_average/scenario.yaml"
    page = await (await client.get(path)).text()
    assert 'name="params.target.ratio"' in page
    for given, complaint in (
        ({"agents.count": "many"}, "Agents: &#39;many&#39; is not a whole number"),
        ({"agents.count": "0"}, "agents.count: "),
        ({"params.style": "loud"}, "Style: must be one of at_once"),
        ({"params.near": "-1"}, "params.near: "),
        ({"params.range": "[1, "}, "Range: "),
        ({"run": "no name"}, "the run&#39;s name"),
        ({"agents.personas": EVIL}, "there are no people named"),
    ):
        answer = await client.post(path, data={"csrf": word, "do": "start", **given})
        text = await answer.text()
        assert answer.status == 422, given
        assert complaint in text, (given, re.findall(r'role="alert">(.*?)<', text))
        assert EVIL not in text


def test_forms_and_what_is_put_into_them() -> None:
    spec = {
        "name": "x",
        "agents": {"count": 10},
        "rounds": 2,
        "seed": 0,
        "models": {"default": {"backend": "openai", "model": "m", "base_url": "http://h"}},
    }
    schema = {
        "properties": {
            "size": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
            "loud": {"type": "boolean"},
            "deep": {"$ref": "#/$defs/Deep"},
            "rows": {"type": "array"},
        },
        "$defs": {"Deep": {"properties": {"way": {"enum": ["a", "b"]}}}},
    }
    values = {"size": 3, "loud": True, "deep": {"way": "a"}, "rows": [1, 2]}
    described = {"spec": spec, "params": {"schema": schema, "values": values, "about": {}}}
    form = form_of(described)
    kinds = {f.key: f.kind for f in form["Parameters"]}
    assert kinds == {
        "params.size": "int",
        "params.loud": "bool",
        "params.deep.way": "choice",
        "params.rows": "yaml",
    }
    given = {f.key: f.value for section in form.values() for f in section if f.kind != "bool"}
    assert overrides_of(form, {**given, "params.loud": "true"}) == {}
    changed = {**given, "params.size": "", "params.deep.way": "b", "params.rows": "[3]"}
    assert overrides_of(form, {**changed, "models.default.backend": "scripted"}) == {
        "params.size": None,
        "params.loud": False,
        "params.deep.way": "b",
        "params.rows": [3],
        "models.default.backend": "scripted",
        "models.default.base_url": None,
        "models.default.model": None,
    }
    assert form["Parameters"][0].value == ""  # what was given is shown again


def test_an_untouched_form_changes_nothing() -> None:
    schema = {
        "properties": {
            "mode": {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
            "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "prompt": {"type": "string"},
            "suffix": {"type": "string"},
            "level": {"enum": [1, 2, 3]},
        }
    }
    values = {
        "mode": None,
        "flag": None,
        "prompt": "Line one.\nLine two.",
        "suffix": "Answer: ",
        "level": 2,
    }
    spec = {"name": "x", "agents": {"count": 1}, "rounds": 1, "seed": 0, "models": {}}
    described = {"spec": spec, "params": {"schema": schema, "values": values, "about": {}}}
    form = form_of(described)
    sent = {f.key: f.value.replace("\n", "\r\n") for section in form.values() for f in section}
    assert overrides_of(form, sent) == {}
    changed = {**sent, "params.flag": "false", "params.level": "3", "params.prompt": "One.\r\nTwo."}
    assert overrides_of(form, changed) == {
        "params.flag": False,
        "params.level": 3,
        "params.prompt": "One.\nTwo.",
    }


async def test_names_that_lead_elsewhere(
    manager: Manager, client: Client, services: Services
) -> None:
    outside = services.runs.parent / unique("elsewhere")
    (outside / "answers.parts").mkdir(parents=True)
    up = f"..%2F{outside.name}"
    whole = str(outside).replace("/", "%2F")
    for run in (up, whole, "a%0d%0ab", "%2A"):
        for rest in (
            "",
            "/agents",
            "/agents/p/0",
            "/agents/p/0/exchanges",
            "/environments",
            "/environments/a",
            "/files",
            "/usage",
            "/compare/other",
        ):
            await get(client, f"/api/runs/{run}{rest}", 422)
    await get(client, "/api/runs/nothing/agents", 422)
    for agent in ("p/abc", "p/" + "9" * 5000, "p%2Fq/1"):
        await get(client, f"/api/runs/nothing/agents/{agent}/exchanges", 422)
    found = await client.get("/runs/r/agents/find?name=a%0d%0aX:y/1", headers=bearer(READER))
    assert found.status == 422
    events = await client.get("/runs/r/environments/a%20b/events", headers=bearer(READER))
    assert events.status == 422


async def test_what_cannot_be_read_ends_nothing(manager: Manager, client: Client) -> None:
    bucket = await manager.bus.bucket(manager.settings.subjects.bucket_runs)
    name = unique("zz")
    await bucket.put(name, b'{"run": "zz"}')
    await manager.watcher.refresh()
    assert name not in manager.watcher.runs
    assert (await get(client, "/api/overview"))["broker"] == "up"
    await bucket.delete(name)


async def test_files_that_change_are_read_anew(
    manager: Manager, client: Client, services: Services
) -> None:
    run = (await play(services, game(rounds=2))).run
    assert len((await get(client, f"/api/runs/{run}"))["manifest"]["scenario"]) > 3
    path = services.runs / run / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "rounds": 77}))
    assert (await get(client, f"/api/runs/{run}"))["manifest"]["rounds"] == 77


async def test_statuses_that_come_while_earlier_ones_are_read(manager: Manager) -> None:
    """A round that is told live meanwhile stays, whatever was restored before."""
    run, watcher, subjects = unique("late"), manager.watcher, manager.settings.subjects

    def status(kind: Any, **fields: Any) -> Status:
        if "round" in fields and kind == "round_finished":
            fields["row"] = RoundRow(round=fields["round"], answers=1, failed=0)
        return Status(kind=kind, run=run, **fields)

    told = [
        status("round_finished", round=1),
        status("round_finished", round=2),
        status("restored", round=1, life=2),
        status("round_finished", round=2),
        status("progress", round=3, done=77, agents=100),
    ]
    for one in told:
        await manager.bus.append(subjects.run_status(run), one.model_dump_json().encode())
    watcher.runs[run] = RunInfo(run=run, name="x", state="running")
    task = asyncio.ensure_future(watcher.catch_up(run))
    other = asyncio.ensure_future(watcher.catch_up(run))
    await asyncio.sleep(0)
    watcher._take_status(_message(status("round_finished", round=3)))
    held = await task
    assert held is not None
    assert await other is held
    assert list(held.rows) == [1, 2, 3]
    assert held.now == {}
    watcher._take_status(_message(status("restored", round=2, life=3)))
    assert list(held.rows) == [1, 2]
    await manager.bus.purge(subjects.stream_runs, subjects.run_status(run))


def test_metrics_are_exact_and_escaped(manager: Manager) -> None:
    evil = 'a"b\\c\nd'
    manager.watcher.services["models"] = [{evil: {"slots": 3, "answered": 12_345_678, "queued": 0}}]
    lines = metrics(manager).splitlines()
    told = next(line for line in lines if line.startswith("populace_pool_answered_total{"))
    assert told == 'populace_pool_answered_total{pool="a\\"b\\\\c\\nd",service="1"} 12345678'
    assert "# TYPE populace_pool_answered_total counter" in lines
