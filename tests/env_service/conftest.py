"""What tests of environments share."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.bus import NatsBus
from tests.conftest import Services, start_service


@pytest.fixture
async def another(services: Services, tmp_path: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """One environment service more, which a test may kill."""
    settings = services.settings()
    bus = await NatsBus.connect(settings, services.broker.url)
    bucket = await bus.bucket(settings.subjects.bucket_keepers)
    # By name: one that another test has killed stays listed for a moment.
    before = {entry.key for entry in await bucket.entries()}
    process = start_service("env_service", services.broker, tmp_path / "env.log")
    try:
        async with asyncio.timeout(30):
            while {entry.key for entry in await bucket.entries()} <= before:
                await asyncio.sleep(0.05)
        await bus.drain()
        yield process
    finally:
        process.terminate()
        process.wait(20)
