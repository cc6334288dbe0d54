"""transformers' attention interface, filled with paged attention: what its modeling code calls in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from raylm.models.causal_lm import Attend, AttentionSpec

PAGED = "raylm_paged"
PROBED = "raylm_probed"  # the same, but masks are made too, for inspection.py


class AttentionCall(Protocol):
    """What a layer's attention calls: ``q``, ``k``, ``v`` (1, heads, tokens, head_dim) -> (1, tokens, heads, head_dim).

    ``mask`` and ``options`` are what the modeling code passes for this ``module`` besides.
    """

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, options: dict[str, Any]
    ) -> Tensor: ...


@dataclass(eq=False)
class CurrentAttention:
    """The attention of the forward pass that runs now, which every module of one model refers to.

    Not a keyword of the forward pass: some modeling code does not hand keywords on to its attention.
    """

    call: AttentionCall | None = None

    def attach(self, model: nn.Module) -> None:
        for module in model.modules():
            module.raylm_attention = self  # type: ignore[assignment]


class PagedCall:
    """Hands each layer's queries, keys and values to ``attend``, with what that layer's attention was found to be."""

    def __init__(self, specs: dict[nn.Module, AttentionSpec], attend: Attend) -> None:
        self._specs, self._attend = specs, attend

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, options: dict[str, Any]
    ) -> Tensor:
        return self._attend(self._specs[module], heads_last(q), heads_last(k), heads_last(v))[None]


def heads_last(x: Tensor) -> Tensor:
    """(1, heads, tokens, head_dim) -> (tokens, heads, head_dim), each token's heads one after the other in memory."""
    x = x[0].transpose(0, 1)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    """The function that the modeling code finds under the names above."""
    current: CurrentAttention = module.raylm_attention  # type: ignore[assignment]
    assert current.call is not None, "the model is not run by TransformersForCausalLM"
    return current.call(module, query, key, value, attention_mask, options), None


def register(probed_mask: Any) -> None:
    """Make both names known to transformers; ``probed_mask`` makes the masks of ``PROBED``."""
    for name in (PAGED, PROBED):
        AttentionInterface.register(name, paged_attention)
    AttentionMaskInterface.register(PROBED, probed_mask)
