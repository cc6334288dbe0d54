"""Writes the tests' checkpoints as GGUF files, with the writer of the ``gguf`` package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.numpy import load_file

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3 = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
Change = Callable[[GGUFWriter], None]


def make_gguf(
    checkpoint: Path,
    target: Path,
    kind: str = "F32",
    *,
    kinds: dict[str, str] | None = None,
    replaced: dict[str, tuple[np.ndarray[Any, Any], str]] | None = None,
    change: Change | None = None,
    pre: str = "gpt-2",
    parts: int = 1,
) -> Path:
    """Write the safetensors ``checkpoint`` to ``target`` with matrices of type ``kind``. Returns the (first) file.

    ``kinds`` gives other types by the suffix of a GGUF name. ``replaced`` maps names to stored bytes and their type.
    ``change`` can add to the file. Norms are in F32, and the rows of q and k of Llama have the order of llama.cpp, as
    llama.cpp writes them.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    weights: dict[str, np.ndarray[Any, Any]] = {}
    for file in checkpoint.glob("*.safetensors"):
        weights |= load_file(file)
    architecture = ARCHITECTURES[config["model_type"]]
    most = -(-len(weights) // parts) if parts > 1 else 0
    writer = GGUFWriter(target, architecture, split_max_tensors=most)
    _write_sizes(writer, config)
    if (checkpoint / "tokenizer.json").exists():
        _write_tokenizer(writer, checkpoint, pre)
    for name, values in weights.items():
        stored = _renamed(name, architecture)
        array = _ordered(name, values.astype(np.float32), config, architecture)
        chosen = next((found for end, found in (kinds or {}).items() if stored.endswith(end)), kind)
        matrix = GGMLQuantizationType[chosen if array.ndim > 1 else "F32"]
        data, written = (replaced or {}).get(stored) or (quantize(array, matrix), matrix.name)
        writer.add_tensor(stored, data, raw_dtype=GGMLQuantizationType[written])
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target if parts == 1 else target.with_name(f"{target.stem}-00001-of-{parts:05}.gguf")


def _write_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_type("model")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])


def _write_tokenizer(writer: GGUFWriter, checkpoint: Path, pre: str) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    vocab = vocab | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    types = [
        TokenType.CONTROL if token in special else TokenType.NORMAL for token in sorted(vocab, key=vocab.__getitem__)
    ]
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(vocab[settings["bos_token"]])
    writer.add_eos_token_id(vocab[settings["eos_token"]])
    if (template := checkpoint / "chat_template.jinja").exists():
        writer.add_chat_template(template.read_text())


def _renamed(name: str, architecture: str) -> str:
    names = _GEMMA3 if architecture == "gemma3" else _NAMES
    module, _, end = name.rpartition(".")
    if module in names:
        return f"{names[module]}.{end}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{end}"


def _ordered(
    name: str, values: np.ndarray[Any, Any], config: dict[str, Any], architecture: str
) -> np.ndarray[Any, Any]:
    """The values as llama.cpp's converter writes them: q and k of Llama in rotary pairs, Gemma's norms plus one."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    module = name.split(".")[-2]
    if architecture == "llama" and module in heads:
        pairs = values.reshape(heads[module], 2, -1, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values
