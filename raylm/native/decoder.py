"""Attention and whole decoders by the native kernels, for torch tensors."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from ctypes import byref

import torch
from torch import Tensor

import raylm.native.library as lib
from raylm.native.linear import KINDS
from raylm.native.packed_adapter import AdapterRun, PackedAdapter
from raylm.native.runtime import Kernels, kernels
from raylm.native.team_size import TeamSize


def batch_struct(
    positions: Tensor, slots: Tensor, block_tables: Tensor, seq_lens: Tensor, starts: Tensor, block_size: int
) -> lib.Batch:
    """One step's sequences, with decodes first, in contiguous CPU tensors. The struct keeps the tensors alive.

    ``positions`` and ``slots`` (tokens,) are int64; ``block_tables`` (seqs, width), ``seq_lens`` (seqs,) and ``starts``
    (seqs + 1,) int32.
    """
    kept = (positions, slots, block_tables, seq_lens, starts)
    struct = lib.Batch(len(slots), len(seq_lens), block_tables.stride(0), block_size, *[x.data_ptr() for x in kept])
    struct.kept = kept
    return struct


def paged_attention(
    native: Kernels, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, batch: lib.Batch, heads: lib.Heads
) -> Tensor:
    """Write ``k`` and ``v`` (tokens, kv_heads, head_dim) to ``pool``, as in src/attention.h, then attend.

    ``q`` (tokens, heads, head_dim) -> as ``q``. The last two dimensions of all three must be contiguous.
    """
    out = torch.empty(q.shape, dtype=q.dtype)
    with native.lock:
        native.library.raylm_attention(
            native.team.handle, KINDS[q.dtype], byref(batch), byref(heads),
            q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
            pool.data_ptr(), pool.shape[1], out.data_ptr(),
        )  # fmt: skip
    return out


class NativeDecoder:
    """A decoder of the Llama families that runs a step in one call. The layers' ``pools`` are as in src/attention.h.

    It may be a stage of a pipeline. Unless it has the first layers, a step begins with the residual stream of earlier
    layers. Unless it has the last ones (``model.last_norm``), the result is the residual stream.
    """

    def __init__(self, model: lib.Model, pools: Sequence[Tensor], dtype: torch.dtype, vocab_size: int) -> None:
        native = self._native = kernels()
        self._kind = KINDS[dtype]
        self._pools = (ctypes.c_void_p * len(pools))(*(pool.data_ptr() for pool in pools))
        self._num_blocks = pools[0].shape[1]
        self._result_dtype = dtype if model.last_norm else torch.float32
        self._kept = (model, pools)  # the kernels read this memory
        self._hidden_size, self._vocab_size, self._columns = model.hidden, vocab_size, model.head.columns
        self._team, self._size = native.team, TeamSize(native.team.threads)
        self._handle = native.library.raylm_decoder_new(native.team.handle, self._kind, byref(model))

    def step(
        self,
        input_ids: Tensor,
        batch: lib.Batch,
        adapters: Sequence[AdapterRun] = (),
        when_computing: Callable[[], None] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """``input_ids`` (tokens,) int64 -> hidden states (tokens, hidden_size). Runs of ``adapters`` must not overlap.

        ``when_computing`` is called just before the interpreter lock is released. ``stream`` (tokens, hidden_size) is
        the residual stream of earlier layers, contiguous and float32, as is the result if other layers follow.
        """
        runs = (lib.AdapterRunStruct * len(adapters))(*map(_run_struct, adapters))
        hidden = torch.empty((len(input_ids), self._hidden_size), dtype=self._result_dtype)
        arguments = (
            self._kind, self._handle, byref(batch), input_ids.data_ptr(), None if stream is None else stream.data_ptr(),
            self._pools, self._num_blocks, hidden.data_ptr(), runs, len(runs),
        )  # fmt: skip
        with self._native.lock:
            self._team.use(self._size.choose(len(input_ids)))
            started = time.perf_counter()
            if when_computing is not None:
                when_computing()
            self._native.library.raylm_decoder_step(*arguments)
            self._size.observe(len(input_ids), time.perf_counter() - started)
        return hidden

    def empty_stream(self, tokens: int) -> Tensor:
        """Memory for the residual stream of so many tokens."""
        return torch.empty((tokens, self._hidden_size), dtype=torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (rows, hidden_size) -> float32 logits (rows, vocab_size)."""
        hidden = hidden.contiguous()
        out = torch.empty((len(hidden), self._columns), dtype=torch.float32)
        with self._native.lock:
            self._native.library.raylm_decoder_logits(
                self._kind, self._handle, hidden.data_ptr(), len(hidden), out.data_ptr(), self._columns
            )
        return out[:, : self._vocab_size]

    def seconds(self) -> dict[str, float]:
        """The seconds of all steps so far, by part."""
        found = self._native.library.raylm_decoder_seconds(self._kind, self._handle)
        return {"linear": found[0], "attention": found[1], "elementwise": found[2]}

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._native.library.raylm_decoder_free(self._kind, self._handle)


def _run_struct(run: AdapterRun) -> lib.AdapterRunStruct:
    assert isinstance(run.adapter, PackedAdapter)
    return lib.AdapterRunStruct(run.adapter.sites, run.start, run.count)
