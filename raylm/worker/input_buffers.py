"""InputBuffers: preallocated memory for a step's tokens, positions and block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raylm.native import AdapterRun
from raylm.worker.arrays import Ints
from raylm.worker.attention import AttentionMetadata, StepLimits
from raylm.worker.input_batch import InputBatch
from raylm.worker.step_batch import StepBatch


class Column:
    """An array on the host and its copy on the device. On a CPU both are the same memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        staged = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._staged = staged
        self._device = staged if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self.host: NDArray[Any] = staged.numpy()

    def upload(self, count: int) -> Tensor:
        """Copy the first ``count`` entries to the device. The host may write again when the step has ended."""
        if self._device is not self._staged:
            self._device[:count].copy_(self._staged[:count], non_blocking=True)
        return self._device[:count]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step, flattened: ``input_ids`` and ``positions`` (tokens,) int64, their slots, and adapters.

    In all stages of a pipeline but the first, ``stream`` is the result of the stage before.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    adapters: Sequence[AdapterRun] = ()
    stream: Tensor | None = None


class InputBuffers:
    """Builds the inputs of each step in the same memory."""

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        tokens, seqs = limits.max_num_tokens, limits.max_num_seqs
        self._limits = limits
        self._input_ids = Column((tokens,), torch.int64, device)
        self._positions = Column((tokens,), torch.int64, device)
        self._slot_mapping = Column((tokens,), torch.int64, device)
        self._block_tables = Column((seqs, limits.max_blocks), torch.int32, device)
        self._seq_lens = Column((seqs,), torch.int32, device)
        self._query_start_loc = Column((seqs + 1,), torch.int32, device)

    def build(self, step: StepBatch, batch: InputBatch, adapters: Sequence[AdapterRun] = ()) -> StepInputs:
        """Build the inputs of a step. Its draft tokens are in the batch after the known tokens.

        Raises:
            RuntimeError: the step exceeds the limits, or computes tokens that are unknown or have no block.
        """
        rows, computed, counts, size = step.rows, step.computed, step.counts, self._limits.block_size
        self._check(computed + counts, step, batch)
        seqs, tokens = len(rows), int(counts.sum())
        starts = self._query_start_loc.host[: seqs + 1]
        np.cumsum(counts, out=starts[1:])
        self._seq_lens.host[:seqs] = computed + counts
        self._block_tables.host[:seqs] = batch.block_tables[rows]
        token_rows, shifts = np.repeat(rows, counts), np.repeat(computed - starts[:-1], counts)
        positions = np.add(np.arange(tokens), shifts, out=self._positions.host[:tokens])
        self._input_ids.host[:tokens] = batch.token_ids[token_rows, positions]
        blocks = batch.block_tables[token_rows, positions // size].astype(np.int64)
        np.add(blocks * size, positions % size, out=self._slot_mapping.host[:tokens])
        metadata = AttentionMetadata(
            num_decodes=int((counts == 1).sum()),
            slot_mapping=self._slot_mapping.upload(tokens),
            block_tables=self._block_tables.upload(seqs),
            seq_lens=self._seq_lens.upload(seqs),
            query_start_loc=self._query_start_loc.upload(seqs + 1),
            seq_lens_host=self._seq_lens.host[:seqs],
            query_start_loc_host=starts,
        )
        return StepInputs(self._input_ids.upload(tokens), self._positions.upload(tokens), metadata, adapters)

    def _check(self, ends: Ints, step: StepBatch, batch: InputBatch) -> None:
        rows, counts = step.rows, step.counts
        if len(rows) > self._limits.max_num_seqs or counts.sum() > self._limits.max_num_tokens:
            raise RuntimeError(f"a step of {counts.sum()} tokens of {len(rows)} sequences exceeds {self._limits}")
        if (ends > batch.num_tokens[rows] + step.drafts).any() or (counts < 1).any():
            raise RuntimeError("a step schedules tokens that are not known yet, or none of a sequence")
        if (ends > batch.num_blocks[rows].astype(np.int64) * self._limits.block_size).any():
            raise RuntimeError("a step schedules tokens that have no KV block")
        if (np.diff(counts > 1) & (counts[1:] == 1)).any():
            raise RuntimeError("a step must hold sequences with one token first")
