"""Paged attention on NVIDIA GPUs by xformers' split-k operator."""

from __future__ import annotations

import torch

from raylm.models import AttentionSpec
from raylm.worker.gpu.probe import probe
from raylm.worker.gpu.split_k import HEAD_DIMS, SplitK, refusals
from raylm.worker.gpu.tiled import TiledBackend


class XformersBackend(TiledBackend):
    """Uses SplitK. Serves heads of 512, or where ``engine.attention_backend`` asks for it."""

    name = "xformers"
    attention = SplitK

    @classmethod
    def supports(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> list[str]:
        if device.type != "cuda":
            return ["it computes on NVIDIA GPUs only"]
        reasons = refusals(dtype, device)
        if spec.head_dim not in HEAD_DIMS:
            reasons.append(f"it has no head_dim {spec.head_dim}, only {', '.join(map(str, sorted(HEAD_DIMS)))}")
        if spec.sliding_window is not None:
            reasons.append("it has no sliding windows over pages")
        if spec.softcap is not None:
            reasons.append("it has no soft capping of scores")
        if not reasons and (wrong := probe(cls, spec.kind, dtype, device, block_size)):
            reasons.append(wrong)
        return reasons
