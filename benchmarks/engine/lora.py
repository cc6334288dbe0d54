"""Throughput of a batch with LoRA adapters, compared with the same batch without them, in one run.

    python -m benchmarks.engine.lora embedded --rank 16 --adapters 4 --batch 8

The adapters change all seven linear modules of every layer. Base and adapters alternate. Figures are medians.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.rows import Report, parser
from raylm import LLM, SamplingParams
from raylm.checkpoint import resolve

PROMPT_TOKENS = 32


def write_adapter(checkpoint: str, path: Path, rank: int, seed: int) -> None:
    """Write a small random adapter for all linear modules, in PEFT's format."""
    config = resolve(checkpoint, None).config
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for module, (rows, inputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            weights[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.01
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def measure(llm: LLM, batch: int, tokens: int, adapters: list[str | None]) -> float:
    prompts = [[(7 * place + at) % 1000 + 5 for at in range(PROMPT_TOKENS)] for place in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, adapters=adapters, progress=False)
    return batch * tokens / (time.perf_counter() - started)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model")
    options.add_argument("--rank", type=int, default=16)
    options.add_argument("--adapters", type=int, default=4)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--device", default="auto")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as root:
        names = [f"adapter-{number}" for number in range(args.adapters)]
        for seed, name in enumerate(names):
            write_adapter(args.model, Path(root) / name, args.rank, seed)
        with LLM(args.model, device=args.device, lora={"root": root, "max_adapters": args.adapters}) as llm:
            for name in names:
                llm.load_adapter(name, name)
            mixed: list[str | None] = [names[place % len(names)] for place in range(args.batch)]
            base: list[float] = []
            adapted: list[float] = []
            for number in range(args.rounds + 1):
                figures = [measure(llm, args.batch, args.tokens, wanted) for wanted in ([None] * args.batch, mixed)]
                if number:  # the first round is a warm-up
                    base.append(figures[0])
                    adapted.append(figures[1])
    ratio = statistics.median(b / a for a, b in zip(base, adapted, strict=True))
    report = Report("lora", {"base": "tok/s", "adapted": "tok/s", "ratio": "x"}, args.out)
    report.add(
        f"{args.model}, batch {args.batch}, {args.adapters} of rank {args.rank}",
        {"base": statistics.median(base), "adapted": statistics.median(adapted), "ratio": ratio},
    )


if __name__ == "__main__":
    main()
