#!/usr/bin/env bash
# Installs if needed, then runs the tests.
#   deploy/test.sh [--slow] [--vllm] [options of pytest]
# --slow adds those that kill and wait for minutes.
# --vllm adds those with a real vLLM on the CPU, for which it makes an environment (3.5 GB).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
deploy/install.sh dev
# Two at a time, by file: most tests wait for processes more than they compute.
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
