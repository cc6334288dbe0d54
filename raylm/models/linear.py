"""Linear layers: weights of one or several stacked checkpoint modules, with an exchangeable kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm.lazy import Family
from raylm.native import Int4Weight, NativeError, NativeLinear, Weight, kernels
from raylm.stages import about

logger = logging.getLogger(__name__)

HEAD = "lm_head"
LinearKernel = Callable[[Tensor], Tensor]
KernelFactory = Callable[[Weight, Tensor | None], LinearKernel]


# Kernels for 4-bit weights by device, besides the native kernels for CPUs. Other devices are not supported.
INT4_LINEARS = Family[Callable[[Int4Weight, Tensor | None], LinearKernel]]({
    "cuda": "raylm.models.gpu.int4:Int4Linear",
})  # fmt: skip
# Kernels for plain weights by device. Other devices use torch's product.
DENSE_LINEARS = Family[Callable[[Tensor, Tensor | None], LinearKernel]]({
    "cuda": "raylm.models.gpu.row_product:RowLinear",
})  # fmt: skip


class Weighted(nn.Module):
    """A module that owns checkpoint weights."""

    def targets(self, path: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, memory to load it into) of this module, whose path in the model is ``path``."""
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter

    def freeze(self, kernels: KernelFactory) -> None:
        """Convert the weights to the form of the forward pass. Called once after loading."""


def unfilled(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class WeightFormat:
    """The storage format of a linear layer's weight in a checkpoint. This class is for plain floats."""

    def tensors(self, rows: int, inputs: int) -> dict[str, Tensor]:
        """Memory by name for the tensors of a part in place of ``weight``.

        Raises ValueError for shapes it does not support.
        """
        return {}

    def weight(self, layer: Linear) -> Weight:
        """The loaded weights of ``layer``, with its parts stacked. Raises ConfigError if no kernel supports them."""
        assert layer.weight is not None
        return layer.weight.data

    def freeze(self, layer: Linear, kernels: KernelFactory) -> tuple[LinearKernel, int]:
        """The kernel for the loaded weights of ``layer``, and the bytes of these weights."""
        weight = self.weight(layer)
        return kernels(weight, None if layer.bias is None else layer.bias.data), weight.nbytes


PLAIN = WeightFormat()


class Linear(Weighted):
    """(tokens, in_features) -> (tokens, out_features). After ``freeze`` only the kernel has the weights.

    ``parts`` are the checkpoint modules that are stacked along the output, such as q, k and v, with their number of
    rows. ``dtype`` is the model's dtype, for any format of weights.
    """

    dtype = torch.float32

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__()
        self.in_features, self.parts = in_features, dict(parts)
        self.weight: nn.Parameter | None = unfilled(sum(parts.values()), in_features)
        self.bias = unfilled(sum(parts.values())) if bias else None
        self.format: WeightFormat = PLAIN
        self.stored: dict[str, dict[str, Tensor]] = {}
        self.kernel: LinearKernel | None = None
        self.nbytes = 0

    def expect(self, form: WeightFormat) -> None:
        """Prepare for weights of this format. Raises ValueError if it does not support the shape."""
        self.store(form, {part: form.tensors(rows, self.in_features) for part, rows in self.parts.items()})

    def store(self, form: WeightFormat, stored: dict[str, dict[str, Tensor]]) -> None:
        """Prepare for weights of this format, which are loaded into ``stored``, by part and name."""
        self.format, self.stored = form, stored
        if any(self.stored.values()):
            self.weight = None

    def targets(self, path: str) -> Iterator[tuple[str, Tensor]]:
        start, prefix = 0, prefix_of(path)
        for part, rows in self.parts.items():
            for name, tensor in self.stored.get(part, {}).items():
                yield f"{prefix}{part}.{name}", tensor
            for name, parameter in self.named_parameters(recurse=False):
                yield f"{prefix}{part}.{name}", parameter[start : start + rows]
            start += rows

    def freeze(self, kernels: KernelFactory) -> None:
        self.kernel, self.nbytes = self.format.freeze(self, kernels)
        self.weight, self.bias, self.stored = None, None, {}

    def forward(self, x: Tensor) -> Tensor:
        assert self.kernel is not None, "a linear layer is used before its weights are loaded"
        return self.kernel(x)


class Head(Linear):
    """Computes logits. On a GPU, sums are returned in float32 without rounding.

    Rounded to bfloat16, logits from 8 on would differ by steps of 0.06. Among tokens within a step, the first would be
    drawn, not the best.
    """

    def freeze(self, kernels: KernelFactory) -> None:
        narrow = self.weight is not None and self.weight.is_cuda and self.weight.dtype != torch.float32
        super().freeze(_unrounded if narrow else kernels)


def prefix_of(path: str) -> str:
    """The prefix of names of modules that have the same parent as ``path``."""
    return "".join(path.rpartition(".")[:2])


def linear_layers(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """The linear layers of a model, each with the prefix of its parts' names in the checkpoint."""
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            yield prefix_of(path), module


class Quantization:
    """The formats of a model's linear layers, here plain floats. ``description`` is shown to users."""

    description: str | None = None

    def apply(self, model: nn.Module, *, tied: bool) -> None:
        """Set the formats of the layers. A ``tied`` head has no weights of its own. Raises ConfigError."""


def _unrounded(weight: Weight, bias: Tensor | None) -> LinearKernel:
    """The product in float32. Only GPUs support it for narrower inputs."""
    assert isinstance(weight, Tensor), "quantized weights are not served on a GPU"

    def multiply(x: Tensor) -> Tensor:
        if not len(x):  # a step of partial prompts draws no token
            return x.new_empty((0, len(weight)), dtype=torch.float32)
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out + bias

    return multiply


def dense(weight: Weight, bias: Tensor | None) -> LinearKernel:
    """torch's product, on any device, or the device's kernel for 4-bit weights."""
    if isinstance(weight, Int4Weight) and weight.values.device.type in INT4_LINEARS:
        return INT4_LINEARS[weight.values.device.type](weight, bias)
    assert isinstance(weight, Tensor), "quantized weights need the native kernels"
    if weight.device.type in DENSE_LINEARS and weight.dtype != torch.float32:
        with suppress(ModuleNotFoundError):  # without triton; select_elementwise logs it
            return DENSE_LINEARS[weight.device.type](weight, bias)
    return lambda x: F.linear(x, weight, bias)


def prepacked(weight: Weight, bias: Tensor | None) -> LinearKernel:
    """oneDNN's kernel on a reordered copy: up to four times as fast for few rows. Private to torch: see ``probe``."""
    assert isinstance(weight, Tensor), "quantized weights need the native kernels"
    packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight, None), torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


def select_kernels(device: torch.device, dtype: torch.dtype) -> KernelFactory:
    """The fastest kernel that works on this machine. Logs a warning if a slower one is used."""
    if device.type != "cpu":
        return dense
    try:
        return partial(NativeLinear, kernels())
    except NativeError as error:
        logger.warning("The native kernels are not used, and decoding is slower: %s", error, extra=about("slower"))
    reason = probe(dtype)
    if reason is None:
        return prepacked
    logger.warning("Linear layers run without prepacked weights, and slower: %s", reason, extra=about("slower"))
    return dense


def probe(dtype: torch.dtype) -> str | None:
    """The reason why the prepacked kernel cannot be used; None if a small product is right."""
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
