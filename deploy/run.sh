#!/usr/bin/env bash
# From a bare clone to a result: installs, starts the services if none are up, plays the
# scenario, shows its rounds, and stops what it started.
#   deploy/run.sh SCENARIO [options of 'populace run']
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ $# -lt 1 ]; then
    echo "usage: deploy/run.sh SCENARIO [--agents N] [--rounds N] [--json] ..." >&2
    exit 2
fi
"$root/deploy/install.sh"
exec "$root/.venv/bin/populace" run "$@"
