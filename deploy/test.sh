#!/usr/bin/env bash
# Installs if needed, then runs the tests.
#   deploy/test.sh [options of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
deploy/install.sh dev
exec .venv/bin/python -m pytest "$@"
