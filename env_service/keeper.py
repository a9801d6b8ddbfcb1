"""What makes a host a keeper of environments."""

from __future__ import annotations

from populace.workers.host import Host, Kind
from shared.ids import new_id
from shared.service import ServiceContext


async def main(context: ServiceContext) -> None:
    """The environment service; several may run, on one machine or on many."""
    settings = context.settings
    kind = Kind(
        service="env_service",
        description="Starts worker processes, which hold environments",
        name=new_id(f"env-{settings.host[:40]}"),
        bucket=settings.subjects.bucket_keepers,
        per_run=1,
    )
    await Host(context, kind).run()
