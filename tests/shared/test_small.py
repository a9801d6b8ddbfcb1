"""Settings, subjects, names, and loading of code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shared.code import CodeLoader, import_path
from shared.errors import CodeError, InvalidInputError
from shared.ids import check_token, new_id, new_run_id
from shared.settings import Settings, load_settings
from shared.subjects import Subjects


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPULACE_WORKERS", "3")
    monkeypatch.setenv("POPULACE_NATS_PASSWORD", "hush")
    monkeypatch.setenv("POPULACE_CODE_PREFIXES", "a, b.c")
    settings = load_settings()
    assert settings.workers == 3
    assert settings.prefixes == ("a", "b.c")
    assert "hush" not in repr(settings)
    assert settings.cores >= 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORKERS", "many"), ("LOG_LEVEL", "loud"), ("PREFIX", "a.b"), ("CALL_TIMEOUT", "0")],
)
def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"POPULACE_{name}", value)
    with pytest.raises(InvalidInputError, match=f"POPULACE_{name}.*{value}"):
        load_settings()


def test_the_host_name_is_a_token() -> None:
    assert Settings(host_name="büro 1.local").host == "b-ro-1-local"


def test_every_subject_stands_below_the_prefix() -> None:
    subjects = Subjects("x")
    assert subjects.run_call("r", "s") == "x.run.r.call.s"
    assert subjects.scenario_submit == "x.scenario.submit"
    assert subjects.run_results("r") == "x.run.r.results.*"
    with pytest.raises(InvalidInputError):
        Subjects("a.b")


def test_names() -> None:
    assert check_token(new_id("w"), "x")
    assert check_token(new_run_id(), "x")
    assert len({new_id("w") for _ in range(1000)}) == 1000
    for bad in ("", "a.b", "a b", "*", "a" * 65, "ü"):
        with pytest.raises(InvalidInputError, match="the thing"):
            check_token(bad, "the thing")


def test_import_paths() -> None:
    path, root = import_path(CodeLoader)
    assert path == "shared.code:CodeLoader"
    assert root == Path(__file__).resolve().parents[2]

    class Local:
        pass

    with pytest.raises(CodeError, match="inside a function"):
        import_path(Local)


def test_a_folder_must_lie_below_a_root(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    loader = CodeLoader((), [tmp_path / "in"])
    with pytest.raises(CodeError, match="outside the folders"):
        loader.add_folder(tmp_path)
    with pytest.raises(CodeError, match="does not exist"):
        loader.add_folder(tmp_path / "in" / "none")
    with pytest.raises(CodeError, match="outside the folders"):
        loader.add_folder(tmp_path / "in" / "..")


def test_only_the_folder_and_the_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_ok.py").write_text("class A:\n    class B:\n        pass\n")
    (tmp_path / "deep_pkg" / "inner").mkdir(parents=True)
    (tmp_path / "deep_pkg" / "__init__.py").write_text("")
    (tmp_path / "deep_pkg" / "inner" / "__init__.py").write_text("class C: pass\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader = CodeLoader(("json",), [tmp_path])
    loader.add_folder(tmp_path)
    assert loader.load("mine_ok:A.B").__name__ == "B"
    assert loader.load("deep_pkg.inner:C").__name__ == "C"
    assert loader.load("json:JSONDecoder").__name__ == "JSONDecoder"
    for path in ("os:system", "subprocess:Popen", "jsonschema:validate", "builtins:eval"):
        with pytest.raises(CodeError, match="may not be loaded"):
            loader.load(path)
    for path in ("", "x", ":", "a:", "a:b c", "a:b-c"):
        with pytest.raises(CodeError):
            loader.load(path)
    with pytest.raises(CodeError, match="not a subclass of int"):
        loader.load("mine_ok:A", int)
