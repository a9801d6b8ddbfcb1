"""The document of the public subjects: it is as the code says, and what is sent is as it says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from populace.asyncapi import document, text
from shared.bus import Message, NatsBus
from tests.conftest import ROOT, Services, unique
from tests.services.test_runs import game, play


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_file_is_as_the_code_says() -> None:
    said = "run: python -m populace.asyncapi > docs/asyncapi.yaml"
    assert (ROOT / "docs/asyncapi.yaml").read_text() == text(), said


def test_all_that_is_referred_to_is_there() -> None:
    made = yaml.safe_load(text())
    for reference in references(made):
        place = made
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    for channel in made["channels"].values():
        address = channel["address"] or ""
        assert set(channel.get("parameters", {})) == {
            part.partition("}")[0] for part in address.split("{")[1:]
        }


def test_every_public_subject_is_in_it() -> None:
    """Those of the table of public subjects in docs/subjects.md."""
    public = (ROOT / "docs/subjects.md").read_text().split("## Inside")[0]
    rows = [line.split("`")[1] for line in public.splitlines() if line.startswith("| `")]
    named = {row.replace("<", "{").replace(">", "}") for row in rows}
    made = {c["address"] for c in document()["channels"].values() if c["address"]}
    renamed = {"env.{run}.event.{name}.{path}": "env.{run}.event.{event}.{path}"}
    left_out = {"run.{run}.messages.{round}"}  # msgpack alone, for the recorder
    assert {f"populace.{renamed.get(n, n)}" for n in named - left_out} == made


async def test_what_is_sent_fits(services: Services) -> None:
    bus = await NatsBus.connect(services.settings(), services.broker.url)
    subjects, run = services.settings().subjects, unique("r")
    checks = {
        kind: Draft202012Validator({**document(), "$ref": f"#/components/schemas/{kind}"})
        for kind in ("Status", "Records", "Event", "ScenarioSpec")
    }
    seen: Counter[str] = Counter()
    wrong: list[str] = []

    def taker(kind: str) -> Any:
        def take(message: Message) -> None:
            seen[kind] += 1
            wrong.extend(e.message for e in checks[kind].iter_errors(json.loads(message.data)))

        return take

    await bus.subscribe(subjects.run_status(run), taker("Status"))
    await bus.subscribe(subjects.run_results(run), taker("Records"))
    await bus.subscribe(subjects.env_event(run, "*", ">"), taker("Event"))
    fields = game(scenario="games:Bell", agents={"count": 5}, rounds=3)
    fields |= {"run": run, "results_format": "json"}
    checks["ScenarioSpec"].validate(fields)
    with pytest.raises(ValidationError, match="Additional properties"):
        checks["ScenarioSpec"].validate({**fields, "unknown": 1})
    outcome = await play(services, fields)
    assert outcome.state == "finished", outcome.reason
    assert not wrong
    assert seen["Event"] == 15
    assert seen["Records"] >= 3
    assert seen["Status"] >= 8
    await bus.drain()
