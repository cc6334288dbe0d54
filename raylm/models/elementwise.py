"""Elementwise operations of a decoder layer: by torch here, by fused kernels on GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.lazy import Family
from raylm.stages import about

logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The norm of every query and key head: ``weight`` (num_heads + num_kv_heads, head_dim)."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class KVPlaces:
    """The places of a step's keys and values: pools (slots, num_kv_heads, head_dim), and each token's slot, int64.

    fp8 pools store keys and values divided by their scales.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0

    def write(self, k: Tensor, v: Tensor) -> None:
        """Write ``k`` and ``v`` (tokens, num_kv_heads, head_dim)."""
        for pool, rows, scale in ((self.keys, k, self.key_scale), (self.values, v, self.value_scale)):
            if pool.dtype == FP8:  # as bytes, because torch has no index_copy_ for fp8
                pool, rows = pool.view(torch.uint8), as_fp8(rows, scale).view(torch.uint8)
            pool.index_copy_(0, self.slots, rows)


class Elementwise:
    """Implemented by torch's operations, on any device."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``x + delta`` and its norm, both (tokens, features). May overwrite ``x``."""
        if delta is not None:
            x = x + delta
        return x, F.rms_norm(x, weight.shape, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """(tokens, 2 * inner) -> (tokens, inner)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, qk: Tensor, angles: Angles, norm: HeadWeights | None) -> Tensor:
        """Rotate the heads of ``qk`` (tokens, num_heads + num_kv_heads, head_dim), after ``norm`` if it is given."""
        if norm is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], None, norm.eps) * norm.weight
        return rotate(qk, angles)

    def rotate_and_write(self, qkv: Tensor, angles: Angles, norm: HeadWeights | None, places: KVPlaces) -> Tensor:
        """Rotate queries and keys, and write keys and values to their places. Returns the queries.

        ``qkv`` (tokens, num_heads + 2 * num_kv_heads, head_dim) -> (tokens, num_heads, head_dim).
        """
        kv_heads = places.keys.shape[1]
        heads = qkv.shape[1] - 2 * kv_heads
        qk = self.rotate(qkv[:, : heads + kv_heads], angles, norm)
        places.write(qk[:, heads:], qkv[:, heads + kv_heads :])
        return qk[:, :heads]


TORCH = Elementwise()
# By device. Other devices use torch's operations.
ELEMENTWISE = Family[Callable[[], Elementwise]]({
    "cuda": "raylm.models.gpu.elementwise:TritonElementwise",
})  # fmt: skip


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the halves of the heads of ``x`` (tokens, heads, head_dim), in four operations."""
    cos, sin = angles
    left, right = x.chunk(2, dim=-1)
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_left, out_right = rotated.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin)
    return rotated


def as_fp8(x: Tensor, scale: float) -> Tensor:
    """``x`` divided by ``scale``, rounded to nearest. Values beyond the range of fp8 become its largest value."""
    return (x.float() * (1.0 / scale)).clamp_(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def select_elementwise(device: torch.device) -> Elementwise:
    """The fastest implementation on ``device``. Logs a warning if a slower one is used."""
    if device.type not in ELEMENTWISE:
        return TORCH
    try:
        return ELEMENTWISE[device.type]()
    except ModuleNotFoundError as error:
        logger.warning(
            "Norms, rotations and activations are computed by torch, and slower: %s", error, extra=about("slower")
        )
        return TORCH
