"""A real vLLM server, and vLLM's engine in the model service; by ``deploy/test.sh --vllm``.

They need an environment of their own (3.5 GB, made by ``deploy/vllm/cpu.sh``) and minutes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

GAME = ROOT / "examples/guess_average/scenario.yaml"
CPU = ROOT / "deploy/vllm/cpu.sh"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def play(python: str, folder: Path, model: dict[str, Any], **more: str) -> dict[str, Any]:
    """The guess game with 200 agents, by the command line."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("POPULACE_")}
    done = subprocess.run(
        [
            python, "-m", "populace", "run", str(GAME), "--agents", "200", "--json",
            "--set", f"models.default={json.dumps(model)}",
        ],
        cwd=folder,
        env={**clean, "POPULACE_CODE_ROOTS": str(ROOT), "PYTHONPATH": str(ROOT), **more},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def looked_at(outcome: dict[str, Any]) -> None:
    for row in outcome["rows"]:
        assert row["answers"] + row["failed"] == 200
        assert row["answers"] > 40
        assert row["usage"]["requests"] >= 200
        assert not any(kind.startswith("model_un") for kind in row["failures"])


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    process = subprocess.Popen(
        [str(CPU), "serve", "8019"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


def test_the_game_on_a_vllm_server(server: str, tmp_path: Path) -> None:
    import sys

    model = {"backend": "openai", "base_url": server, "model": "smollm2", "max_tokens": 80}
    looked_at(play(sys.executable, tmp_path, model))


def test_the_game_with_vllm_in_the_model_service(tmp_path: Path) -> None:
    path = subprocess.run([str(CPU), "path"], capture_output=True, text=True, check=True)
    engine = {
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 32768,
    }
    folder = Path(path.stdout.strip())
    python = str(folder.parent / "venv/bin/python")
    model = {"backend": "vllm", "model": str(folder), "max_tokens": 80, "engine": engine}
    more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    looked_at(play(python, tmp_path, model, **more))
