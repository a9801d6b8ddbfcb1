#!/usr/bin/env bash
# Starts vLLM servers on a machine with GPUs, as many as fit: one for each group of GPUs.
#   deploy/vllm/serve.sh MODEL [options of vllm serve]
# TP: GPUs per server (tensor parallelism, default 1). PORT: of the first server (8000).
# HOST: address to listen on (127.0.0.1). VLLM: the command (vllm). Ends all with Ctrl-C or SIGTERM.
# Prints, once each has answered a real request, what to write into a scenario file.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: deploy/vllm/serve.sh MODEL [options of vllm serve]" >&2; exit 2; }
model="$1"
shift
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
tp="${TP:-1}" port="${PORT:-8000}" host="${HOST:-127.0.0.1}" vllm="${VLLM:-vllm}"
command -v "$vllm" >/dev/null || { echo "populace: there is no '$vllm' here; pip install vllm" >&2; exit 2; }
gpus="$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l || true)"
[ "$gpus" -ge "$tp" ] || { echo "populace: $gpus GPUs here, fewer than TP=$tp" >&2; exit 2; }

servers=()
finish() {
    trap - EXIT INT TERM
    [ ${#servers[@]} -eq 0 ] || kill "${servers[@]}" 2>/dev/null || true
    wait || true
}
trap finish EXIT INT TERM

urls=()
for ((first = 0; first + tp <= gpus; first += tp)); do
    list="$(seq -s, "$first" $((first + tp - 1)))"
    at=$((port + first / tp))
    CUDA_VISIBLE_DEVICES="$list" "$vllm" serve "$model" --host "$host" --port "$at" \
        --tensor-parallel-size "$tp" --enable-prefix-caching --enable-prompt-tokens-details "$@" \
        >"vllm-$at.log" 2>&1 &
    servers+=($!)
    urls+=("http://$host:$at")
    echo "GPU $list: http://$host:$at (log in vllm-$at.log)" >&2
done
for i in "${!urls[@]}"; do
    "$here/wait.sh" "${urls[$i]}" "$model" "${servers[$i]}"
done
echo "ready. In a scenario file:"
echo "  models: {default: {backend: openai, model: $model, base_url: [$(IFS=,; echo "${urls[*]}" | sed 's/,/, /g')]}}"
wait
