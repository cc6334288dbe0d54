"""The names of GGUF's tensors in a Hugging Face checkpoint. Imports no torch."""

from __future__ import annotations

import re

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.gguf import StoredTensor

_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.(.+)\.(weight|bias)")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTSIDE = {"token_embd.weight": _EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": _HEAD}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3 = _MODULES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NO_WEIGHTS = frozenset({"rope_freqs.weight"})  # config.json has them


def named_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The tensors of a model in GGUF files by their names in a Hugging Face checkpoint. A tied head is the embedding's.

    Raises:
        ConfigError: a tensor has a name that is not known.
    """
    assert checkpoint.gguf is not None
    modules = _GEMMA3 if checkpoint.config.get("model_type") == "gemma3_text" else _MODULES
    found = {}
    for name, tensor in checkpoint.gguf.tensors().items():
        if name not in _NO_WEIGHTS:
            found[_renamed(name, modules, checkpoint)] = tensor
    if _EMBEDDING in found:
        found.setdefault(_HEAD, found[_EMBEDDING])  # a tied head
    return found


def _renamed(name: str, modules: dict[str, str], checkpoint: Checkpoint) -> str:
    if (known := _OUTSIDE.get(name)) is not None:
        return known
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in modules:
        raise ConfigError(f"model: {checkpoint} holds the tensor {name[:80]!r}, which the model does not know.")
    return f"model.layers.{match[1]}.{modules[match[2]]}.{match[3]}"
