"""Makes a checkpoint that vLLM can load of the embedded model's GGUF file.

python deploy/vllm/convert.py FOLDER   (in an environment with transformers, gguf and accelerate)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    """Convert, unless it was done before."""
    gguf, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    if (folder / "config.json").is_file():
        return
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    draft = folder.with_name(f".{folder.name}")
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(folder)  # nobody ever finds half a model


if __name__ == "__main__":
    main()
