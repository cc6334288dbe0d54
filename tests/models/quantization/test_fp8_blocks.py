"""fp8 checkpoints with block scales: on a CPU they equal their dequantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models import load_model
from raylm.models.quantization.config import read_quantization_config
from raylm.models.quantization.fp8 import FP8
from tests.checkpoints import make_checkpoint
from tests.models.test_decoder import attend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))
CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
KEPT = "model.layers.1.self_attn.o_proj"


def quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``weight`` in fp8, a scale for each block of 128 x 128, and the dequantized weight."""
    high, wide = (-size % 128 for size in weight.shape)
    blocks = F.pad(weight, (0, wide, 0, high)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
    narrow = (weight / spread).to(FP8)
    return narrow, scales, narrow.float() * spread


def make(path: Path, quantization: dict[str, Any] = CONFIG, **overrides: Any) -> tuple[Path, Path]:
    """A checkpoint in fp8, and one with the dequantized weights. k and v have less than a block of outputs."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32}
    source = make_checkpoint(path / "source", "qwen3", tokenizer=False, **sizes | overrides)
    kept = quantization.get("modules_to_not_convert", [])
    held, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        held[name] = meant[name] = tensor
        if "_proj" in name and not name.startswith(tuple(kept)):
            held[name], held[f"{name}_scale_inv"], meant[name] = quantized(tensor)
    for folder, tensors, extra in (("fp8", held, {"quantization_config": quantization}), ("meant", meant, {})):
        shutil.copytree(source, path / folder)
        save_file(tensors, path / folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        (path / folder / "config.json").write_text(json.dumps(config | extra))
    return path / "fp8", path / "meant"


@pytest.mark.parametrize("kept", [[], [KEPT, "lm_head"]], ids=["all", "but-one"])
def test_logits_are_those_of_what_the_checkpoint_means(tmp_path: Path, kept: list[str]) -> None:
    fp8, meant = make(tmp_path, CONFIG | {"modules_to_not_convert": kept})
    model, nbytes = load_model(Checkpoint(fp8), torch.float32, CPU)
    assert model.quantization == "fp8, blocks of 128 x 128, served as floats"
    assert nbytes == load_model(Checkpoint(meant), torch.float32, CPU)[1]
    with torch.inference_mode():
        got = model.logits(model(TOKENS, torch.arange(len(TOKENS)), attend))
        wanted = AutoModelForCausalLM.from_pretrained(meant, attn_implementation="eager")(TOKENS[None]).logits[0]
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-4


def test_floats_are_of_the_models_type(tmp_path: Path) -> None:
    fp8, meant = make(tmp_path)
    (model, nbytes), (_, plain) = (load_model(Checkpoint(path), torch.bfloat16, CPU) for path in (fp8, meant))
    assert nbytes == plain
    with torch.inference_mode():
        assert model(TOKENS, torch.arange(len(TOKENS)), attend).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]; supported: \[128, 128\]"),
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'; supported: 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'; it is not supported"),
    ],
    ids=str,
)
def test_other_blocks_are_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "quantization_config": CONFIG | change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=named):
        read_quantization_config(Checkpoint(tmp_path))


def test_inputs_that_fill_no_block_and_scales_that_are_none_are_refused(tmp_path: Path) -> None:
    fp8, _ = make(tmp_path / "odd", intermediate_size=320)
    with pytest.raises(ConfigError, match=r"cannot be served quantized: .* multiple of 128, not 320"):
        load_model(Checkpoint(fp8), torch.float32, CPU)
    fp8, _ = make(tmp_path / "zero")
    weights = load_file(fp8 / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight_scale_inv"][0, 0] = 0
    save_file(weights, fp8 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the scales of up_proj must be positive"):
        load_model(Checkpoint(fp8), torch.float32, CPU)


def test_old_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, _ = make(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    with pytest.raises(ConfigError, match=r"\(fp8, blocks of 128 x 128\) are served on NVIDIA GPUs of .* 8\.9"):
        load_model(Checkpoint(fp8), torch.bfloat16, CUDA)
