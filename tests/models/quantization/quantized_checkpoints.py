"""Writes quantized checkpoints directly from the definitions of their formats, and their dequantized weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Ints = NDArray[np.int64]
AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Steps:
    """Integers (out, in), with a scale and a zero for each group of inputs (out, groups)."""

    ints: Ints
    scales: Tensor
    zeros: Ints

    def plain(self) -> Tensor:
        group = self.ints.shape[1] // self.zeros.shape[1]
        zeros = torch.from_numpy(self.zeros.repeat(group, axis=1))
        scales = self.scales.double().repeat_interleave(group, dim=1)
        return ((torch.from_numpy(self.ints) - zeros) * scales).float()


@dataclass(frozen=True)
class Scheme:
    """A format: its entry in config.json, the rounding of a weight to integers, and the tensors that store them."""

    name: str
    config: dict[str, Any]
    pack: Callable[[Steps], dict[str, Tensor]]
    group: int | None = 32
    symmetric: bool = False
    bits: int = 4
    least_zero: int = 0
    scale_dtype: torch.dtype = torch.float16
    kept: tuple[str, ...] = field(default=())

    def steps(self, weight: Tensor) -> Steps:
        wide = weight.double().view(len(weight), -1, self.group or weight.shape[1])
        low, high = wide.amin(2), wide.amax(2)
        most, middle = 2**self.bits - 1, 2 ** (self.bits - 1)
        if self.symmetric:
            scales = (wide.abs().amax(2) / (middle - 1)).to(self.scale_dtype)
            zeros = torch.full_like(low, middle)
        else:
            scales = ((high - low) / most).to(self.scale_dtype)
            zeros = (-low / scales).round().clamp(self.least_zero, most)
        ints = ((wide / scales[..., None].double()).round() + zeros[..., None]).clamp(0, most)
        return Steps(ints.flatten(1).long().numpy(), scales, zeros.long().numpy())


def words(nibbles: Ints) -> Tensor:
    """Pack values (..., 8) from 0 to 15 into int32 words. The first value has the lowest bits."""
    total = np.zeros(nibbles.shape[:-1], np.uint32)
    for place in range(8):
        total |= nibbles[..., place].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(total.view(np.int32).copy())


def along_rows(values: Ints) -> Tensor:
    """Pack (n, 8 m) values into (n, m) words of 8 neighbours in a row."""
    return words(values.reshape(len(values), -1, 8))


def compressed_int8(steps: Steps) -> dict[str, Tensor]:
    return {
        "weight": torch.from_numpy(steps.ints - 128).to(torch.int8),
        "weight_scale": steps.scales,
    }


def compressed_int4(steps: Steps) -> dict[str, Tensor]:
    found = {
        "weight_packed": along_rows(steps.ints),
        "weight_scale": steps.scales,
        "weight_shape": torch.tensor(steps.ints.shape),
    }
    if not (steps.zeros == 8).all():
        found["weight_zero_point"] = along_rows(np.ascontiguousarray(steps.zeros.T)).T.contiguous()
    return found


def gptq(shift: int) -> Callable[[Steps], dict[str, Tensor]]:
    def pack(steps: Steps) -> dict[str, Tensor]:
        inputs, groups = steps.ints.shape[1], steps.zeros.shape[1]
        return {
            "qweight": along_rows(steps.ints).T.contiguous(),
            "qzeros": along_rows(np.ascontiguousarray(steps.zeros.T) - shift),
            "scales": steps.scales.T.contiguous(),
            "g_idx": (torch.arange(inputs) // (inputs // groups)).to(torch.int32),
        }

    return pack


def awq(steps: Steps) -> dict[str, Tensor]:
    def ordered(columns: Ints) -> Tensor:
        return words(columns.reshape(len(columns), -1, 8)[..., AWQ_PLACES])

    return {
        "qweight": ordered(np.ascontiguousarray(steps.ints.T)),
        "qzeros": ordered(np.ascontiguousarray(steps.zeros.T)),
        "scales": steps.scales.T.contiguous(),
    }


def compressed_config(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignore: list[str]) -> Any:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "int", "dynamic": False, "actorder": None, "observer": "minmax"} | weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }


W8 = {"num_bits": 8, "symmetric": True, "strategy": "channel", "group_size": None}
A8 = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True, "type": "int", "observer": None}
W4 = {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

SCHEMES = [
    Scheme(
        "compressed W8A8",
        compressed_config("int-quantized", W8, A8, ["lm_head"]),
        compressed_int8,
        group=None,
        symmetric=True,
        bits=8,
        scale_dtype=torch.bfloat16,
    ),
    Scheme(
        "compressed W4A16",
        compressed_config("pack-quantized", W4, None, ["lm_head"]),
        compressed_int4,
        symmetric=True,
        scale_dtype=torch.bfloat16,
    ),
    Scheme(
        "compressed W4A16 with zeros, a layer ignored",
        compressed_config("pack-quantized", W4 | {"symmetric": False}, None, ["lm_head", r"re:.*layers\.1\..*"]),
        compressed_int4,
        kept=("layers.1.",),
    ),
    Scheme(
        "compressed W4A16, one group",
        compressed_config("pack-quantized", W4 | {"strategy": "channel", "group_size": None}, None, ["lm_head"]),
        compressed_int4,
        group=None,
        symmetric=True,
    ),
    Scheme("GPTQ, symmetric", GPTQ, gptq(1), symmetric=True),
    Scheme("GPTQ", GPTQ | {"sym": False, "checkpoint_format": "gptq"}, gptq(1), least_zero=1),
    Scheme("GPTQ v2, one group", GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"}, gptq(0), group=None),
    Scheme("AWQ", AWQ, awq),
    Scheme("AWQ, an MLP left out", AWQ | {"modules_to_not_convert": ["layers.0.mlp"]}, awq, kept=("layers.0.mlp.",)),
]


def is_quantized(name: str, tensor: Tensor, scheme: Scheme) -> bool:
    inner = name.startswith("model.layers.") and name.endswith("_proj.weight") and tensor.dim() == 2
    return inner and not any(part in name for part in scheme.kept)


def quantize_checkpoint(source: Path, scheme: Scheme, target: Path, reference: Path) -> None:
    """Write ``source`` quantized to ``target``, and with the dequantized weights to ``reference``."""
    weights = load_file(source / "model.safetensors")
    packed: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        packed[name] = meant[name] = tensor
        if is_quantized(name, tensor, scheme):
            steps = scheme.steps(tensor)
            del packed[name]
            packed |= {name.removesuffix("weight") + part: value for part, value in scheme.pack(steps).items()}
            meant[name] = steps.plain()
    for folder, held, extra in (
        (target, packed, {"quantization_config": scheme.config}),
        (reference, meant, {}),
    ):
        shutil.copytree(source, folder, dirs_exist_ok=True)
        save_file({name: value.contiguous() for name, value in held.items()}, folder / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | extra))


def round_inputs(model: torch.nn.Module, kept: tuple[str, ...] = ("lm_head",), group: int | None = None) -> None:
    """Round the inputs of transformers' linear layers to 8 bits, with a scale for each row or ``group`` of a row.

    W8A8 and int8 define this rounding. For 4-bit weights, the CPU kernels do it with the groups of the weights.
    """

    def rounded(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        groups = args[0].unflatten(-1, (-1, group or args[0].shape[-1]))
        steps = groups.abs().amax(-1, keepdim=True) / 127
        return (((groups / steps).round() * steps).flatten(-2), *args[1:])

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in kept):
            module.register_forward_pre_hook(rounded)
