"""Writing people: the paper's education population by a real model, and a thousand by a script.

python -m benchmarks.writing [--people N] [--scripted N] [--json]

Starts the services, has N people (20) of the template "education" written by the embedded model,
checks each text against its row once more, and shows failures as what they are. Then N people
(1,000) by the scripted model, which costs nothing, so that the figure is that of the pipeline:
queue, checks, near-duplicates, storing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.harness import machine
from populace.personas.jobs import write_people
from populace.personas.writing.checks import contradictions, flaw
from populace.stack import stack
from shared.bus import NatsBus
from shared.messages.persona import EnrichRequest, JobInfo
from shared.messages.scenario import ModelSpec, ScriptSpec
from shared.settings import Settings

SCRIPT = ModelSpec(backend="scripted", script=ScriptSpec(text="You {words}. And {words}."))


async def write(settings: Settings, url: str, request: EnrichRequest) -> tuple[JobInfo, float]:
    """Have people written; gives what became of it, and seconds."""
    bus = await NatsBus.connect(settings, url)
    began = time.monotonic()
    try:
        told = [info async for info in write_people(bus, settings, request)]
    finally:
        await bus.drain()
    return told[-1], time.monotonic() - began


def look(info: JobInfo) -> dict[str, Any]:
    """Check what was stored against its rows."""
    rows = pq.read_table(info.file).to_pylist()
    wrong = 0
    for row in rows:
        text, problem = row.pop("text"), row.pop("problem")
        if text is None:
            assert problem
            continue
        background = text.partition("\n")[2]
        wrong += bool(contradictions(row, background) or flaw(background))
    return {"rows": len(rows), "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--people", type=int, default=20)
    parser.add_argument("--scripted", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        settings = Settings(
            home=place / "home", personas_dir=place / "personas", runs_dir=place / "runs"
        )
        url = stack.up(settings).nats_url
        try:
            for name, size, model in (
                ("embedded", arguments.people, ModelSpec()),
                ("scripted", arguments.scripted, SCRIPT),
            ):
                request = EnrichRequest(
                    name=name, people="education", size=size, model=model, names="en_US"
                )
                info, seconds = asyncio.run(write(settings, url, request))
                assert info.state == "finished", info
                found[name] = {
                    **info.model_dump(exclude={"name", "file", "created", "updated"}),
                    **look(info),
                    "seconds": round(seconds, 2),
                }
        finally:
            stack.down(settings)
    if arguments.json:
        print(json.dumps(found))
        return
    print(found["machine"])
    for name in ("embedded", "scripted"):
        one = found[name]
        print(
            f"{name}: {one['written']} of {one['to_write']} written in {one['seconds']} s, "
            f"{one['failed']} failed, {one['requests']} requests, {one['rewritten']} versions "
            f"thrown away, {one['anew']} anew for being alike, {one['alike']} still alike, "
            f"{one['wrong']} stored texts that contradict their rows"
        )
        for example in one["examples"]:
            print("  failed:", example[:200])


if __name__ == "__main__":
    main()
