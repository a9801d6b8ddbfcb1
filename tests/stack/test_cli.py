"""The command line, as processes: every user's mistake, every way to be interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from populace.cli import main
from populace.stack import processes
from tests.conftest import ROOT, Services

MATRIX = yaml.safe_load((ROOT / "examples/guess_average/experiments.yaml").read_text())["runs"]
DUMMY = str(ROOT / "examples/guess_average/dummy.yaml")
SWEEP = str(ROOT / "examples/guess_average/experiments.yaml")
SLOW = ["--set", "models.default.script.latency=0.3", "--set", "models.default.concurrency=20"]


class Shell:
    """Runs ``populace`` in a working directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith("POPULACE_")
        }
        self.environment.update(POPULACE_CODE_ROOTS=str(ROOT), COLUMNS="120")

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "populace", *arguments],
            cwd=self.folder,
            env={**self.environment, "PYTHONPATH": str(ROOT), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **more: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **more)
        out, err = process.communicate(timeout=110)
        return process.returncode, out, err

    def left(self) -> list[psutil.Process]:
        return processes.marked(str((self.folder / ".populace").resolve()))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    left = made.left()
    for process in left:
        process.kill()
    assert not left


def one_sentence(err: str) -> str:
    (line,) = err.strip().splitlines()
    assert line.startswith("populace: ")
    assert "Traceback" not in err
    return line


