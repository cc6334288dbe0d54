"""Quantized weights of families that run with transformers' modeling code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models import AttentionSpec, load_model
from raylm.models.linear import Linear
from raylm.native import NativeLinear
from tests.checkpoints import make_checkpoint
from tests.models.quantization.quantized_checkpoints import SCHEMES, Scheme, quantize_checkpoint
from tests.models.transformers_backend.families import make_family
from tests.models.transformers_backend.test_transformers_backend import CPU, allow, load


class Queries:
    """Attention that returns the queries."""

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        return q

    def places(self, spec: AttentionSpec) -> None:
        """Store nothing."""


QUERIES = Queries()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_rounded_too(quantization: str, tmp_path: Path) -> None:
    make_family(tmp_path, "MixtralForCausalLM", torch.bfloat16)
    plain, plain_bytes = load(tmp_path)
    rounded, rounded_bytes = load(tmp_path, quantization)
    assert rounded_bytes < {"int8": 0.5, "int4": 0.42}[quantization] * plain_bytes
    ids = torch.arange(2, 20)
    with torch.inference_mode():
        wanted, got = (model.logits(model(ids, torch.arange(len(ids)), QUERIES)) for model in (plain, rounded))
    assert 0 < (got - wanted).abs().max() < {"int8": 0.1, "int4": 0.5}[quantization] * wanted.abs().max()


def test_what_cannot_be_rounded_is_not_left_out_silently(tmp_path: Path) -> None:
    make_family(tmp_path, "JetMoeForCausalLM", hidden_size=32)
    load(tmp_path)
    with pytest.raises(
        ConfigError, match=r"quantization: model\.layers\.0\..* JetMoeForCausalLM is not served quantized"
    ):
        load(tmp_path, "int8")


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Phi3ForCausalLM"])
def test_every_linear_layer_is_rounded(architecture: str, tmp_path: Path) -> None:
    make_family(tmp_path, architecture)
    model, weights_bytes = load(tmp_path, "int8")
    weights = load_file(tmp_path / "model.safetensors").items()
    kept = sum(w.nbytes for name, w in weights if w.ndim == 1 or any(part in name for part in ("embed", "wte", "wpe")))
    kernels = [module.kernel for module in model.modules() if isinstance(module, Linear)]
    assert all(isinstance(kernel, NativeLinear) and kernel.dtype is None for kernel in kernels)
    assert weights_bytes == kept + sum(module.nbytes for module in model.modules() if isinstance(module, Linear))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_quantized_checkpoints_mean_the_same_on_both_paths(
    scheme: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2", tokenizer=False)
    quantize_checkpoint(source, scheme, tmp_path / "quantized", tmp_path / "meant")
    ids = torch.arange(2, 40)

    def logits() -> torch.Tensor:
        model, _ = load_model(Checkpoint(tmp_path / "quantized"), torch.float32, CPU)
        with torch.inference_mode():
            return model.logits(model(ids, torch.arange(len(ids)), QUERIES))

    compact = logits()
    allow(monkeypatch, "Qwen2ForCausalLM")
    assert (logits() - compact).abs().amax(1).median() < 1e-4 * compact.abs().max()
