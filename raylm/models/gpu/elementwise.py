"""Launches the kernels of kernels.py in place of torch's operations."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from raylm.models.elementwise import Angles, Elementwise, HeadWeights, KVPlaces
from raylm.models.gpu import kernels
from raylm.models.gpu.dependent_launch import early

_INNER = 1024  # columns of one program of silu_and_mul
_HEADS = 8  # heads of one program of rotate_and_write


class TritonElementwise(Elementwise):
    """One launch for each operation, with sums and products in float32. ``rotate`` uses torch."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Overwrites ``x`` with the sum."""
        tokens, size = x.shape
        out = torch.empty_like(x)
        width = triton.next_power_of_2(size)
        if tokens:
            kernels.add_rms_norm[tokens,](
                x, delta, weight, out, size, eps,
                HAS_DELTA=delta is not None, WIDTH=width, num_warps=max(1, min(16, width // 512)), **early(x.device),
            )  # fmt: skip
        return x, out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        tokens, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, size)
        if tokens:
            kernels.silu_and_mul[tokens, triton.cdiv(size, _INNER)](
                gate_up, out, size, WIDTH=_INNER, **early(out.device)
            )
        return out

    def rotate_and_write(self, qkv: Tensor, angles: Angles, norm: HeadWeights | None, places: KVPlaces) -> Tensor:
        tokens, rows, head_dim = qkv.shape
        kv_heads = places.keys.shape[1]
        q = qkv.new_empty(tokens, rows - 2 * kv_heads, head_dim)
        if tokens:
            kernels.rotate_and_write[tokens, triton.cdiv(rows, _HEADS)](
                qkv, *angles, None if norm is None else norm.weight, 0.0 if norm is None else norm.eps,
                q, places.keys, places.values, places.slots, 1.0 / places.key_scale, 1.0 / places.value_scale,
                rows - 2 * kv_heads, kv_heads, head_dim // 2,
                HAS_NORM=norm is not None, HEADS=_HEADS, WIDTH=triton.next_power_of_2(head_dim // 2),
                **early(q.device),
            )  # fmt: skip
        return q
