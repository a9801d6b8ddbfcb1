#!/usr/bin/env bash
# Installs if needed, then runs 'populace up' in the current folder.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/deploy/install.sh"
exec "$root/.venv/bin/populace" up "$@"
