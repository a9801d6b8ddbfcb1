"""Play a scenario and print every answer, with nothing but a NATS client.

python examples/bare_client/client.py examples/guess_average/dummy.yaml [AGENTS]
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import nats
import yaml


async def main(scenario: dict) -> None:
    nc = await nats.connect(os.environ.get("POPULACE_NATS_URL", "nats://127.0.0.1:4222"))
    events = await nc.subscribe("populace.run.>")
    reply = await nc.request("populace.scenario.submit", json.dumps(scenario).encode(), timeout=10)
    run = json.loads(reply.data).get("run") or sys.exit(reply.data.decode())
    async for event in events.messages:
        if f"{run}.results." not in event.subject and f"{run}.status" not in event.subject:
            continue
        content = json.loads(event.data)
        if "values" in content:
            for agent, answer in zip(content["agents"], content["values"], strict=True):
                print(json.dumps({"round": content["round"], "agent": agent, "answer": answer}))
        elif content.get("kind") == "ended":
            break
    await nc.close()
    if content["state"] != "finished":
        sys.exit(f"the run {content['state']}: {content.get('reason')}")


file = Path(sys.argv[1])
scenario = {**yaml.safe_load(file.read_text()), "folder": str(file.resolve().parent)}
scenario["agents"] = {"count": int(sys.argv[2]) if len(sys.argv) > 2 else 100}
asyncio.run(main(scenario))
