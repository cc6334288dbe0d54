"""The native kernels as Python sees them: torch tensors in, torch tensors out, on one team of threads a process."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from raylm.native import library as lib
from raylm.native.build import NativeError, build, instruction_set
from raylm.native.memory import Arena
from raylm.native.packed_weight import KINDS, PackedWeight, Weight
from raylm.native.team_size import TeamSize


class Team:
    """Threads that compute together and sleep in between; they end with this object."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self._library = library
        self.handle = library.raylm_team_new(threads)

    def use(self, threads: int) -> None:
        """Let so many of them take part from now on."""
        self._library.raylm_team_use(self.handle, threads)

    def __del__(self) -> None:
        self._library.raylm_team_free(self.handle)


class Kernels:
    """The loaded library and its threads; calls come from one thread at a time."""

    def __init__(self, instructions: str) -> None:
        self.instructions = instructions
        self.library = lib.open_library(build(instructions))
        self.arena = Arena()
        self.lock = threading.Lock()
        self.team = Team(self.library, 1)

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads from now on; decoders made before keep theirs."""
        with self.lock:
            if threads != self.team.threads:
                self.team = Team(self.library, threads)


@cache
def kernels(instructions: str | None = None) -> Kernels:
    """The kernels for this machine, compiled if need be; loaded once a process.

    Raises:
        NativeError: they cannot be built or loaded.
    """
    return Kernels(instructions or instruction_set())


def use_threads(threads: int) -> None:
    """Set the threads of the native kernels of this process, where there are any."""
    try:
        kernels().use_threads(threads)
    except NativeError:
        return  # whoever chose a slower way has said so


class NativeLinear:
    """A linear layer by itself: ``x`` (rows, in) float32 or bfloat16 -> (rows, out) of the same type."""

    def __init__(self, native: Kernels, weight: Weight, bias: Tensor | None) -> None:
        self.packed = PackedWeight(native, weight, bias)
        self.dtype = weight.dtype if isinstance(weight, Tensor) else None  # None where it is quantized
        self._native = native

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` (n,) of a plain weight -> (n, in): the embedding of a model that ties it to its head."""
        assert self.dtype is not None, "a quantized weight is no embedding"
        words = self.packed.words[ids // lib.LANES, :, ids % lib.LANES]
        return words.view(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        struct = self.packed.struct
        x = x.contiguous()
        out = torch.empty((len(x), struct.columns), dtype=x.dtype)
        native = self._native
        with native.lock:
            native.library.raylm_linear(
                native.team.handle, KINDS[x.dtype], byref(struct), x.data_ptr(), len(x), out.data_ptr(), struct.columns
            )
        return out[:, : self.packed.out_features]


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """One step's sequences, those with one token first, as contiguous tensors on the CPU.

    ``positions`` and ``slots`` (tokens,) int64, ``block_tables`` (seqs, width) int32, ``seq_lens`` (seqs,) int32 and
    ``starts`` (seqs + 1,) int32.
    """

    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    starts: Tensor

    def struct(self, block_size: int) -> lib.Batch:
        """As the kernels read it; it keeps the tensors alive."""
        struct = lib.Batch(
            tokens=len(self.slots),
            seqs=len(self.seq_lens),
            table_width=self.block_tables.stride(0),
            block_size=block_size,
            positions=self.positions.data_ptr(),
            slots=self.slots.data_ptr(),
            block_tables=self.block_tables.data_ptr(),
            seq_lens=self.seq_lens.data_ptr(),
            starts=self.starts.data_ptr(),
        )
        struct.kept = self
        return struct


class NativeAttention:
    """Paged attention by itself, for models that call it layer by layer."""

    def __init__(self, native: Kernels) -> None:
        self._native = native

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, batch: lib.Batch, heads: lib.Heads) -> Tensor:
        """Write ``k`` and ``v`` (tokens, kv_heads, head_dim) to the slots of ``pool``, then attend.

        ``q`` (tokens, heads, head_dim) -> as ``q``; of all three the last two dimensions are contiguous. ``pool`` is
        (2, blocks, ...) as in src/attention.h, of the same type.
        """
        out = torch.empty(q.shape, dtype=q.dtype)
        native = self._native
        with native.lock:
            native.library.raylm_attention(
                native.team.handle, KINDS[q.dtype], byref(batch), byref(heads),
                q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
                pool.data_ptr(), pool.shape[1], out.data_ptr(),
            )  # fmt: skip
        return out


class _AdapterRun(Protocol):
    """Tokens ``start`` .. ``start + count`` of a step, and the adapter that changes them."""

    @property
    def adapter(self) -> Any:
        """A PackedAdapter."""

    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...


class NativeDecoder:
    """A compact decoder whose whole step is one call.

    ``pools`` hold the keys and values, one a layer, each as in src/attention.h; ``kept`` is what ``model`` points to.
    """

    def __init__(
        self,
        native: Kernels,
        model: lib.Model,
        pools: Sequence[Tensor],
        dtype: torch.dtype,
        vocab_size: int,
        kept: object,
    ) -> None:
        self._native, self._kind, self._dtype = native, KINDS[dtype], dtype
        self._pools = (ctypes.c_void_p * len(pools))(*(pool.data_ptr() for pool in pools))
        self._num_blocks = pools[0].shape[1]
        self._kept = (model, pools, kept)  # the kernels read all of it
        self._hidden_size, self._vocab_size, self._columns = model.hidden, vocab_size, model.head.columns
        self._team, self._size = native.team, TeamSize(native.team.threads)
        self._handle = native.library.raylm_decoder_new(native.team.handle, self._kind, byref(model))

    def step(self, input_ids: Tensor, batch: lib.Batch, adapters: Sequence[_AdapterRun] = ()) -> Tensor:
        """``input_ids`` (tokens,) int64 -> hidden states (tokens, hidden_size).

        ``adapters`` change runs of tokens that do not overlap.
        """
        runs = (lib.AdapterRun * len(adapters))(
            *(lib.AdapterRun(run.adapter.sites, run.start, run.count) for run in adapters)
        )
        hidden = torch.empty((len(input_ids), self._hidden_size), dtype=self._dtype)
        with self._native.lock:
            self._team.use(self._size.choose(len(input_ids)))
            started = time.perf_counter()
            self._native.library.raylm_decoder_step(
                self._kind, self._handle, byref(batch), input_ids.data_ptr(), self._pools, self._num_blocks,
                hidden.data_ptr(), runs, len(runs),
            )  # fmt: skip
            self._size.observe(len(input_ids), time.perf_counter() - started)
        return hidden

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
        """Where the time of all steps went."""
        found = self._native.library.raylm_decoder_seconds(self._kind, self._handle)
        return {"linear": found[0], "attention": found[1], "elementwise": found[2]}

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._native.library.raylm_decoder_free(self._kind, self._handle)
