"""Selects the format of linear layers' weights, from the checkpoint or the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.lazy import Family
from raylm.models.linear import HEAD, INT4_LINEARS, PLAIN, Quantization, WeightFormat, linear_layers
from raylm.models.quantization.config import read_quantization_config
from raylm.models.quantization.formats import GroupedInt4, RoundedInt4, RoundedInt8
from raylm.models.quantization.fp8 import Fp8Rows, Fp8Tensors, check_fp8
from raylm.models.quantization.fp8_blocks import FP8_BLOCK_LINEARS, Fp8Blocks
from raylm.models.quantization.gguf_blocks import KeptBlocks
from raylm.models.ranks import Ranks
from raylm.native import NativeError, kernels
from raylm.stages import about

logger = logging.getLogger(__name__)

# The description, the format of the layers, and the format of the head. A 4-bit head would cause a fifth of the logits'
# error and a quarter of the divergence, an 8-bit head almost none; see benchmarks/model/quantization_choices.py.
_ROUNDED: dict[str, tuple[str, WeightFormat, WeightFormat]] = {
    "int8": ("int8, head included", RoundedInt8(), RoundedInt8()),
    "int4": ("int4, head int8", RoundedInt4(), RoundedInt8()),
}


class ByModule(Quantization):
    """Formats by the name of the module in the checkpoint."""

    def __init__(self, description: str, format_of: Callable[[str], WeightFormat]) -> None:
        self.description, self._format_of = description, format_of

    def apply(self, model: nn.Module, *, tied: bool) -> None:
        for prefix, layer in linear_layers(model):
            names = [f"{prefix}{part}" for part in layer.parts]
            formats = {self._format_of(name) for name in names}
            if len(formats) > 1:
                raise ConfigError(
                    f"model: only some of {', '.join(names)} are quantized; they form one layer and need one format."
                )
            try:
                layer.expect(formats.pop())
            except ValueError as error:
                raise ConfigError(f"model: {names[0]} cannot be served quantized: {error}.") from error
            if tied and names == [HEAD] and any(layer.stored.values()):
                raise ConfigError(
                    f"model: {HEAD} shares the embedding's weights, which are not quantized; config.json must leave "
                    f"{HEAD} out, by ignore or modules_to_not_convert."
                )


def select_quantization(checkpoint: Checkpoint, asked: str | None, device: torch.device, ranks: Ranks) -> Quantization:
    """The format of the checkpoint, or the format to round plain weights to. Raises ConfigError if not supported."""
    if checkpoint.config.get("quantization_config") is None:
        if asked is None:
            return _kept(checkpoint, device, ranks)
        _check_kernels(f"quantization: {asked} is", device)
        description, layers, head = _ROUNDED[asked]
        return ByModule(description, lambda module: head if module == HEAD else layers)
    if asked is not None:
        raise ConfigError(f"quantization: the weights of {checkpoint} are quantized already; leave it out.")
    if ranks.world_size > 1:
        raise ConfigError(
            f"engine.tensor_parallel_size: the quantized weights of {checkpoint} are served by one rank only."
        )
    description, form, ignored = read_quantization_config(checkpoint)
    what = f"model: the quantized weights of {checkpoint} ({description}) are"
    if isinstance(form, Fp8Blocks):
        if device.type in FP8_BLOCK_LINEARS:
            check_fp8(what, device)
            _check_triton(what, device, FP8_BLOCK_LINEARS)
        else:
            description += ", served as floats"
    elif isinstance(form, (Fp8Rows, Fp8Tensors)):
        check_fp8(what, device)
    elif isinstance(form, GroupedInt4) and device.type in INT4_LINEARS:
        _check_triton(what, device, INT4_LINEARS)
    else:
        _check_kernels(what, device)
    return ByModule(description, lambda module: PLAIN if ignored(module) else form)


def _kept(checkpoint: Checkpoint, device: torch.device, ranks: Ranks) -> Quantization:
    """The blocks of a GGUF file as they are, or floats where no kernel multiplies them."""
    kept = KeptBlocks(checkpoint)
    if kept.description is None:
        return Quantization()
    reason = f"{device} multiplies floats" if device.type != "cpu" else None
    if ranks.world_size > 1:
        reason = "several ranks multiply floats"
    try:
        if reason is None:
            kernels()
            return kept
    except NativeError as error:
        reason = str(error)
    logger.warning("The weights of %s are floats in memory: %s.", checkpoint, reason, extra=about("slower"))
    return Quantization()


def _check_triton(what: str, device: torch.device, linears: Family[Any]) -> None:
    try:
        linears[device.type]
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} served on {device} by a Triton kernel only, and there is none: {error}") from error


def _check_kernels(what: str, device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigError(f"{what} served on a CPU only; this worker's device is {device}.")
    try:
        kernels()
    except NativeError as error:
        raise ConfigError(f"{what} served by the native kernels only, and there are none: {error}") from error
