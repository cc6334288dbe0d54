"""The logits of our own decoder equal transformers' for every family and option, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models import AttentionSpec, load_model
from tests.checkpoints import make_checkpoint

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 24, "rms_norm_eps": 1e-3}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"hidden_act": "gelu"}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 4}),
    ("qwen3", {"attention_bias": True, "rope_parameters": YARN}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 9, "head_dim": 8}),
]


class WholeSequence:
    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """Attention over one whole sequence, computed directly."""
        assert k is not None
        assert v is not None
        group = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (distance >= 0) & (distance < (spec.sliding_window or len(q)))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)

    def places(self, spec: AttentionSpec) -> None:
        """Store nothing."""


attend = WholeSequence()


def reference_logits(path: Path, tokens: Tensor) -> Tensor:
    """transformers' logits (tokens, vocab_size) of one sequence."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.inference_mode():
        return model(tokens[None]).logits[0]  # type: ignore[no-any-return]


def error(logits: Tensor, reference: Tensor) -> float:
    return float((logits - reference).abs().max() / reference.abs().max())


def logits_of(path: Path, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model, _ = load_model(Checkpoint(path), dtype, CPU)
    with torch.inference_mode():
        return model.logits(model(tokens, torch.arange(len(tokens)), attend))


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=lambda value: str(value)[:60])
def test_logits_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, family, tokenizer=False, **overrides)
    tokens = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(1))
    assert error(logits_of(tmp_path, tokens), reference_logits(tmp_path, tokens)) < 1e-4


def test_bfloat16_rounds_no_worse_than_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    tokens = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(1))
    exact = reference_logits(tmp_path, tokens)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.inference_mode():
        theirs = error(rounded(tokens[None]).logits[0].float(), exact)
    assert error(logits_of(tmp_path, tokens, torch.bfloat16), exact) < 1.5 * theirs


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hidden_act": "mish"}, "mish"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}}, "proportional"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_unsupported_values_are_refused_by_name(tmp_path: Path, overrides: dict[str, Any], named: str) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False, **overrides)
    with pytest.raises(ConfigError, match=named):
        load_model(Checkpoint(tmp_path), torch.float32, CPU)
