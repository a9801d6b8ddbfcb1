"""What makes a host an agent host."""

from __future__ import annotations

from populace.workers.host import Host, Kind
from shared.service import ServiceContext


async def main(context: ServiceContext) -> None:
    """The host service."""
    settings = context.settings
    kind = Kind(
        service="agent_host",
        description="Starts worker processes, which hold agents",
        name=settings.host,
        bucket=settings.subjects.bucket_hosts,
        per_run=settings.workers or settings.cores,
    )
    await Host(context, kind).run()
