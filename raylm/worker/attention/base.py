"""The interface between the model runner and the backends of paged attention."""

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
    """The limits of every step. Memory is preallocated for them. ``max_blocks`` is per sequence."""

    max_num_tokens: int
    max_num_seqs: int
    max_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The places of one step's tokens. The first ``num_decodes`` sequences have one token each.

    On the device, views of buffers that stay in place from step to step:
        slot_mapping    (tokens,) int64: slot (block id * block_size + offset) of each token's key and value
        block_tables    (seqs, width) int32: the KV blocks of each sequence, in order; arbitrary values after them
        seq_lens        (seqs,) int32: number of tokens of each sequence after this step
        query_start_loc (seqs + 1,) int32: index of each sequence's first token in the step
    The last two are also on the host. The tokens of a sequence in a step are its last tokens.
    """

    num_decodes: int
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    seq_lens_host: NDArray[np.int32]
    query_start_loc_host: NDArray[np.int32]


class AttentionBackend(ABC, Generic[PlanT]):
    """Writes keys and values into the paged pool and computes attention over it.

    ``device_type`` is the device for which the backend is optimized. ``kv_dtype`` is the dtype of its pool if it
    differs from the model's. ``capturable`` says that a step which only decodes can be replayed as a graph: from the
    host it reads only the number of sequences and an upper bound of the longest length.
    """

    name: ClassVar[str]
    device_type: ClassVar[str | None] = None
    kv_dtype: ClassVar[torch.dtype | None] = None
    capturable: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, limits: StepLimits) -> None:
        """Allocate memory that steps reuse. No step exceeds ``limits``."""

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> list[str]:
        """The reasons why this backend cannot compute a layer; empty if it can."""

    @classmethod
    @abstractmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, spec: AttentionSpec) -> tuple[int, ...]:
        """The shape of one layer's pool."""

    def compile_all(self, layers: Sequence[tuple[AttentionSpec, Tensor]], dtype: torch.dtype) -> None:
        """Compile the kernels of all steps within the limits, for these layers and their pools. Called once, at start.

        ``dtype`` is the dtype of the queries.
        """

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata) -> PlanT:
        """Compute the plan that all layers of a step share. Called once a step."""

    def plan_in_place(
        self, tokens: int, width: int, specs: Sequence[AttentionSpec], scratch_slot: int, device: torch.device
    ) -> PlanT | None:
        """A plan with fixed memory, for replayed steps of ``tokens`` tokens that include prompts.

        Block tables are ``width`` blocks wide; ``specs`` are the layers. Until ``refill`` is called, all tokens are
        written to ``scratch_slot``. None if the backend does not support it.
        """
        return None

    def refill(self, plan: PlanT, metadata: AttentionMetadata, scratch_slot: int) -> bool:
        """Copy a step to a plan with fixed memory. Padding is written to the slot.

        Returns False if the step does not fit.
        """
        raise AssertionError("it has no plan that stays in place")

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: PlanT, layer: AttentionSpec) -> Tensor:
        """Write ``k`` and ``v`` (tokens, num_kv_heads, head_dim) into ``kv`` by the slot mapping, then attend.

        All of them are written first, because a sequence may share blocks that another one computes in the same step.
        ``q`` and the result are (tokens, num_heads, head_dim). Never reads a slot without a token of the sequence: it
        may hold another sequence's values, or NaN.
        """

    def places(self, kv: Tensor, plan: PlanT, layer: AttentionSpec) -> KVPlaces | None:
        """Where in ``kv`` the layer itself writes the step's keys and values before ``attend``. None if it must not."""
        return None

    def attend(self, q: Tensor, kv: Tensor, plan: PlanT, layer: AttentionSpec) -> Tensor:
        """Like ``forward``, after the layer has written keys and values to ``places``."""
        raise AssertionError("it writes keys and values itself")


class PagedBackend(AttentionBackend[PlanT]):
    """A backend with a pool of shape (2, blocks, block_size, kv_heads, head_dim)."""

    @classmethod
    def kv_cache_shape(cls, num_blocks: int, block_size: int, spec: AttentionSpec) -> tuple[int, ...]:
        return (2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)


def kv_places(kv: Tensor, metadata: AttentionMetadata, layer: AttentionSpec) -> KVPlaces:
    """The places of a step's keys and values in the pool of a PagedBackend."""
    keys, values = kv.flatten(1, 2).unbind(0)
    return KVPlaces(keys, values, metadata.slot_mapping, layer.key_scale, layer.value_scale)


AnyBackend = AttentionBackend[Any]
