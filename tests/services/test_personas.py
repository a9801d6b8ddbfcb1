"""Personas in runs: drawn where they are needed, known to their agents, in the results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import populace
from populace import InvalidInputError
from populace.cli.groups import grouped
from populace.personas.people import find_people, load_people
from populace.personas.sampling import Sampler, save
from populace.personas.spec import TEMPLATES, PopulationFile
from populace.world import open_world
from tests.conftest import Services, unique
from tests.services.games import Resident, Town
from tests.services.test_runs import game, play


def town(**more: Any) -> dict[str, Any]:
    agents = {"count": 500, "personas": "education", **more}
    return game(scenario="games:Town", agents=agents, params={}, rounds=2)


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_run_with_personas(services: Services, workers: int) -> None:
    outcome = await play(services, town(workers=workers))
    assert (outcome.state, outcome.reason) == ("finished", "")
    path = services.runs / outcome.run / "answers.parquet"
    table = pq.read_table(path)
    expected = Sampler(PopulationFile(TEMPLATES / "education.yaml", {"size": 500})).rows()
    rows = table.to_pylist()
    assert [(r["education"], r["gender"], r["age"]) for r in rows[:500]] == [
        (p["education"], p["gender"], p["age"]) for p in expected.to_pylist()
    ]
    assert all(r["value"] == r["age"] for r in rows)
    assert outcome.rows[0].values["mean"] == pytest.approx(sum(r["age"] for r in rows[:500]) / 500)
    # One line of pandas, or one of the command line:
    groups = grouped(path, "education")
    assert [g["answers"] for g in groups] == [100] * 10
    by_hand = Counter[str]()
    for row in rows[:500]:
        by_hand[row["education"]] += row["age"]
    assert all(g["mean"] == pytest.approx(by_hand[g["education"]] / 100) for g in groups[:5])
    with pytest.raises(InvalidInputError, match="no column 'party'"):
        grouped(path, "party")


async def test_personas_that_cannot_be_had(services: Services) -> None:
    for name, reason in (
        ("nobody", "there are no people named 'nobody'"),
        ("/etc/hostname", "outside the folders that these services read"),
    ):
        outcome = await play(services, town(personas=name))
        assert outcome.state == "failed"
        assert reason in outcome.reason


async def test_personas_are_part_of_prompts(tmp_path: Path) -> None:
    people = tmp_path / "people.parquet"
    pq.write_table(pa.table({"age": [30, 40], "text": ["You are Ann.", "You are Bob."]}), people)
    spec = populace.ModelSpec(backend="scripted")
    asked: list[Any] = []
    async with populace.local(models={"default": spec}) as world:
        models = world._local[0].models
        original = models.request

        async def request(model: str, request: Any) -> Any:
            asked.append(request.messages)
            return await original(model, request)

        models.request = request  # type: ignore[method-assign]
        residents = await world.population(Resident, count=2, personas=people)
        await residents.say()
        with pytest.raises(InvalidInputError, match="holds 2 people, fewer than the 3 agents"):
            await world.population(Resident, count=3, name="more", personas=people)
        alone = await world.population(Resident, count=1, name="alone")
        await alone[0].say()
    assert [m[0]["content"] for m in asked] == [
        "Answer in one word.\n\nYou are Ann.",
        "Answer in one word.\n\nYou are Bob.",
        "Answer in one word.",
    ]


class Frame:
    """Rows as pandas and polars give them away: and neither says whether it is true."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._table = pa.Table.from_pylist(rows)

    def __bool__(self) -> bool:
        raise ValueError("the truth value of a frame is ambiguous")

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


async def test_people_that_a_scenario_has_at_hand() -> None:
    rows = Frame([{"age": 30 + i, "education": "none"} for i in range(3)])
    async with populace.local() as world:
        scenario = populace.Scenario(
            world, params=Town.Params(), seed=1, rounds=1, agents=3, personas="nobody-stored-them"
        )
        told = await (await scenario.population(Resident, personas=rows)).who()
        assert [t["number"] for t in told] == [30.0, 31.0, 32.0]
        nobody = await scenario.population(Resident, name="nobody", personas="")
        with pytest.raises(InvalidInputError, match="no personas"):
            nobody.where("age > 1")
        with pytest.raises(InvalidInputError, match="there are no people named"):
            await scenario.population(Resident, name="file")


@pytest.mark.parametrize("kind", ["list", "arrow"])
async def test_people_from_a_program(services: Services, kind: str) -> None:
    rows = [{"age": 30 + i, "education": "none"} for i in range(7)]
    people = rows if kind == "list" else pa.Table.from_pylist(rows)
    async with open_world(
        services.settings(), services.broker.url, run=unique("w"), seed=5, workers=2
    ) as world:
        residents = await world.population(Resident, count=7, personas=people)
        told = await residents.who()
        assert [t["number"] for t in told] == [30.0 + i for i in range(7)]
        old = residents.where("age >= 34 and education == 'none'")
        assert list(old.numbers) == [4, 5, 6]
        assert [t["number"] for t in await old.who()] == [34.0, 35.0, 36.0]
        assert list(old.where("age == 35").numbers) == [5]
        for condition, said in (
            ("age > 99", "of nobody in"),
            ("income > 1", "is no attribute"),
            ("age +", "can't be read"),
            ("age + 1", "neither true nor false"),
            ("age < 'x'", "can't be evaluated"),
        ):
            with pytest.raises(InvalidInputError, match=said):
                residents.where(condition)
        strangers = await world.population(Resident, count=2, name="strangers")
        with pytest.raises(InvalidInputError, match="no personas"):
            strangers.where("age > 1")
        with pytest.raises(InvalidInputError, match="come as a DataFrame"):
            await world.population(Resident, count=7, name="more", personas=7)


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_rows_from_elsewhere(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"people.{ending}"
    save(pa.table({"age": [30, 40], "job": ["a", "b"]}), path)
    people = load_people(str(path), [tmp_path], 2, 1, 2)
    assert people.columns([0]) == {"age": [40], "job": ["b"]}
    path.write_bytes(b"\x00")
    with pytest.raises(InvalidInputError, match=r"can't be read|fewer than"):
        load_people(str(path), [tmp_path], 2, 0, 2)
    with pytest.raises(InvalidInputError, match="the ending must be one of"):
        load_people(str(tmp_path / "people.xlsx"), [tmp_path], 1, 0, 1)


def test_a_person(tmp_path: Path) -> None:
    people = load_people("template:education", [], 1000, 10, 12)
    from populace.personas.people import Persona

    one = Persona(people, 1)
    assert list(one) == ["education", "gender", "age"]
    assert one.age == one["age"]
    assert one.text.startswith("You are a person with these attributes: education: ")
    with pytest.raises(AttributeError, match=r"no 'party' \(it has: education, gender, age\)"):
        _ = one.party
    assert find_people("education", tmp_path, tmp_path) == "template:education"
    stored = tmp_path / f"{unique()}.parquet"
    pq.write_table(pa.table({"a": [1]}), stored)
    assert find_people(stored.stem, None, tmp_path) == str(stored)
