"""Paged attention: the interface, and the backends in order of preference. A backend is imported when it is tried."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from raylm.errors import ConfigError
from raylm.lazy import Family
from raylm.models import AttentionSpec
from raylm.stages import about
from raylm.worker.attention.base import AnyBackend, AttentionBackend, AttentionMetadata, StepLimits

__all__ = ["BACKENDS", "AnyBackend", "AttentionBackend", "AttentionMetadata", "StepLimits", "select_backend"]

logger = logging.getLogger(__name__)

BACKENDS = Family[type[AnyBackend]]({
    "triton": "raylm.worker.gpu.triton_attention:TritonBackend",
    "xformers": "raylm.worker.gpu.xformers:XformersBackend",
    "cpu": "raylm.worker.attention.cpu:CpuBackend",
    "sdpa": "raylm.worker.attention.sdpa:SdpaBackend",
})  # fmt: skip
FP8_BACKENDS = Family[type[AnyBackend]]({
    "triton-fp8": "raylm.worker.gpu.triton_attention:Fp8TritonBackend",
})  # fmt: skip


def select_backend(
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    *,
    fp8: bool = False,
    asked: str = "auto",
) -> type[AnyBackend]:
    """The first backend that supports all layers. The log says why a preferred backend for this device does not.

    ``asked`` is the only one to try, unless it is 'auto'.

    Raises:
        ConfigError: no backend, or not the one asked for, supports the model.
    """
    refusals: list[str] = []
    passed_over: list[str] = []
    for name, backend in (FP8_BACKENDS if fp8 else BACKENDS).items():
        if asked not in ("auto", name.removesuffix("-fp8")):
            continue
        reasons = {reason for spec in set(specs) for reason in backend.supports(spec, dtype, device, block_size)}
        if not reasons:
            if passed_over and backend.device_type == device.type:
                logger.info("Attention is computed by %s: %s", name, "; ".join(passed_over), extra=about("attention"))
            elif passed_over:
                logger.warning(
                    "Attention is computed by %s, and slower: %s", name, "; ".join(passed_over), extra=about("slower")
                )
            return backend
        refusals.append(f"{name}: {', '.join(sorted(reasons))}")
        if backend.device_type == device.type:
            passed_over.append(refusals[-1])
    what = "cache.dtype: no attention backend serves keys and values in fp8 here" if fp8 else ""
    if asked != "auto":
        what = f"engine.attention_backend: {asked} does not serve {'keys and values in fp8' if fp8 else 'it'} here"
    raise ConfigError(f"{what or 'model: no attention backend serves it'} ({'; '.join(refusals) or 'there is none'}).")
