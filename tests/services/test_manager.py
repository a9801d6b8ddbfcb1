"""The manager: who is let in, what is shown, what can be done."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from pydantic import SecretStr

from services.manager.auth import COOKIE, Doorkeeper
from services.manager.manager import Manager
from shared.bus import NatsBus
from shared.messages.scenario import RoundRow, RunInfo, Status
from shared.service import ServiceContext
from tests.conftest import Services, unique, wait_until
from tests.services.test_runs import game

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
    watching.cancel()
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
        path = re.sub(r"{name}", "x", str(route.resource.canonical if route.resource else ""))
        path = re.sub(r"{action[^}]*}", "cancel", re.sub(r"{run}", "r1", path))
        if not path.startswith(("/login", "/static", "/healthz")):
            found.append((route.method, path))
    assert len(found) > 25
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
                assert answer.headers["Location"] == "/login"
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
    assert 'action="/runs"><input type="hidden"' not in await (await client.get("/runs")).text()
    for method, path in guarded(manager):
        if method not in ("GET", "HEAD") and path != "/logout":
            answer = await client.request(method, path, data={"csrf": word})
            assert answer.status == 403, (method, path)
            answer = await client.request(method, path, headers=bearer(READER), json={})
            assert answer.status == 403, (method, path)


async def test_too_many_wrong_tokens(manager: Manager, client: Client) -> None:
    for _ in range(10):
        assert (await client.post("/login", data={"token": "guess"})).status == 401
    answer = await client.post("/login", data={"token": OPERATOR})
    assert answer.status == 401
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
    assert (answer.status, answer.headers["Location"]) == (302, "/login")


def test_sessions_end() -> None:
    doors = Doorkeeper("a", None)
    names = [doors.open_session("operator") for _ in range(1001)]
    assert names[0] not in doors._sessions
    assert names[-1] in doors._sessions
    assert doors.role_of("") is None


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
    await wait_until(lambda: len(manager.watcher.services) == 6, what="all services")
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
