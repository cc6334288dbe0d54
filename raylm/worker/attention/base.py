"""The one interface between the model runner and paged attention, whatever computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raylm.models import AttentionSpec, KVPlaces

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that will ever be run; memory is preallocated by these."""

    max_num_tokens: int
    max_num_seqs: int
    max_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step lie; sequences with one token first (``num_decodes`` of them).

    On the device, views of buffers that stay in place from step to step:
        slot_mapping    (tokens,) int64: block id * block_size + offset that each token's k and v are written to
        block_tables    (seqs, width) int32: the KV blocks of each sequence, in order; beyond its own, anything
        seq_lens        (seqs,) int32: tokens of each sequence after this step
        query_start_loc (seqs + 1,) int32: where the tokens of each sequence begin
    and the last two again on the host. The tokens of a sequence in a step are its last ones.
    """

    num_decodes: int
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    seq_lens_host: NDArray[np.int32]
    query_start_loc_host: NDArray[np.int32]


class AttentionBackend(ABC, Generic[PlanT]):
    """Writes keys and values into the paged pool and attends over it.

    ``device_type`` is what it was made for, ``kv_dtype`` the type of its pool where that is not the model's. With
    ``capturable`` a step that only decodes can be replayed: from the host it takes nothing but the number of sequences
    and the length of the longest one, and it may be longer.
    """

    name: ClassVar[str]
    device_type: ClassVar[str | None] = None
    kv_dtype: ClassVar[torch.dtype | None] = None
    capturable: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, limits: StepLimits) -> None:
        """No step will be larger than ``limits``: what steps reuse can be allocated here."""

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> list[str]:
        """Why this backend cannot serve a layer; empty if it can."""

    @classmethod
    @abstractmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, spec: AttentionSpec) -> tuple[int, ...]:
        """The shape of one layer's pool."""

    def compile_all(self, layers: Sequence[tuple[AttentionSpec, Tensor]], dtype: torch.dtype) -> None:
        """Compile what any step within the limits may need, for these layers and their pools; called once, at start.

        ``dtype`` is that of the queries.
        """

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata) -> PlanT:
        """Called once a step: what all layers can share."""

    def plan_in_place(
        self, tokens: int, width: int, specs: Sequence[AttentionSpec], scratch_slot: int, device: torch.device
    ) -> PlanT | None:
        """A plan whose memory stays in place, for steps of so many tokens, with prompts, that can be replayed.

        Tables are ``width`` blocks wide, the layers those of ``specs``; until a step is taken over all tokens are
        written to ``scratch_slot``. None if the backend has none.
        """
        return None

    def refill(self, plan: PlanT, metadata: AttentionMetadata, scratch_slot: int) -> bool:
        """Take a step over into a plan that stays in place, False if it does not fit; what pads goes to the slot."""
        raise AssertionError("it has no plan that stays in place")

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: PlanT, layer: AttentionSpec) -> Tensor:
        """Write ``k`` and ``v`` (tokens, num_kv_heads, head_dim) into ``kv`` by the slot mapping, then attend.

        All are written first: a sequence may share blocks with one that computes them in the same step.
        ``q`` (tokens, num_heads, head_dim) -> as ``q``. Never reads a slot that no token of the sequence was
        written to: what lies there may be another sequence's, or not a number.
        """

    def places(self, kv: Tensor, plan: PlanT, layer: AttentionSpec) -> KVPlaces | None:
        """Where in ``kv`` the layer itself may write the step's keys and values, and then call ``attend``."""
        return None

    def attend(self, q: Tensor, kv: Tensor, plan: PlanT, layer: AttentionSpec) -> Tensor:
        """As ``forward``, behind keys and values that have been written to their ``places``."""
        raise AssertionError("it writes keys and values itself")


class PagedBackend(AttentionBackend[PlanT]):
    """Any with a pool of (2, blocks, block_size, kv_heads, head_dim)."""

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, spec: AttentionSpec) -> tuple[int, ...]:
        return (2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)


def kv_places(kv: Tensor, metadata: AttentionMetadata, layer: AttentionSpec) -> KVPlaces:
    """Where a step's keys and values go in the pool of a PagedBackend."""
    keys, values = kv.flatten(1, 2).unbind(0)
    return KVPlaces(keys, values, metadata.slot_mapping, layer.key_scale, layer.value_scale)


AnyBackend = AttentionBackend[Any]
