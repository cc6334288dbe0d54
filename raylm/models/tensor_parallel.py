"""Tensor parallelism of the Llama families: the part of each layer on each rank (Shoeybi et al. 2019, Megatron-LM).

Each rank has a share of the outputs of column-wise layers (q, k, v, gate, up), which is the input of row-wise layers
(o, down). Ranks only exchange sums of the outputs of row-wise layers, two for each layer. Embedding and head, which are
most of a small model's reads, are split by vocabulary. This needs one more sum and one gather in each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from raylm.errors import ConfigError
from raylm.models.causal_lm import Shard
from raylm.models.decoder_config import DecoderConfig
from raylm.models.ranks import Ranks

# Module -> its split, as in base_model_tp_plan of transformers, and the entry of DecoderConfig that is divided.
PLAN = {
    "q_proj": ("colwise", "num_heads"),
    "k_proj": ("colwise", "num_kv_heads"),
    "v_proj": ("colwise", "num_kv_heads"),
    "o_proj": ("rowwise", "num_heads"),
    "gate_proj": ("colwise", "intermediate_size"),
    "up_proj": ("colwise", "intermediate_size"),
    "down_proj": ("rowwise", "intermediate_size"),
    "embed_tokens": ("colwise", "vocab_size"),
    "lm_head": ("colwise", "vocab_size"),
}
_KNOB = "engine.tensor_parallel_size"


def share(whole: DecoderConfig, ranks: Ranks) -> DecoderConfig:
    """One rank's part. With more ranks than KV heads, neighbouring ranks have the same KV head. Raises ConfigError."""
    size = ranks.world_size
    for name, count in (("attention heads", whole.num_heads), ("inputs of down_proj", whole.intermediate_size)):
        if count % size:
            raise ConfigError(f"{_KNOB}: {size} ranks cannot share {count} {name} evenly.")
    if whole.num_kv_heads % size and size % whole.num_kv_heads:
        raise ConfigError(f"{_KNOB}: {size} ranks can neither share nor repeat {whole.num_kv_heads} KV heads.")
    if whole.vocab_size < size:
        raise ConfigError(f"{_KNOB}: {size} ranks cannot share a vocabulary of {whole.vocab_size}.")
    heads, kv_heads, inner = whole.num_heads // size, len(_kv_heads(whole, ranks)), whole.intermediate_size // size
    return replace(whole, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner, ranks=ranks)


def shards(whole: DecoderConfig, ranks: Ranks, names: Iterable[str]) -> dict[str, Shard]:
    """The part of the checkpoint's tensors ``names`` on this rank. Tensors that it has completely are omitted."""
    d = whole.head_dim
    heads, kv_heads = ranks.part(whole.num_heads), _kv_heads(whole, ranks)
    parts = {
        "num_heads": (range(heads.start * d, heads.stop * d), whole.num_heads * d),
        "num_kv_heads": (range(kv_heads.start * d, kv_heads.stop * d), whole.num_kv_heads * d),
        "intermediate_size": (ranks.part(whole.intermediate_size), whole.intermediate_size),
        "vocab_size": (ranks.part(whole.vocab_size), whole.vocab_size),
    }
    found = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        style, divided = PLAN.get(module.rpartition(".")[2], ("", ""))
        if not style or (style == "rowwise" and kind == "bias"):
            continue
        part, count = parts[divided]
        if len(part) < count:
            found[name] = Shard(0 if style == "colwise" else 1, part, count)
    return found


def others_names(config: DecoderConfig) -> set[str]:
    """Tensors only on rank 0, because they are added once, after the sum over ranks."""
    layers = config.layers if config.ranks.rank else ()
    biases = {"self_attn.o_proj": config.biases.output, "mlp.down_proj": config.biases.mlp}
    return {f"model.layers.{i}.{module}.bias" for i in layers for module, has in biases.items() if has}


def _kv_heads(whole: DecoderConfig, ranks: Ranks) -> range:
    if ranks.world_size <= whole.num_kv_heads:
        return ranks.part(whole.num_kv_heads)
    first = ranks.rank * whole.num_kv_heads // ranks.world_size
    return range(first, first + 1)
