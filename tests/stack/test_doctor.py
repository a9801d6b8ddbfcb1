"""The doctor: what it finds in installations with something wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from populace.cli.show import show_findings
from populace.stack.broker import find_server, wait_for_broker
from populace.stack.doctor import Finding, examine
from populace.stack.stack import SERVICES
from shared.bus import StreamSpec
from shared.bus.nats import NatsBus
from shared.settings import Settings
from tests.conftest import Broker, Services


def bad(findings: list[Finding]) -> dict[str, str]:
    return {f.about: f.said for f in findings if f.level == "bad"}


async def test_nothing_is_wrong(services: Services) -> None:
    found = await examine(services.settings())
    assert not bad(found)
    assert {f.about for f in found if f.said.endswith(" up")} == set(SERVICES)
    (broker,) = [f for f in found if f.about == "broker"]
    assert services.broker.url.rpartition("/")[2] in broker.said


async def test_copies_folders_and_prices(services: Services, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = services.settings(replicas=3).model_copy(
        update={"runs_dir": tmp_path / "file" / "runs", "prices": tmp_path / "none.yaml"}
    )
    found = bad(await examine(settings))
    assert set(found) == {"copies", "results", "prices"}
    assert "has 1 copies, not 3" in found["copies"]
    assert "can't be written" in found["results"]


async def test_a_stream_that_is_nearly_full_and_no_services(
    own_broker: Callable[..., Broker],
) -> None:
    broker = own_broker()
    settings = broker.settings()
    bus = await NatsBus.connect(settings, broker.url)
    name = settings.subjects.stream_states
    await bus.ensure_stream(StreamSpec(name, ("x.>",), keep=True, max_bytes=10_000))
    await bus.append("x.y", b"x" * 9_000)
    await bus.drain()
    found = await examine(settings)
    (full,) = [f for f in found if f.about == "stream"]
    assert f"{name} is 9" in full.said
    assert full.said.endswith("full; then it refuses more, and runs pause")
    assert set(bad(found)) == set(SERVICES)
    assert [f.mend for f in found if f.about == "recorder"] == ["start services.recorder"]


async def test_a_broker_without_jetstream(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [str(find_server()), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(tmp_path)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        url = wait_for_broker(process, tmp_path, log)
        found = await examine(Settings(nats_url=url, home=tmp_path))
        assert "has no JetStream" in bad(found)["broker"]
    finally:
        process.kill()
        process.wait(10)
    gone = await examine(Settings(nats_url=url, home=tmp_path, connect_timeout=0.5))
    assert "no NATS broker could be reached" in bad(gone)["broker"]
    show_findings(gone)


async def test_before_anything_is_started(tmp_path: Path) -> None:
    found = await examine(Settings(home=tmp_path / "new"))
    assert not bad(found)
    assert [f.mend for f in found if f.about == "services"] == ["populace up"]
