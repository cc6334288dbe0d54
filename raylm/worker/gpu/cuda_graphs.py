"""Decoding steps replayed as CUDA graphs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from raylm.models import SINGLE_RANK, AdapterLimits, LowRank, Ranks
from raylm.stages import about
from raylm.worker.attention import AttentionMetadata, StepLimits
from raylm.worker.forward import Forward, ModuleForward
from raylm.worker.gpu.batch_buckets import bucket, buckets, table_width, table_widths
from raylm.worker.gpu.capture import on_all_ranks
from raylm.worker.gpu.prompt_graphs import PromptGraphs
from raylm.worker.input_buffers import StepInputs

logger = logging.getLogger(__name__)

_AT_START = 256  # graphs for up to this many sequences are captured before the first request
_WARM_UPS = 2

Run = Callable[[], Tensor]
Capture = Callable[[Run], Run]  # converts a call that reads and writes fixed memory into its replay


class CudaCapture:
    """Captures CUDA graphs in one memory pool, because only one runs at a time, and on one stream.

    Libraries allocate a workspace for every stream; on Hopper 32 MiB each.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, run: Run) -> Run:
        # Warm up: kernels are compiled, and libraries choose their workspaces, before the capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class DecodeBuffers:
    """Inputs of a decoding step in memory with fixed addresses.

    Padding rows are sequences of one token in a scratch block. A graph reads only its own writes there, and its results
    for them are ignored.
    """

    def __init__(self, limits: StepLimits, scratch_block: int, device: torch.device) -> None:
        most = bucket(limits.max_num_seqs)
        self._block_size, self._scratch_block = limits.block_size, scratch_block
        self._input_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slot_mapping = torch.zeros(most, dtype=torch.int64, device=device)
        self._block_tables = torch.zeros(most, limits.max_blocks, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._query_start_loc = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        self._pad(0, len(self._seq_lens))

    def _pad(self, start: int, end: int) -> None:
        if start == end:
            return
        self._input_ids[start:end].fill_(0)
        self._positions[start:end].fill_(0)
        self._slot_mapping[start:end].fill_(self._scratch_block * self._block_size)
        self._block_tables[start:end, 0].fill_(self._scratch_block)
        self._seq_lens[start:end].fill_(1)

    def fill(self, inputs: StepInputs, size: int, width: int) -> None:
        """Copy a step with tables of ``width`` blocks, and pad it to ``size`` sequences."""
        meta, count = inputs.metadata, len(inputs.input_ids)
        self._input_ids[:count] = inputs.input_ids
        self._positions[:count] = inputs.positions
        self._slot_mapping[:count] = meta.slot_mapping
        self._block_tables[:count, :width] = meta.block_tables[:, :width]
        self._seq_lens[:count] = meta.seq_lens
        self._pad(count, size)

    def inputs(self, size: int, width: int) -> StepInputs:
        """The first ``size`` sequences. The host assumes that they are as long as their tables allow."""
        longest = width * self._block_size
        return StepInputs(
            self._input_ids[:size],
            self._positions[:size],
            AttentionMetadata(
                num_decodes=size,
                slot_mapping=self._slot_mapping[:size],
                block_tables=self._block_tables[:size],
                seq_lens=self._seq_lens[:size],
                query_start_loc=self._query_start_loc[: size + 1],
                seq_lens_host=np.full(size, longest, np.int32),
                query_start_loc_host=np.arange(size + 1, dtype=np.int32),
            ),
        )


class GraphForward(Forward):
    """Runs steps as CUDA graphs, with prompts up to some size. Larger steps run layer by layer in ``eager``.

    There is a graph for each batch bucket and each width of block tables, and a second one for steps with adapters if
    these can be captured. ``capture_at_start`` captures graphs for up to 256 sequences, the first step that needs it
    captures any other. If there is no memory for a graph, all ranks that share the model run without it, and log it.
    """

    captures = True

    def __init__(
        self,
        eager: ModuleForward,
        limits: StepLimits,
        scratch_block: int,
        device: torch.device,
        ranks: Ranks = SINGLE_RANK,
        capture: Capture | None = None,
    ) -> None:
        self.eager, self._limits, self._ranks, self._capture = eager, limits, ranks, capture or CudaCapture()
        self._buffers = DecodeBuffers(limits, scratch_block, device)
        self._graphs: dict[tuple[int, int, bool], Run | None] = {}  # by (sequences, blocks in a table, adapters)
        self._with_prompts = PromptGraphs(eager, limits, scratch_block, device, ranks)

    def capture_at_start(self) -> None:
        """Captures the largest first, so that smaller graphs can reuse its memory."""
        sizes = buckets(min(self._limits.max_num_seqs, _AT_START))[::-1]
        adapted = (False, True) if self.eager.captures_adapters else (False,)
        shapes = [(size, width, has) for has in adapted for width in table_widths(self._limits) for size in sizes]
        for shape in tqdm(shapes, desc="Capturing CUDA graphs", unit="graph", delay=1.0, file=sys.stderr):
            self._graph(*shape)
        self._with_prompts.capture_all(self._capture)

    def compile_at_start(self) -> None:
        self.eager.compile_at_start()

    def serve_adapters(self, limits: AdapterLimits) -> None:
        self.eager.serve_adapters(limits)

    def pack(self, weights: Mapping[str, LowRank]) -> object:
        return self.eager.pack(weights)

    def hidden(self, inputs: StepInputs) -> Tensor:
        meta = inputs.metadata
        count = len(meta.seq_lens_host)
        if inputs.adapters and (meta.num_decodes < count or not self.eager.captures_adapters):
            return self.eager.hidden(inputs)
        if meta.num_decodes < count:
            hidden = self._with_prompts.hidden(inputs)
            return self.eager.hidden(inputs) if hidden is None else hidden
        size, width = bucket(count), table_width(int(meta.seq_lens_host.max()), self._limits)
        graph = self._graph(size, width, bool(inputs.adapters))
        if graph is None:
            return self.eager.hidden(inputs)
        self._buffers.fill(inputs, size, width)
        self.eager.adapt(inputs.adapters)
        return graph()[:count]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.eager.logits(hidden)

    def _graph(self, size: int, width: int, adapted: bool) -> Run | None:
        key = size, width, adapted
        if key not in self._graphs:
            inputs = self._buffers.inputs(size, width)
            # The buffers may have another step's inputs. Capturing runs the step, and must not write to its blocks.
            self._buffers.clear()
            self.eager.hold(adapted=adapted)
            try:
                self._graphs[key] = on_all_ranks(self._ranks, lambda: self._capture(lambda: self.eager.run(inputs)))
            except torch.OutOfMemoryError as error:
                logger.warning(
                    "Steps of %d sequences are slower, because their CUDA graph has no memory: %s",
                    size,
                    error,
                    extra=about("slower"),
                )
                self._graphs[key] = None
        return self._graphs[key]
