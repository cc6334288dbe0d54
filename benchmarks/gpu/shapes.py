"""Checkpoints with the shapes of well-known models and random weights, made on the device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from raylm.checkpoint import EMBEDDED

LLAMA = {"architecture": "LlamaForCausalLM", "config": "LlamaConfig", "vocab_size": 128256, "rope_theta": 500000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": LLAMA
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architecture": "Qwen3ForCausalLM",
        "config": "Qwen3Config",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
_SHARD_BYTES = 4 << 30


def embedding_size(shape: str) -> int:
    """Weights of the embedding, plus the head if the head is separate."""
    return int(SHAPES[shape]["vocab_size"] * SHAPES[shape]["hidden_size"])


def make_checkpoint(path: Path, shape: str, device: torch.device) -> None:
    """Write bfloat16 weights of ``shape`` to ``path``, with the names that transformers gives them."""
    import transformers

    sizes = {name: value for name, value in SHAPES[shape].items() if name not in ("architecture", "config")}
    rope = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
    config = getattr(transformers, SHAPES[shape]["config"])(**sizes, rope_parameters=rope, dtype="bfloat16")
    with torch.device("meta"):
        model = getattr(transformers, SHAPES[shape]["architecture"])(config)
    config.architectures = [SHAPES[shape]["architecture"]]
    config.save_pretrained(path)
    names = {name: value.shape for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del names["lm_head.weight"]
    _write(path, names, device)
    shutil.copy(EMBEDDED / "tokenizer.json", path)  # texts do not matter, and requests have token ids


def _write(path: Path, names: dict[str, torch.Size], device: torch.device) -> None:
    """Norms are 1, other weights are random. A few GiB at a time are copied through the host."""
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, size in names.items():
        weight = torch.empty(size, dtype=torch.bfloat16, device=device)
        weight = weight.fill_(1) if "norm" in name else weight.normal_(0, 0.02, generator=generator)
        shard[name] = weight.cpu()
        if sum(held.nbytes for held in shard.values()) > _SHARD_BYTES:
            shard = _save(path, shard, index)
    _save(path, shard, index)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _save(path: Path, shard: dict[str, torch.Tensor], index: dict[str, str]) -> dict[str, torch.Tensor]:
    if shard:
        file = f"model-{len(set(index.values()))}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    return {}
