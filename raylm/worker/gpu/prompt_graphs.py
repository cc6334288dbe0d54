"""Steps with prompts replayed as CUDA graphs. Launching a small step layer by layer takes longer than computing it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from raylm.models import Ranks
from raylm.stages import about
from raylm.worker.attention import StepLimits
from raylm.worker.forward import ModuleForward
from raylm.worker.gpu.batch_buckets import table_width, table_widths, token_bucket, token_buckets
from raylm.worker.gpu.capture import on_all_ranks
from raylm.worker.input_buffers import StepInputs

logger = logging.getLogger(__name__)

Run = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class _Graph:
    """The inputs of a graph, in memory with fixed addresses, and its replay."""

    input_ids: Tensor
    positions: Tensor
    plan: object
    replay: Run


class PromptGraphs:
    """A graph for each bucket of tokens and each width of block tables, with attention. All are captured at start.

    Padding tokens are written to a scratch block and attend to nothing. Steps with more tokens than the largest bucket,
    or more prompts than their bucket has tiles for, are not supported.
    """

    def __init__(
        self, eager: ModuleForward, limits: StepLimits, scratch_block: int, device: torch.device, ranks: Ranks
    ) -> None:
        self._eager, self._limits, self._device, self._ranks = eager, limits, device, ranks
        self._scratch_slot = scratch_block * limits.block_size
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def capture_all(self, capture: Callable[[Run], Run]) -> None:
        """Captures the largest first, so that smaller graphs can reuse its memory."""
        shapes = [(size, width) for width in table_widths(self._limits) for size in token_buckets(self._limits)[::-1]]
        for size, width in tqdm(shapes, desc="Capturing steps with prompts", unit="graph", delay=1.0, file=sys.stderr):
            try:
                graph = on_all_ranks(self._ranks, partial(self._captured, size, width, capture))
            except torch.OutOfMemoryError as error:
                logger.warning(
                    "Steps of %d tokens are slower, because their CUDA graph has no memory: %s",
                    size,
                    error,
                    extra=about("slower"),
                )
                continue
            if graph is not None:
                self._graphs[size, width] = graph

    def _captured(self, tokens: int, width: int, capture: Callable[[Run], Run]) -> _Graph | None:
        """Capture a graph. None if the backend has no plan with fixed memory."""
        plan = self._eager.plan_in_place(tokens, width, self._scratch_slot)
        if plan is None:
            return None
        input_ids, positions = torch.zeros(2, tokens, dtype=torch.int64, device=self._device).unbind(0)
        self._eager.hold(adapted=False)
        replay = capture(lambda: self._eager.run_planned(input_ids, positions, plan))
        return _Graph(input_ids, positions, plan, replay)

    def hidden(self, inputs: StepInputs) -> Tensor | None:
        """Run a step.

        Returns hidden states (tokens, hidden_size), which the next step overwrites; None if not supported.
        """
        meta, count = inputs.metadata, len(inputs.input_ids)
        width = table_width(int(meta.seq_lens_host.max()), self._limits)
        graph = self._graphs.get((token_bucket(count), width))
        if graph is None or not self._eager.refill(graph.plan, meta, self._scratch_slot):
            return None
        graph.input_ids[:count], graph.positions[:count] = inputs.input_ids, inputs.positions
        return graph.replay()[:count]
