"""What a broker says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext, api


@dataclass(frozen=True)
class StreamFacts:
    """A stream or bucket, and how much it holds."""

    name: str
    bytes: int
    max_bytes: int
    """Bytes that it may hold; -1: as many as come."""
    replicas: int
    refuses: bool
    """Whether it refuses more once it is full, rather than to drop the oldest."""


@dataclass
class BrokerFacts:
    """A broker as seen over one connection."""

    url: str
    version: str
    max_payload: int
    jetstream: bool = True
    problem: str = ""
    """Why there is no JetStream."""
    streams: list[StreamFacts] = field(default_factory=list)

    @property
    def release(self) -> tuple[int, int]:
        """The first two parts of its version."""
        parts = self.version.split(".")
        return int(parts[0]), int(parts[1])


async def broker_facts(client: Any, js: JetStreamContext) -> BrokerFacts:
    """Ask the broker; changes nothing.

    Args:
        client: a connected client of nats-py.
        js: its JetStream.
    """
    version = client.connected_server_version
    facts = BrokerFacts(
        url=client.connected_url.netloc.rpartition("@")[2],  # without user and password
        version=f"{version.major}.{version.minor}.{version.patch}",
        max_payload=int(client.max_payload),
    )
    try:
        await js.account_info()
        while True:
            page = await js.streams_info(offset=len(facts.streams))
            facts.streams += map(_stream, page)
            if not page:
                return facts
    except (TimeoutError, nats.errors.Error) as error:
        facts.jetstream, facts.problem = False, str(error) or type(error).__name__
        return facts


def _stream(info: api.StreamInfo) -> StreamFacts:
    config, state = info.config, info.state
    return StreamFacts(
        name=config.name or "",
        bytes=state.bytes,
        max_bytes=config.max_bytes or -1,
        replicas=config.num_replicas or 1,
        refuses=config.discard == api.DiscardPolicy.NEW,
    )
