"""fp8 checkpoints as compressed-tensors defines them, on a CPU, where the scaled product is torch's."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models import load_model
from raylm.models.quantization import select as quantization
from raylm.models.quantization.fp8 import FP8, Fp8Linear, Fp8Part, Fp8RowsLinear, round_inputs, round_rows
from tests.checkpoints import make_checkpoint
from tests.fp8 import nearest
from tests.models.quantization.quantized_checkpoints import compressed_config, is_quantized
from tests.models.quantization.test_quantization import set_group, set_inputs, set_weights
from tests.models.test_decoder import attend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TENSOR = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
CONFIG = compressed_config("float-quantized", TENSOR, TENSOR | {"observer": "minmax"}, ["lm_head"])
TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))
INPUT_SCALE = 0.03


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow fp8 on a CPU, where its arithmetic is the same but slow."""
    monkeypatch.setattr(quantization, "check_fp8", lambda what, device: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_parts_and_bias(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    x, bias = torch.randn(7, 64, generator=draw).to(dtype), torch.randn(80, generator=draw).to(dtype)
    weights = [torch.randn(rows, 64, generator=draw) for rows in (32, 48)]
    for input_scales in ((0.01, 0.01), (0.01, 0.02)):  # the first scale cuts off inputs beyond 4.48
        parts = [
            Fp8Part((weight / scale).to(FP8), torch.tensor([scale]), torch.tensor([input_scale]))
            for weight, scale, input_scale in zip(weights, (0.02, 0.5), input_scales, strict=True)
        ]
        wanted = torch.cat(
            [
                (nearest(x.float() / part.input_scale) * part.input_scale.double())
                @ (part.weight.double() * part.weight_scale.double()).T
                for part in parts
            ],
            dim=1,
        )
        got = Fp8Linear(parts, bias)(x).double() - bias.double()
        assert float((got - wanted).abs().max() / wanted.abs().max()) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
        crossed = Fp8Linear([Fp8Part(p.weight, p.input_scale, p.weight_scale) for p in parts], None)(x).double()
        assert float((crossed - wanted).abs().max() / wanted.abs().max()) > 0.05, "swapped scales must be detected"


def test_inputs_are_rounded_to_the_nearest_and_end_at_the_largest() -> None:
    x = torch.cat([torch.linspace(-500, 500, 4001), torch.linspace(-0.02, 0.02, 401)])
    assert torch.equal(round_inputs(x, torch.tensor([1.0])).double(), nearest(x))
    assert float(round_inputs(torch.tensor([1e6]), torch.tensor([2.0])).float()) == 448


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_have_scales_of_their_own(dtype: torch.dtype) -> None:
    """Rows that differ by a factor of 1,000 have the same relative error, and a row does not depend on other rows."""
    draw = torch.Generator().manual_seed(3)
    x = (torch.randn(6, 64, generator=draw) * torch.logspace(-3, 0, 6)[:, None]).to(dtype)
    weight, scales = torch.randn(48, 64, generator=draw).to(FP8), torch.rand(48, generator=draw) + 0.1
    bias = torch.randn(48, generator=draw).to(dtype)
    linear = Fp8RowsLinear(weight, scales, None)
    steps = x.double().abs().amax(1, keepdim=True) / 448
    wanted = (nearest(x.double() / steps) * steps) @ (weight.double() * scales.double()[:, None]).T
    wrong = (linear(x).double() - wanted).abs().amax(1) / wanted.abs().amax(1)
    assert float(wrong.max()) < (1e-2 if dtype == torch.float32 else 2e-2)
    assert torch.equal(Fp8RowsLinear(weight, scales, bias)(x), linear(x) + bias)
    for alone, beside in zip(round_rows(x[2:3]), round_rows(x), strict=True):
        assert torch.equal(alone.float(), beside[2:3].float())
    assert linear(x[:0]).shape == (0, 48)
    assert torch.equal(round_rows(torch.zeros(2, 16))[0].float(), torch.zeros(2, 16))


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_weights_by_channel_or_tensor_with_inputs_by_token(tmp_path: Path, anywhere: None, strategy: str) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2", tokenizer=False)
    weights, meant = load_file(source / "model.safetensors"), {}
    for name, tensor in list(weights.items()):
        meant[name] = tensor
        if is_quantized(name, tensor, PLAIN):
            scale = (
                tensor.abs().amax(1, keepdim=True) / 448 if strategy == "channel" else tensor.abs().max().view(1) / 448
            )
            weights[name], weights[name + "_scale"] = (tensor / scale).to(FP8), scale
            meant[name] = weights[name].float() * scale
    # Scales of the KV cache have no effect here, because the cache has floats.
    weights |= {f"model.layers.{at}.self_attn.{part}_scale": torch.tensor([0.3]) for at in (0, 1) for part in "kv"}
    token = TENSOR | {"strategy": "token", "dynamic": True}
    config = compressed_config("float-quantized", TENSOR | {"strategy": strategy}, token, ["lm_head"])
    config["kv_cache_scheme"] = TENSOR | {"observer": "minmax", "group_size": None}
    for folder, held, extra in (("fp8", weights, {"quantization_config": config}), ("meant", meant, {})):
        shutil.copytree(source, tmp_path / folder)
        save_file(held, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        settings = json.loads((source / "config.json").read_text())
        (tmp_path / folder / "config.json").write_text(json.dumps(settings | extra))
    model, _ = load_model(Checkpoint(tmp_path / "fp8"), torch.float32, CPU)
    with torch.inference_mode():
        got = model.logits(model(TOKENS, torch.arange(len(TOKENS)), attend))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "meant", attn_implementation="eager")

    def by_token(_: object, args: tuple[Tensor]) -> tuple[Tensor]:
        steps = args[0].abs().amax(-1, keepdim=True) / 448
        return ((nearest(args[0] / steps) * steps).float(),)

    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(by_token)
    with torch.inference_mode():
        wanted = reference(TOKENS[None]).logits[0]
    wrong = (got - wanted).abs().amax(1) / wanted.abs().max()
    assert float(wrong.median()) < 1e-3
    assert float(wrong.max()) < 0.1


def make(path: Path, **overrides: Any) -> tuple[Path, Path]:
    """A checkpoint in fp8, and one with the dequantized weights."""
    source = make_checkpoint(path / "source", "qwen2", tokenizer=False, **overrides)
    weights, meant = load_file(source / "model.safetensors"), {}
    for name, tensor in list(weights.items()):
        meant[name] = tensor
        if is_quantized(name, tensor, PLAIN):
            scale = tensor.abs().max() / 448
            weights[name] = (tensor / scale).to(FP8)
            weights[name + "_scale"] = scale.view(1)
            weights[name.removesuffix("weight") + "input_scale"] = torch.tensor([INPUT_SCALE])
            meant[name] = weights[name].float() * scale
    for folder, held, extra in ((path / "fp8", weights, {"quantization_config": CONFIG}), (path / "meant", meant, {})):
        shutil.copytree(source, folder)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | extra))
    return path / "fp8", path / "meant"