def test_help_and_version(shell: Shell) -> None:
    code, out, _ = shell.run("--help")
    assert code == 0
    for command in ("up", "down", "status", "check", "publish", "watch", "run", "results"):
        assert re.search(rf"\b{command}\b", out)
    assert shell.run("--version")[:2] == (0, "0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["check", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["run", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["check", DUMMY, "--set", "colour=red"], "colour: is not a key"),
        (["check", SWEEP], "runs: is for sweeps; play one by 'populace sweep "),
        (
            ["run", DUMMY, "--set", "rounds=many"],
            "dummy.yaml, as the command line changes it: rounds: ",
        ),
        (["run", DUMMY, "--set", "scenario=scenario:Nobody"], "has no 'Nobody'"),
        (["run", DUMMY, "--set", "scenario=nowhere:Nobody"], "no module named 'nowhere'"),
        (["run", DUMMY, "--set", "params.target.ratio=2/0"], "params.target.ratio: must be a"),
        (["run", DUMMY, "--agents", "0"], "agents.count: "),
        (["run", DUMMY, "--agents", "some"], "Invalid value for '--agents'"),
        (["run"], "Missing argument 'SCENARIO'"),
        (["dance"], "No such command 'dance'"),
        (["results", "none"], "no recorded run 'none'"),
        (["results", "../.."], "must be 1 to 64 characters"),
    ],
)
def test_input_that_cannot_be_used(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    # In this process: a new one would spend a second on its imports for each of these.
    monkeypatch.chdir(shell.folder)
    for name in [name for name in os.environ if name.startswith("POPULACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["populace", *arguments])
    code = main()
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert complaint in one_sentence(err)
    assert not shell.left()


def test_a_setting_that_cannot_be_used(shell: Shell) -> None:
    code, _, err = shell.run("status", POPULACE_WORKERS="lots")
    assert code == 2
    assert "POPULACE_WORKERS" in one_sentence(err)


@pytest.mark.parametrize("command", [["status"], ["up"], ["run", DUMMY], ["publish", DUMMY]])
def test_a_broker_that_is_not_there(shell: Shell, command: list[str]) -> None:
    code, _, err = shell.run(
        *command,
        POPULACE_NATS_URL="nats://user:hidden@127.0.0.1:9",
        POPULACE_CONNECT_TIMEOUT="1",
    )
    assert code == 3
    assert "no NATS broker could be reached at nats://127.0.0.1:9" in one_sentence(err)
    assert "hidden" not in err
    assert not shell.left()


def test_check(shell: Shell) -> None:
    code, out, err = shell.run("check", DUMMY)
    assert (code, err) == (0, "")
    assert "good; 10,000 agents, 2 rounds" in out
    code, out, _ = shell.run("check", DUMMY, "--agents", "5", "--json")
    assert json.loads(out)["agents"] == {"count": 5, "isolated": False}


def test_check_looks_at_the_people(shell: Shell) -> None:
    (shell.folder / "games.py").write_text(
        "from populace import Scenario\n\n\nclass Empty(Scenario):\n"
        "    async def round(self, n):\n        pass\n"
    )
    (shell.folder / "people.csv").write_text("education,age\nnone,30\nnone,40\n")
    pq.write_table(pa.table({"education": ["none"] * 3}), shell.folder / "people.parquet")
    (shell.folder / "few.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "few",
                "scenario": "games:Empty",
                "agents": {"count": 2, "personas": "people.csv"},
                "models": {
                    "default": {"backend": "scripted"},
                    "small": {"backend": "scripted"},
                    "both": {"mixture": {"by": "eduction", "choose": {"*": "small"}}},
                },
            }
        )
    )
    code, out, err = shell.run("check", "few.yaml")
    assert code == 0
    assert "good; 2 agents" in out
    assert "the mixture 'both' goes by 'eduction'" in err
    assert "did you mean 'education'; all of them ask 'small'" in err
    for people, there in (("people.csv", 2), ("people.parquet", 3)):
        code, _, err = shell.run(
            "check", "few.yaml", "--agents", "9", "--set", f"agents.personas={people}"
        )
        assert code == 2
        assert f"{people} holds {there} people, fewer than the 9 agents" in one_sentence(err)


@pytest.mark.timeout(300)  # very many processes
def test_up_twice_publish_watch_results_down(shell: Shell) -> None:
    code, out, err = shell.run("up")
    assert (code, err) == (0, "")
    assert "Populace is up" in out
    before = {p.pid for p in shell.left()}
    code, out, err = shell.run("up")
    assert code == 1
    assert "up here already" in one_sentence(err)
    assert {p.pid for p in shell.left()} >= before

    code, out, err = shell.run("status")
    assert (code, err) == (0, "")
    assert re.search(r"^director +1 up$", out, re.MULTILINE)
    status = json.loads(shell.run("status", "--json")[1])
    assert all(count == 1 for count in status["services"].values())
    assert len(status["hosts"]) == 1

    code, out, err = shell.run("publish", DUMMY, "--agents", "200", "--run", "mine")
    assert (code, out, err) == (0, "mine\n", "")
    code, out, err = shell.run("watch", "mine")
    assert code == 0
    assert "200" in out
    code, out, _ = shell.run("watch", "mine", "--json")
    assert json.loads(out)["rows"][1]["answers"] == 200
    code, out, _ = shell.run("results", "mine", "--json")
    assert json.loads(out)["manifest"]["answers"] == 400
    assert "scripted: no language model" in shell.run("results", "mine")[1]
    code, _, err = shell.run("publish", DUMMY, "--run", "mine")
    assert code == 2
    assert "there is a run named 'mine' already" in one_sentence(err)
    code, _, err = shell.run("watch", "nobody")
    assert code == 2
    assert "there is no run named 'nobody'" in one_sentence(err)
    code, _, err = shell.run("cancel", "nobody")
    assert code == 2
    assert "mine" in shell.run("runs")[1]

    noted = json.loads((shell.folder / ".populace/stack.json").read_text())
    for one in noted["processes"]:
        if one["name"] in ("broker", "recorder"):
            os.kill(one["pid"], signal.SIGKILL)
    code, out, err = shell.run("up")  # starts what has died
    assert (code, err) == (0, "")
    mended = json.loads((shell.folder / ".populace/stack.json").read_text())
    assert mended["nats_url"] == noted["nats_url"]
    pids = [{p["name"]: p["pid"] for p in record["processes"]} for record in (noted, mended)]
    assert {name for name in pids[0] if pids[0][name] != pids[1][name]} == {"broker", "recorder"}

    code, out, err = shell.run("run", DUMMY, "--agents", "50", "--json")
    assert code == 0
    assert json.loads(out)["state"] == "finished"
    assert shell.left()  # a run stops only what it started

    code, out, err = shell.run("down")
    assert (code, err) == (0, "")
    assert "stopped" in out
    assert not shell.left()
    assert shell.run("down")[1] == "nothing was running here\n"


def test_run_does_it_all_and_leaves_nothing(shell: Shell) -> None:
    code, out, err = shell.run("run", DUMMY, "--agents", "1007", "--workers", "3", "--profile")
    assert code == 0, err
    assert re.search(r"1 +1,007 +0 +1,007", out)
    assert re.search(r"workers \(3\) .*%", out)
    assert re.search(r"queue for a model .*%", out)
    assert "Traceback" not in err
    assert not shell.left()
    (folder,) = (shell.folder / "runs").iterdir()
    assert {p.name for p in folder.iterdir()} == {"answers.parquet", "manifest.json", "rounds.json"}


def test_a_run_is_played_again(shell: Shell) -> None:
    code, _, err = shell.run("run", DUMMY, "--agents", "20", "--rounds", "2")
    assert code == 0, err
    (run,) = (folder.name for folder in (shell.folder / "runs").iterdir())
    code, out, err = shell.run("replay", run)
    assert code == 0, err
    assert re.search(r"all 40 answers are the same", out)
    (again,) = (f.name for f in (shell.folder / "runs").iterdir() if f.name != run)
    code, out, err = shell.run("replay", again, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["replay_of"], told["identical"], told["rounds"]) == (again, True, 2)


@pytest.mark.slow
def test_a_taken_port_is_no_trouble(shell: Shell) -> None:
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 4222))
            taken.listen()
        except OSError:
            pass  # someone else has it, which serves as well
        code, out, _ = shell.run("up")
        assert code == 0
        assert ":4222" not in out
        assert shell.run("down")[0] == 0


