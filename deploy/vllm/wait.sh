#!/usr/bin/env bash
# Waits until a server has answered a real request; its health page says so too early.
#   deploy/vllm/wait.sh URL MODEL [PID]
# WAIT: seconds to wait at most (900). KEY: the server's API key, if it wants one.
set -euo pipefail
url="$1" model="$2" pid="${3:-}"
parent=$PPID
until [ "$SECONDS" -gt "${WAIT:-900}" ]; do
    if [ -n "$pid" ] && ! kill -0 "$pid" 2>/dev/null; then
        echo "populace: the server for $url has ended; see its log" >&2
        exit 1
    fi
    kill -0 "$parent" 2>/dev/null || exit 1 # whoever wanted to know is gone
    if curl -fsS -m 60 "$url/v1/chat/completions" -H 'Content-Type: application/json' \
        -H @- <<<"Authorization: Bearer ${KEY:-none}" \
        -d "{\"model\": \"$model\", \"max_tokens\": 1, \"messages\": [{\"role\": \"user\", \"content\": \"Say yes.\"}]}" \
        >/dev/null 2>&1; then
        echo "$url answers" >&2
        exit 0
    fi
    sleep 1
done
echo "populace: $url did not answer within ${WAIT:-900} s" >&2
exit 1
