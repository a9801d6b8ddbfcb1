"""The manager's pages in a real browser: headless Chromium, as Debian packages it."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from populace.personas.store import store_people
from populace.runs import find_run, submit
from shared.bus import NatsBus
from shared.messages.scenario import RunInfo, ScenarioSpec
from tests.conftest import ROOT, Broker, Services, start_service, unique, wait_until
from tests.endpoint import Endpoint, answer
from tests.services.test_runs import game, play, watch

TOKEN = "the-operators-token"
EVIL = "<script>window.evil = 1</script><img src=x onerror='window.evil = 2'>"
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
SOON = 30_000
"""Milliseconds."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no Chromium here (Debian: apt-get install chromium)"
    ),
]


class Manager:
    """A manager that runs as a process of its own."""

    def __init__(self, broker: Broker, home: Path, **environment: str) -> None:
        self.home = home
        self.process: subprocess.Popen[bytes] = start_service(
            "services.manager",
            broker,
            home / "manager.log",
            POPULACE_HOME=str(home),
            POPULACE_MANAGER_PORT="0",
            POPULACE_MANAGER_TOKEN=TOKEN,
            **environment,
        )

    async def address(self) -> str:
        file = self.home / "manager.url"
        await wait_until(file.exists, within=30, what="the manager's address")
        await wait_until(lambda: file.read_text().endswith("\n"))
        return file.read_text().strip()

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(20) == 0