@pytest.mark.slow
def test_a_dead_model_endpoint(shell: Shell) -> None:
    file = shell.folder / "dead.yaml"
    source = ROOT / "examples/guess_average"
    for name in ("scenario.py", "agents.py", "prompts.py"):
        (shell.folder / name).write_text((source / name).read_text())
    file.write_text(
        "name: dead\nscenario: scenario:GuessAverage\nmodels:\n"
        "  default: {backend: openai, base_url: 'http://127.0.0.1:9', model: m}\n"
    )
    code, out, err = shell.run("run", str(file), "--json")
    assert code == 1
    assert "the model endpoint http://127.0.0.1:9 can't be reached" in one_sentence(err)
    assert json.loads(out)["state"] == "failed"
    assert not shell.left()


def _until_progress(process: subprocess.Popen[str], shell: Shell) -> None:
    """Wait until the run is at its second round."""
    assert process.stderr is not None
    deadline = time.monotonic() + 60
    for line in process.stderr:
        assert time.monotonic() < deadline
        if line.startswith("round 1/"):
            return
    raise AssertionError("the run ended before it could be interrupted")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_interrupted_runs_keep_what_they_have(shell: Shell, number: int) -> None:
    process = shell.start("run", DUMMY, "--agents", "100", "--rounds", "100", *SLOW)
    _until_progress(process, shell)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "cancelling" in err
    assert "was cancelled" in err
    assert "Traceback" not in err
    assert not shell.left()
    (folder,) = (shell.folder / "runs").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["state"] == "cancelled"
    assert manifest["answers"] >= 100
    assert "100" in out


