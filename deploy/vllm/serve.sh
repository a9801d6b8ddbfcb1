#!/usr/bin/env bash
# Starts vLLM servers on a machine with GPUs, as many as fit: one for each group of GPUs.
#   deploy/vllm/serve.sh MODEL [options of vllm serve]
# TP: GPUs per server (tensor parallelism, default 1). PORT: of the first server (8000).
# HOST: address to listen on (127.0.0.1). VLLM: the command (vllm). Ends all with Ctrl-C or SIGTERM.
# Uses the GPUs in CUDA_VISIBLE_DEVICES, or all.
# Prints, once each has answered a real request, what to write into a scenario file.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: deploy/vllm/serve.sh MODEL [options of vllm serve]" >&2; exit 2; }
model="$1"
shift
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
tp="${TP:-1}" port="${PORT:-8000}" host="${HOST:-127.0.0.1}" vllm="${VLLM:-vllm}"
command -v "$vllm" >/dev/null || { echo "populace: there is no '$vllm' here; pip install vllm" >&2; exit 2; }
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
else
    mapfile -t devices < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null || true)
fi
gpus=${#devices[@]}
[ "$gpus" -ge "$tp" ] || { echo "populace: $gpus GPUs here, fewer than TP=$tp" >&2; exit 2; }

# What the servers will want to be asked with.
name="$model" key="${VLLM_API_KEY:-}" before=""
for option in "$@"; do
    case "$before" in
    --served-model-name) name="$option" ;;
    --api-key) key="$option" ;;
    esac
    case "$option" in
    --served-model-name=*) name="${option#*=}" ;;
    --api-key=*) key="${option#*=}" ;;
    esac
    before="$option"
done
# Under which address others find what listens on all of them.
reach="$host"
case "$host" in 0.0.0.0 | ::) reach="$(hostname -f 2>/dev/null || hostname)" ;; esac

servers=()
finish() {
    trap - EXIT
    [ ${#servers[@]} -eq 0 ] || kill "${servers[@]}" 2>/dev/null || true
    wait || true
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

urls=()
for ((first = 0; first + tp <= gpus; first += tp)); do
    list="$(IFS=,; echo "${devices[*]:first:tp}")"
    at=$((port + first / tp))
    CUDA_VISIBLE_DEVICES="$list" "$vllm" serve "$model" --host "$host" --port "$at" \
        --tensor-parallel-size "$tp" --enable-prefix-caching --enable-prompt-tokens-details "$@" \
        >"vllm-$at.log" 2>&1 &
    servers+=($!)
    urls+=("http://$reach:$at")
    echo "GPU $list: http://$reach:$at (log in vllm-$at.log)" >&2
done
for i in "${!urls[@]}"; do
    # In the background: a shell heeds a signal only when what it runs in front has ended.
    KEY="$key" "$here/wait.sh" "${urls[$i]}" "$name" "${servers[$i]}" &
    wait $!
done
echo "ready. In a scenario file:"
echo "  models: {default: {backend: openai, model: $name, base_url: [$(IFS=,; echo "${urls[*]}" | sed 's/,/, /g')]}}"
wait