class Kept:
    """A scheme that quantizes all linear layers."""

    kept = ()


PLAIN: Any = Kept()


def test_logits_are_those_of_what_the_checkpoint_means(tmp_path: Path, anywhere: None) -> None:
    fp8, meant = make(tmp_path)
    model, nbytes = load_model(Checkpoint(fp8), torch.float32, CPU)
    assert model.quantization == "compressed-tensors W8A8, fp8"
    plain = load_model(Checkpoint(meant), torch.float32, CPU)[1]
    assert nbytes < 0.75 * plain
    with torch.inference_mode():
        got = model.logits(model(TOKENS, torch.arange(len(TOKENS)), attend))
    reference = AutoModelForCausalLM.from_pretrained(meant, attn_implementation="eager")
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args: ((nearest(args[0] / INPUT_SCALE) * INPUT_SCALE).float(),))
    with torch.inference_mode():
        wanted = reference(TOKENS[None]).logits[0]
    # A few inputs are halfway between two steps and may be rounded differently, so not all tokens agree.
    wrong = (got - wanted).abs().amax(1) / wanted.abs().max()
    assert float(wrong.median()) < 1e-4
    assert float(wrong.max()) < 0.1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_weights(strategy="channel"), "weights.strategy is 'channel'; supported: 'tensor'"),
        (set_weights(strategy="block"), "weights.strategy is 'block'; supported: 'tensor'"),
        (set_weights(type="int"), "weights.type is 'int'; supported: 'float'"),
        (set_inputs(strategy="token"), "input_activations.strategy is 'token'; supported: 'tensor'"),
        (set_inputs(dynamic=True), "input_activations.strategy is 'tensor'; supported: 'token'"),
        (set_inputs(dynamic="local"), "input_activations.dynamic is 'local'; supported: True, False"),
        (set_inputs(num_bits=4), "input_activations.num_bits is 4"),
        (set_group(input_activations=None), "input_activations is None"),
    ],
)
def test_other_fp8_is_refused_by_name(
    tmp_path: Path, anywhere: None, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    quantized = copy.deepcopy(CONFIG)
    change(quantized)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    with pytest.raises(ConfigError, match=named):
        load_model(Checkpoint(path), torch.float32, CPU)


def test_sides_that_are_no_multiple_of_16_and_scales_that_are_none_are_refused(tmp_path: Path, anywhere: None) -> None:
    fp8, _ = make(tmp_path / "odd", intermediate_size=88)
    with pytest.raises(ConfigError, match=r"cannot be served quantized: .* multiples of 16, not 88"):
        load_model(Checkpoint(fp8), torch.float32, CPU)
    fp8, _ = make(tmp_path / "zero")
    weights = load_file(fp8 / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.input_scale"].zero_()
    save_file(weights, fp8 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the scales of up_proj are .* must be positive"):
        load_model(Checkpoint(fp8), torch.float32, CPU)


@pytest.mark.parametrize(("device", "capability"), [(CPU, (9, 0)), (CUDA, (8, 0))])
def test_machines_that_do_not_multiply_fp8_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    fp8, _ = make(tmp_path)
    with pytest.raises(ConfigError, match=r"\(compressed-tensors W8A8, fp8\) are served on NVIDIA GPUs of .* 8\.9"):
        load_model(Checkpoint(fp8), torch.bfloat16, device)