def test_interrupted_while_starting(shell: Shell) -> None:
    process = shell.start("run", DUMMY)
    deadline = time.monotonic() + 30
    while len(shell.left()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not shell.left()


@pytest.mark.slow
def test_a_killed_run_is_cleaned_up_by_down(shell: Shell) -> None:
    process = shell.start("run", DUMMY, "--agents", "100", "--rounds", "100", *SLOW)
    _until_progress(process, shell)
    process.kill()
    process.communicate(timeout=10)
    assert len(shell.left()) > 5
    code, out, _ = shell.run("down")
    assert code == 0
    assert "stopped" in out
    assert not shell.left()


def test_a_killed_start_is_cleaned_up_by_down(shell: Shell) -> None:
    process = shell.start("up")
    deadline = time.monotonic() + 30
    while len(shell.left()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=10)
    (shell.folder / ".populace" / "stack.json").write_text("{half")
    code, _, _ = shell.run("down")
    assert code == 0
    assert not shell.left()


def test_services_of_others_are_used(shell: Shell, services: Services) -> None:
    """With POPULACE_NATS_URL set and services up there, a run starts nothing here."""
    code, out, err = shell.run(
        "run",
        DUMMY,
        "--agents",
        "20",
        "--json",
        POPULACE_NATS_URL=services.broker.url,
    )
    assert code == 0, err
    outcome = json.loads(out)
    assert outcome["folder"].startswith(str(services.runs))
    assert not (shell.folder / ".populace" / "stack.json").exists()


@pytest.mark.slow
def test_populations_are_drawn_stored_and_shown(shell: Shell) -> None:
    code, out, err = shell.run("personas", "sample", "education", "--size", "500", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["population"], report["rows"]) == ("education", 500)
    assert report["margins"][0]["obtained"]["Ph.D."] == 0.2
    code, out, _ = shell.run("personas", "show", "education", "--rows", "2", "--json")
    assert json.loads(out)["rows"] == 500
    assert "education" in shell.run("personas", "show")[1]
    code, out, _ = shell.run("personas", "fit", "education", "personas/education.parquet")
    assert code == 0
    assert "exact" in out
    for arguments, complaint in (
        (("sample", "nowhere.yaml"), "nowhere.yaml: there is no such file"),
        (("sample", "education", "--out", "people.xlsx"), "the ending must be"),
        (("show", "nobody"), "there is no such file"),
    ):
        code, _, err = shell.run("personas", *arguments)
        assert code != 0
        assert complaint in one_sentence(err)


@pytest.mark.slow
def test_people_are_written_imported_and_exported(shell: Shell, services: Services) -> None:
    """Against services that run elsewhere; a stack of its own is what ``populace run`` tests."""
    more = {
        "POPULACE_NATS_URL": services.broker.url,
        "POPULACE_PERSONAS_DIR": str(services.personas),
    }
    write = ("personas", "write", "education", "--size", "30", "--name", "cli-thirty")
    script = ("--model", "scripted", "--model", 'script={text: "You {words}."}')
    code, out, err = shell.run(*write, *script, "--names", "en_US", **more)
    assert code == 0, err
    assert "30 of 30 people written by scripted" in out
    code, out, _ = shell.run("personas", "export", "cli-thirty", "people.csv", **more)
    assert code == 0
    lines = (shell.folder / "people.csv").read_text().splitlines()
    assert lines[0].startswith('"name","education","gender","age","text"')
    mapping = ("--map", "text=biography", "--map", "problem=remark")
    code, out, err = shell.run(
        "personas", "import", "people.csv", "--name", "back", *mapping, **more
    )
    assert code == 0, err
    assert "30 people in" in out
    code, out, _ = shell.run("personas", "show", "back", "--json", **more)
    assert json.loads(out)["people"][0]["biography"].startswith("You are ")
    code, out, err = shell.run("personas", "sample", "age", "--html", "fit.html", "--size", "50")
    assert code == 0, err
    page = (shell.folder / "fit.html").read_text()
    assert page.count("<svg") == 2
    assert "55-64 / female" in page
    for arguments, complaint in (
        ((*write, "--model", "backend=magic"), "--model: backend: "),
        ((*write, "--language", "la"), "there is no template 'la'"),
        ((*write, "--model", "scripted", "--names", "xx"), "there are no names for 'xx'"),
        (("personas", "import", "people.csv", "--name", "b", "--map", "x"), "write it as THEIRS="),
        (("personas", "import", "people.csv", "--name", "b c"), "the name 'b c' must be"),
        (("personas", "export", "nobody", "x.csv"), "there is no such file"),
    ):
        code, _, err = shell.run(*arguments, **more)
        assert code == 2
        assert complaint in one_sentence(err)


def test_answers_by_education(shell: Shell, services: Services) -> None:
    more = {
        "POPULACE_NATS_URL": services.broker.url,
        "POPULACE_RUNS_DIR": str(services.runs),
    }
    code, out, err = shell.run(
        "run", DUMMY, "--agents", "50", "--set", "agents.personas=education", "--json", **more
    )
    assert code == 0, err
    run = json.loads(out)["run"]
    code, out, _ = shell.run("results", run, "--by", "education", **more)
    assert code == 0
    assert all(level in out for level in ("elementary school", "high school", "Ph.D."))


def test_what_the_broker_will_drop_is_said_beforehand(shell: Shell) -> None:
    code, _, err = shell.run("check", DUMMY, "--agents", "10000000", "--rounds", "9")
    assert code == 0
    assert "results will go through a stream that keeps 2.1 GB" in err
    code, _, err = shell.run("check", DUMMY, "--agents", "1000000")
    assert (code, err) == (0, "")


def test_a_selection_of_the_matrix_and_its_report(shell: Shell) -> None:
    experiments = str(ROOT / "examples" / "guess_average" / "experiments.yaml")
    names = ["offset", "education-told", "one-expert", "mixture", "groups", "level-1"]
    scripted = [f"models.{name}.backend=scripted" for name in ("cool", "medium", "warm")]
    code, out, err = shell.run(
        "sweep",
        experiments,
        "--agents",
        "12",
        *(part for name in names for part in ("--only", name)),
        *(part for one in scripted for part in ("--set", one)),
        "--set",
        "models.default.backend=scripted",
        "--json",
    )
    assert code == 0, err
    found = json.loads(out)
    assert [row["variant"] for row in found["runs"]] == sorted(names, key=list(MATRIX).index)
    assert all(row["state"] == "finished" for row in found["runs"]), found
    page = (shell.folder / found["report"]).read_text()
    for row in found["runs"]:
        assert f'id="{row["run"]}"' in page
    code, out, err = shell.run("report", found["runs"][0]["run"], "--figures", "png", "--json")
    assert code == 0, err
    assert len(json.loads(out)["figures"]) > 2
    code, _, err = shell.run("report", "nothing")
    assert (code, one_sentence(err)) == (2, one_sentence(err))
    assert "no recorded run 'nothing'" in err


def test_an_estimate_needs_no_services(shell: Shell) -> None:
    prices = shell.folder / "prices.yaml"
    prices.write_text("big: {input: 2, output: 10}\n")
    model = '{backend: openai, base_url: "http://127.0.0.1:9", model: big}'
    more = {"POPULACE_PRICES": str(prices)}
    arguments = ("estimate", DUMMY, "--agents", "1000", "--set", f"models.default={model}")
    code, out, err = shell.run(*arguments, "--json", **more)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["agents"], found["requests"]) == (1000, 2000)
    expected = (found["tokens_in"] * 2 + found["tokens_out"] * 10) / 1e6
    assert abs(found["money"] - expected) < 1e-3 * expected
    code, out, _ = shell.run(*arguments)
    assert code == 0
    assert "money:    not known" in out
    prices.write_text("big: {input: dear}\n")
    code, _, err = shell.run(*arguments, **more)
    assert code == 2
    assert "price table" in one_sentence(err)
    for pair, complaint in (
        ("budget={tokens: 0}", "budget.tokens"),
        ("budget={}", "give tokens, money or requests"),
        ("cache=sometimes", "cache"),
        ("models={default: {mixture: {weights: {a: 1}}}}", "mixes a model 'a'"),
    ):
        code, _, err = shell.run("check", DUMMY, "--set", pair)
        assert code == 2
        assert complaint in one_sentence(err)
