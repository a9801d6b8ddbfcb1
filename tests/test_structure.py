"""The house: imports run one way, and contracts are spelled in one place."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "shared": set(),
    "populace": {"shared"},
    "agent_host": {"populace", "shared"},
    "env_service": {"populace", "shared"},
    "persona_service": {"populace", "shared"},
    "services/director": {"populace", "shared"},
    "services/manager": {"populace", "shared"},
    "services/models": {"populace", "shared"},
    "services/recorder": {"populace", "shared"},
}
OURS = {"shared", "populace", "agent_host", "env_service", "persona_service", "services"}


def files_of(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported_by(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_run_one_way(room: str) -> None:
    own = room.replace("/", ".")
    files = files_of(room)
    assert files
    for file in files:
        for name in imported_by(file):
            top = name.partition(".")[0]
            if top not in OURS or name == own or name.startswith(own + "."):
                continue
            assert top in MAY_IMPORT[room], f"{file.relative_to(ROOT)} imports {name}"


def test_every_package_of_ours_is_checked() -> None:
    rooms = {room.partition("/")[0] for room in MAY_IMPORT}
    assert rooms == OURS
    services = {f"services/{p.name}" for p in (ROOT / "services").iterdir() if p.is_dir()}
    services.discard("services/__pycache__")
    assert services == {room for room in MAY_IMPORT if room.startswith("services/")}


def test_subjects_are_spelled_in_one_place() -> None:
    """No string outside shared/subjects.py may look like a subject of ours."""
    looks_like = re.compile(
        r"(\brun|\bhost|\bworker|\binbox|\bmodel|\bscenario|\benv)\.(\{|\*|submit|event|call)"
    )
    for room in ("shared", "populace", "agent_host", "services"):
        for file in files_of(room):
            if file.name == "subjects.py":
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    text = ast.unparse(node)
                    assert not looks_like.search(text), f"{file.relative_to(ROOT)}: {text}"


def test_every_module_says_what_lives_there() -> None:
    for room in MAY_IMPORT:
        for file in files_of(room):
            assert ast.get_docstring(ast.parse(file.read_text())), file


def test_public_names_of_populace_are_these() -> None:
    import populace

    assert sorted(populace.__all__) == sorted(set(populace.__all__))
    for name in populace.__all__:
        assert hasattr(populace, name)
    assert "pickle" not in sys.modules or not any(
        "import pickle" in file.read_text() for room in MAY_IMPORT for file in files_of(room)
    )
