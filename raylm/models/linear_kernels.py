"""How loaded linear layers multiply: the kernels there are, and the choice by device and dtype."""

from __future__ import annotations

import logging
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.models.linear import KernelFactory, LinearKernel
from raylm.native import NativeError, NativeLinear, Weight, kernels

logger = logging.getLogger(__name__)


def dense(weight: Weight, bias: Tensor | None) -> LinearKernel:
    """The plain kernel: weights as in the checkpoint, on any device."""
    assert isinstance(weight, Tensor), "quantized weights need the native kernels"
    return lambda x: F.linear(x, weight, bias)


def prepacked(weight: Weight, bias: Tensor | None) -> LinearKernel:
    """oneDNN's kernel over weights reordered once: up to four times as fast for few rows on a CPU.

    The original weights are not kept. The operators are private to torch: see ``probe``.
    """
    assert isinstance(weight, Tensor), "quantized weights need the native kernels"
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


def select_kernels(device: torch.device, dtype: torch.dtype) -> KernelFactory:
    """The fastest kernel that works on this machine; a slower one than usual is named in the log."""
    if device.type != "cpu":
        return dense
    try:
        native = kernels()
    except NativeError as error:
        logger.warning("The native kernels are not used, and decoding is slower: %s", error)
    else:
        return partial(NativeLinear, native)
    reason = probe(dtype)
    if reason is None:
        return prepacked
    logger.warning("Linear layers run without prepacked weights, and slower: %s", reason)
    return dense


def probe(dtype: torch.dtype) -> str | None:
    """Try the prepacked kernel on a small product; say why it cannot be used, None if it can."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no AVX-512, which oneDNN's bfloat16 needs"
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 64), (96, 64)))
    try:
        got = prepacked(weight, None)(x)
    except (AttributeError, RuntimeError) as error:
        return f"this torch build does not offer it ({error})"
    wanted = F.linear(x.double(), weight.double())
    wrong = float((got.double() - wanted).abs().max() / wanted.abs().max())
    return None if wrong < 0.02 else f"its results are wrong by {wrong:.3f}"