@pytest.fixture(scope="module")
def manager(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    made = Manager(
        services.broker,
        tmp_path_factory.mktemp("manager"),
        POPULACE_RUNS_DIR=str(services.runs),
        POPULACE_PERSONAS_DIR=str(services.personas),
    )
    yield made
    made.stop()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        made = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield made
        await made.close()


@pytest.fixture
async def bus(services: Services) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(services.settings(), services.broker.url)
    yield made
    await made.drain()


async def open_page(
    browser: Browser, address: str, *, width: str = "desktop"
) -> tuple[Page, list[str]]:
    """A page of somebody who has logged in, and what its console complains of."""
    size = WIDTHS[width]
    context = await browser.new_context(
        base_url=address, viewport={"width": size[0], "height": size[1]}
    )
    page = await context.new_page()
    page.set_default_timeout(SOON)
    expect.set_options(timeout=SOON)
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto("/login")
    await page.fill("#token", TOKEN)
    await page.click("text=Log in")
    await expect(page.locator("h1")).to_have_text("Overview")
    return page, complaints


async def rounds_drawn(page: Page, at_least: int) -> int:
    """Wait until the chart shows so many rounds (points of its first line); gives how many."""
    async with asyncio.timeout(30):
        while True:  # the page's policy forbids what playwright's own wait does there
            points = "document.querySelector('#rounds').data?.[0].x.length ?? 0"
            found = int(await page.evaluate(points))
            if found >= at_least:
                return found
            await asyncio.sleep(0.1)


async def test_a_game_from_the_form_to_its_end(
    manager: Manager, browser: Browser, services: Services
) -> None:
    name = unique("game")
    page, complaints = await open_page(browser, await manager.address())
    await page.click("text=Start a run")
    await page.locator("li", has_text="examples/guess_average/scenario.yaml").locator("a").click()
    await page.fill("[name=run]", name)
    await page.fill("[name='agents.count']", "40")
    await page.fill("[name=rounds]", "5000")
    await page.fill("[name='agents.personas']", "education")
    await page.select_option("[name='models.default.backend']", "scripted")
    await page.click("text=Estimate calls")
    await expect(page.locator("[aria-label=Estimate]")).to_contain_text("About 200,000 calls")
    assert await page.input_value("[name='agents.count']") == "40"
    await page.click("button.main:text('Start')")
    await expect(page.locator("h1")).to_have_text(name)

    # Its chart moves.
    before = await rounds_drawn(page, 2)
    await rounds_drawn(page, before + 2)

    # A worker is stopped, and its agents move.
    await page.click(".tabs >> text=Environments")
    row = page.locator("table", has_text="players").first
    workers = re.findall(r"(w-\w+): 20", await row.inner_text())
    assert len(workers) == 2
    await page.goto(f"/hosts/{services.settings().host}/agents")
    await page.locator("tr", has_text=workers[0]).locator("text=Stop").click()
    await expect(page.locator(".done")).to_have_text(f"Stopped {workers[0]}.")
    await expect(page.locator("[data-live=workers]")).not_to_contain_text(workers[0])
    await page.goto(f"/runs/{name}")
    await expect(page.locator("[data-live=head]")).to_contain_text("life 2")
    async with asyncio.timeout(30):
        while True:
            await page.goto(f"/runs/{name}/environments")
            text = await page.locator("main").inner_text()
            moved = re.findall(r"(w-\w+): 20", text)
            if len(moved) == 2:
                break
            await asyncio.sleep(0.2)
    assert not set(moved) & set(workers)

    # An agent is found, and asked.
    await page.click(".tabs >> text=Agents")
    await page.fill("#name", "players/17")
    await page.click("button:text-is('Go')")
    await expect(page.locator("h1")).to_contain_text("players/17")
    await expect(page.locator(".said")).to_contain_text("education")
    await page.fill("#question", "Why that number?")
    await page.click("button:text('Ask')")
    asked = page.locator("[data-live=asked]")
    await expect(asked).to_contain_text("Why that number?")
    await expect(asked.locator(".bubble:not(.me)")).to_have_count(1)

    # It is cancelled, cleaned up, deleted.
    await page.goto(f"/runs/{name}")
    await page.click("text=Cancel")
    await expect(page.locator("[data-live=head]")).to_contain_text("cancelled")
    await page.reload()
    await page.click("text=Clean up or delete")
    await page.click("text=End what is left")
    await expect(page.locator(".done")).to_contain_text("Cleaned up")
    await wait_until((services.runs / name / "manifest.json").exists, within=30)
    await page.click("text=Clean up or delete")
    await page.fill("#sure", name)
    await page.click("text='Delete'")
    await expect(page.locator(".done")).to_have_text(f"Deleted {name}.")
    assert not (services.runs / name).exists()
    assert complaints == []
    gone = await page.goto(f"/runs/{name}")
    assert gone is not None
    assert gone.status == 404
    await expect(page.locator(".warn")).to_contain_text("no run named")


async def test_wrong_tokens_and_the_keyboard(manager: Manager, browser: Browser) -> None:
    page = await browser.new_page(base_url=await manager.address())
    await page.goto("/runs")
    assert page.url.endswith("/login?next=/runs")
    await page.keyboard.type("guess")  # the field has the focus
    await page.keyboard.press("Enter")
    await expect(page.locator("[role=alert]")).to_have_text("This token is wrong.")
    await page.keyboard.type(TOKEN)
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_have_text("Runs")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")  # to the content, past the links above it
    assert page.url.endswith("#main")


@pytest.fixture
async def evil_run(services: Services, bus: NatsBus, endpoint: Endpoint) -> str:
    """A chat whose persons, model and messages are all markup."""
    endpoint.respond = lambda _: answer(EVIL)
    people = unique("evil")
    rows = [{"job": EVIL, "text": f"I am {EVIL}"} for _ in range(5)]
    store_people(people, rows, settings=services.settings())
    fields: dict[str, Any] = {
        "name": EVIL,
        "scenario": "scenario:ChatRoomScenario",
        "folder": str(ROOT / "examples" / "chat_room"),
        "run": unique("evil"),
        "rounds": 3,
        "agents": {"count": 5, "personas": people},
        "models": {
            "default": {"backend": "openai", "base_url": endpoint.url, "model": unique("m")}
        },
        "params": {"topic": EVIL},
        "record_events": True,
        "record_messages": True,
    }
    text = (ROOT / "examples" / "chat_room" / "scenario.yaml").read_text()
    found = re.search(r"^scenario: (\S+)", text, re.MULTILINE)
    assert found is not None
    fields["scenario"] = found[1]
    run = await submit(bus, services.settings(), ScenarioSpec.model_validate(fields))
    outcome = await watch(bus, services, run)
    assert (outcome.state, outcome.reason) == ("finished", "")
    return run


@pytest.mark.parametrize("width", list(WIDTHS))
async def test_every_page(
    manager: Manager,
    browser: Browser,
    services: Services,
    bus: NatsBus,
    evil_run: str,
    width: str,
    tmp_path: Path,
) -> None:
    """Nothing that was said is markup, nothing is wider than the screen, nothing complains."""
    page, complaints = await open_page(browser, await manager.address(), width=width)
    info = await find_run(bus, services.settings(), evil_run)
    assert isinstance(info, RunInfo)
    other = (await play(services, game())).run
    spec_people = next(p.stem for p in services.personas.glob("evil*.parquet"))
    paths = [
        "/",
        "/runs",
        f"/runs/{evil_run}",
        f"/runs/{evil_run}?by=job",
        f"/runs/{evil_run}/agents",
        f"/runs/{evil_run}/agents?column=answer&op=contains&value=script",
        f"/runs/{evil_run}/agents/guest/3",
        f"/runs/{evil_run}/environments",
        f"/runs/{evil_run}/environments/lounge",
        f"/compare?first={evil_run}&second={other}",
        "/start",
        "/start/examples/guess_average/scenario.yaml",
        "/hosts",
        f"/hosts/{services.settings().host}/agents",
        "/models",
        "/people",
        f"/people/{spec_people}",
        "/people/template:age",
    ]
    for number, path in enumerate(paths):
        got = await page.goto(path)
        assert got is not None
        assert got.status == 200, path
        charts = page.locator(".chart:not([hidden])")
        for i in range(await charts.count()):
            await expect(charts.nth(i)).to_have_attribute("data-drawn", re.compile("[1-9]"))
        if path.endswith("guest/3"):
            await page.click("[data-load] > button")
            await expect(page.locator(".bubble").last).to_contain_text("<script>")
        await page.screenshot(path=tmp_path / f"{width}-{number}.png", full_page=True)
        assert await page.evaluate("window.evil === undefined"), path
        wide = await page.evaluate("document.documentElement.scrollWidth")
        assert wide <= WIDTHS[width][0], (path, wide)
        assert complaints == [], path
    said = await page.goto(f"/runs/{evil_run}/report")
    assert said is not None
    assert said.status == 200
    assert "sandbox" in said.headers["content-security-policy"]


async def test_the_broker_goes_away_and_comes_back(
    tmp_path: Path, own_broker: Any, browser: Browser
) -> None:
    broker = own_broker()
    host = start_service("agent_host", broker, tmp_path / "host.log", POPULACE_HOST_NAME="h1")
    made = Manager(broker, tmp_path)
    try:
        page, _ = await open_page(browser, await made.address())
        hosts = page.locator("[data-live=tiles] div", has_text="Hosts")
        await expect(hosts.locator("dd")).to_have_text("1", timeout=SOON)
        broker.process.kill()
        await asyncio.to_thread(broker.process.wait)
        await expect(page.locator("#broker")).to_have_text("broker away", timeout=SOON)
        await expect(page.locator("[data-live=away]")).to_contain_text("does not answer")
        for path in ("/", "/hosts", "/runs", "/hosts/h1/agents"):  # each answers, and says so
            got = await page.goto(path)
            assert got is not None
            assert got.status == 200, path
        got = await page.goto("/people")
        assert got is not None
        assert got.status == 503
        await expect(page.locator(".warn")).to_contain_text("does not answer")
        own_broker(int(broker.url.rpartition(":")[2]))
        await page.goto("/")
        await expect(page.locator("#broker")).to_have_text("broker up", timeout=SOON)
        await expect(hosts.locator("dd")).to_have_text("1", timeout=SOON)
        # A host that dies is shown as gone, and its page still says what it was.
        host.kill()
        await asyncio.to_thread(host.wait)
        await expect(hosts).to_contain_text("1 gone", timeout=SOON)
        await page.goto("/hosts/h1/agents")
        await expect(page.locator("[data-live=facts]")).to_contain_text("gone")
    finally:
        made.stop()
        host.kill()
        host.wait(10)
