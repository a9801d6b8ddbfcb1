"""Scenario files: what is wrong is said with file, line and key."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from populace.errors import ScenarioError
from populace.scenario_file import load_class, overrides_from, read_scenario
from shared.code import CodeLoader

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
name: a game
scenario: toy:Toy
rounds: 3
agents:
  count: 10_000
  workers: 3
models:
  default: {backend: scripted}
params:
  size: 2
"""
TOY = """
from populace import Scenario
from pydantic import BaseModel, ConfigDict

class Params(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 1

class Toy(Scenario):
    Params = Params

    async def round(self, n):
        pass

class NoRound(Scenario):
    pass

class PlainRound(Scenario):
    def round(self, n):
        pass

class NotOne:
    pass
"""


def write(folder: Path, text: str, module: str = "toy") -> Path:
    (folder / f"{module}.py").write_text(TOY)
    file = folder / "scenario.yaml"
    file.write_text(textwrap.dedent(text))
    return file


def test_a_good_file(tmp_path: Path) -> None:
    file = read_scenario(write(tmp_path, GOOD))
    assert file.spec.agents.count == 10_000
    assert file.spec.folder == str(tmp_path)
    assert file.where(("params", "size")).endswith("scenario.yaml:11")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            ("rounds: 3", "round: 3"),
            "scenario.yaml:4: round: is not a key that is known here; did you mean 'rounds'?",
        ),
        (("rounds: 3", "rounds: many"), "scenario.yaml:4: rounds: "),
        (("rounds: 3", "rounds: 0"), "scenario.yaml:4: rounds: Input should be greater"),
        (("rounds: 3", "rounds: true"), "scenario.yaml:4: rounds: must be a whole number"),
        (
            ("  count: 10_000", "  size: 5"),
            "scenario.yaml:6: agents.size: is not a key that is known here (there are: count, ",
        ),
        (("backend: scripted", "backend: magic"), "scenario.yaml:9: models.default.backend: "),
        (("default: {", "other: {"), "scenario.yaml:8: models: must have an entry named 'default'"),
        (("backend: scripted", "backend: openai"), "needs base_url and model"),
        (
            ("backend: scripted", "backend: openai, model: m, base_url: 'ftp://x'"),
            "models.default.base_url: must be an http",
        ),
        (
            ("backend: scripted", "backend: openai, model: m, base_url: 'http://a:b@x'"),
            "must not hold a password",
        ),
        (("name: a game", ""), "scenario.yaml:1: name: is missing"),
        (("name: a game", "name: [1"), "is not valid YAML"),
        (("rounds: 3", "rounds: 3\nrounds: 4"), "scenario.yaml:5: is not valid YAML: the key"),
        (("rounds: 3", "run: x"), "run: is set by whoever publishes"),
    ],
)
def test_bad_files(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        read_scenario(write(tmp_path, GOOD.replace(*change)))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


def test_missing_and_odd_files(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="no such file"):
        read_scenario(tmp_path / "none.yaml")
    with pytest.raises(ScenarioError, match="can't be read"):
        read_scenario(tmp_path)
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(ScenarioError, match="a scenario is a mapping"):
        read_scenario(tmp_path / "list.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="can't be read"):
        read_scenario(tmp_path / "binary.yaml")


def test_overrides(tmp_path: Path) -> None:
    pairs = overrides_from(["params.size=7", "models.default.temperature=0.5", "name=x y"])
    spec = read_scenario(write(tmp_path, GOOD), {**pairs, "agents.count": 3}).spec
    assert spec.params == {"size": 7}
    assert spec.models["default"].temperature == 0.5
    assert (spec.name, spec.agents.count) == ("x y", 3)
    with pytest.raises(ScenarioError, match="key=value"):
        overrides_from(["nothing"])


def test_the_class_and_its_parameters(tmp_path: Path) -> None:
    file = read_scenario(write(tmp_path, GOOD.replace("toy:", "toy1:"), "toy1"))
    cls, params = load_class(file.spec, CodeLoader((), [tmp_path]), file)
    assert cls.__name__ == "Toy"
    assert params.model_dump() == {"size": 2}


@pytest.mark.parametrize(
    ("module", "change", "complaint"),
    [
        ("toy2", ("toy:Toy", "nowhere:Toy"), "scenario.yaml:3: scenario: 'nowhere:Toy' can't be"),
        ("toy3", ("toy:Toy", "toy3:Missing"), "has no 'Missing'"),
        ("toy4", ("toy:Toy", "toy4:NotOne"), "is not a subclass of Scenario"),
        ("toy9", ("toy:Toy", "toy9:NoRound"), "needs a method  async def round(self, n)"),
        ("toy10", ("toy:Toy", "toy10:PlainRound"), "needs a method  async def round(self, n)"),
        ("toy5", ("toy:Toy", "toy5"), "is not an import path"),
        ("toy6", ("toy:Toy", "os:system"), "may not be loaded"),
        ("toy7", ("size: 2", "size: big"), "params.size: "),
        (
            "toy8",
            ("size: 2", "height: 2"),
            "scenario.yaml:11: params.height: is not a key that is known here (there are: size)",
        ),
    ],
)
def test_bad_classes(tmp_path: Path, module: str, change: tuple[str, str], complaint: str) -> None:
    text = GOOD.replace(*change).replace("toy:Toy", f"{module}:Toy")
    file = read_scenario(write(tmp_path, text, module))
    with pytest.raises(ScenarioError) as caught:
        load_class(file.spec, CodeLoader(("populace",), [tmp_path]), file)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_that_breaks(tmp_path: Path) -> None:
    file = read_scenario(write(tmp_path, GOOD.replace("toy:Toy", "broken:Toy")))
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ScenarioError, match=r"importing 'broken' .* raised ZeroDivisionError"):
        load_class(file.spec, CodeLoader((), [tmp_path]), file)


def test_a_folder_outside_the_roots(tmp_path: Path) -> None:
    file = read_scenario(write(tmp_path, GOOD))
    with pytest.raises(ScenarioError, match="outside the folders"):
        load_class(file.spec, CodeLoader((), [tmp_path / "elsewhere"]), file)


@pytest.mark.parametrize("name", ["shared", "services"])
def test_a_module_named_like_one_of_ours(tmp_path: Path, name: str) -> None:
    file = read_scenario(write(tmp_path, GOOD.replace("toy:Toy", f"{name}:Toy"), name))
    with pytest.raises(ScenarioError, match="name of a package of Populace itself"):
        load_class(file.spec, CodeLoader((), [tmp_path]), file)
