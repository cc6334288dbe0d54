"""probe: compares an attention backend on this device with torch's attention, before it serves."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from raylm.models import AttentionSpec
from raylm.worker.attention.base import AnyBackend, AttentionMetadata, StepLimits
from raylm.worker.attention.sdpa import SdpaBackend

_TOLERANCE = 0.02  # of the largest value; bfloat16 has a relative error of 0.004
_TABLES = ((5, 1, 6, 0), (3, 2, 7, 4))  # blocks of two sequences


@lru_cache
def probe(
    backend: type[AnyBackend], spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int
) -> str | None:
    """Run one decode and one prefill, both with past tokens. Returns the fault, None if the results agree.

    An exception of a kernel is a fault too. Compilers and drivers raise many kinds of errors, and each means that
    another backend must serve.
    """
    try:
        wrong = _disagreement(backend, spec, dtype, device, block_size)
    except Exception as error:
        return f"it fails on this device ({type(error).__name__}: {error})"
    return None if wrong < _TOLERANCE else f"its results are wrong by {wrong:.3f} on this device"


def _disagreement(
    backend: type[AnyBackend], spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int
) -> float:
    """The largest difference to torch's attention in float32, relative to the largest value."""
    metadata = _metadata(block_size, device)
    tokens, limits = len(metadata.slot_mapping), StepLimits(4 * block_size, 2, 4, block_size)
    generator = torch.Generator().manual_seed(0)
    held = backend.kv_dtype or dtype
    kv, q, k, v = (
        torch.randn(shape, generator=generator).to(kind).to(device)
        for shape, kind in (
            (SdpaBackend.kv_cache_shape(8, block_size, spec), held),
            ((tokens, spec.num_heads, spec.head_dim), dtype),
            ((tokens, spec.num_kv_heads, spec.head_dim), held),
            ((tokens, spec.num_kv_heads, spec.head_dim), held),
        )
    )
    reference = SdpaBackend(limits)
    wanted = reference.forward(q.float(), k.float(), v.float(), kv.float(), reference.prepare(metadata), spec)
    tried = backend(limits)
    got = tried.forward(q, k.to(dtype), v.to(dtype), kv, tried.prepare(metadata), spec)
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


def _metadata(block_size: int, device: torch.device) -> AttentionMetadata:
    """One token after 2.5 blocks of one sequence; two blocks and one token after half a block of another."""
    ends = np.array([2 * block_size + block_size // 2 + 1, 2 * block_size + block_size // 2 + 1], np.int32)
    starts = np.array([0, 1, 2 * block_size + 2], np.int32)
    positions = np.concatenate([np.arange(ends[0] - 1, ends[0]), np.arange(block_size // 2, ends[1])])
    tables = np.array(_TABLES, np.int32)
    owners = np.repeat([0, 1], np.diff(starts))
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    columns = [torch.from_numpy(column).to(device) for column in (slots, tables, ends, starts)]
    return AttentionMetadata(1, columns[0], columns[1], columns[2], columns[3], ends, starts)
