"""Implements transformers' attention interface, which its modeling code calls in every layer, by paged attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

PAGED = "raylm_paged"
PROBED = "raylm_probed"  # also builds masks, for inspection.py
# (module, q, k, v, mask, options) -> (1, tokens, heads, head_dim), with q, k and v (1, heads, tokens, head_dim).
AttentionCall = Callable[[nn.Module, Tensor, Tensor, Tensor, object, dict[str, Any]], Tensor]


class CurrentAttention:
    """The attention of the current forward pass. Every module of ``model`` has a reference to it.

    It is not a keyword of the forward pass, because some modeling code does not pass keywords to its attention.
    """

    def __init__(self, model: nn.Module) -> None:
        self.call: AttentionCall | None = None
        for module in model.modules():
            module.raylm_attention = self  # type: ignore[assignment]


def heads_last(x: Tensor) -> Tensor:
    """(1, heads, tokens, head_dim) -> (tokens, heads, head_dim), where each token's heads are contiguous."""
    x = x[0].transpose(0, 1)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    current: CurrentAttention = module.raylm_attention  # type: ignore[assignment]
    assert current.call is not None, "the model is not run by TransformersForCausalLM"
    return current.call(module, query, key, value, attention_mask, options), None


AttentionInterface.register(PAGED, paged_attention)
AttentionInterface.register(PROBED, paged_attention)
