"""Worker: the ModelRunner, which turns a SchedulerOutput into one forward pass and its drawn tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raylm.messages import Logprobs, ModelRunnerOutput, SchedulerOutput
from raylm.models import AttentionSpec, CausalLM
from raylm.worker.attention import AnyBackend
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import InputBuffers, StepInputs
from raylm.worker.sampler import Sampler, SamplerOutput

_PROMPT_LOGITS_BYTES = 64 << 20


class ModelRunner:
    """Runs steps strictly in the order given; owns the KV tensors, one a layer, and the rows of all sequences."""

    def __init__(
        self,
        model: CausalLM,
        backend: AnyBackend,
        kv_caches: Sequence[Tensor],
        batch: InputBatch,
        buffers: InputBuffers,
    ) -> None:
        self.model = model
        self.backend = backend
        self.kv_caches = list(kv_caches)
        self.batch = batch
        self.buffers = buffers
        self.sampler = Sampler()
        self._prompt_logprobs: dict[int, int] = {}

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the difference, run the step, draw tokens and keep them.

        Raises:
            RuntimeError: the plan contradicts what the worker holds.
        """
        started = time.perf_counter()
        rows = self._apply(plan)
        if not plan.seq_ids:
            return ModelRunnerOutput(plan.step, [], [], [], step_s=time.perf_counter() - started)
        inputs = self.buffers.build(plan, rows, self.batch)
        forward_started = time.perf_counter()
        hidden = self._forward(inputs)
        drawing = np.flatnonzero(plan.samples)
        ends = inputs.metadata.query_start_loc_host[1:].astype(np.int64)
        logits = self.model.logits(hidden[torch.from_numpy(ends[drawing] - 1).to(hidden.device)])
        _synchronize(logits.device)
        forward_s = time.perf_counter() - forward_started
        prompt_logprobs = self._describe_prompts(plan, rows, hidden, inputs)
        drawn = self._draw(logits, rows[drawing])
        return self._output(plan, drawing, drawn, prompt_logprobs, forward_s, started)

    def _apply(self, plan: SchedulerOutput) -> NDArray[np.int64]:
        for seq_id in plan.finished:
            self.batch.remove(seq_id)
            self._prompt_logprobs.pop(seq_id, None)
        for new in plan.new:
            self.batch.add(new)
            if new.params.prompt_logprobs is not None:
                self._prompt_logprobs[new.seq_id] = new.params.prompt_logprobs
        rows = self.batch.rows(plan.seq_ids)
        self.batch.append_blocks(rows, plan.new_block_counts, plan.new_block_ids)
        return rows

    def _forward(self, inputs: StepInputs) -> Tensor:
        step = self.backend.prepare(inputs.metadata)

        def attend(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.backend.forward(q, k, v, self.kv_caches[spec.layer], step, spec)

        return self.model(inputs.input_ids, inputs.positions, attend)  # type: ignore[no-any-return]

    def _draw(self, logits: Tensor, rows: NDArray[np.int64]) -> SamplerOutput:
        if not len(rows):
            return SamplerOutput(np.empty(0, np.int64))
        drawn = self.sampler.sample(logits, rows, self.batch)
        # Failed rows too: a step already on its way may compute the token that was to be drawn here.
        self.batch.append_tokens(rows, drawn.token_ids)
        return drawn

    def _describe_prompts(
        self, plan: SchedulerOutput, rows: NDArray[np.int64], hidden: Tensor, inputs: StepInputs
    ) -> list[tuple[int, Logprobs]]:
        described: list[tuple[int, Logprobs]] = []
        if not self._prompt_logprobs:
            return described
        starts = inputs.metadata.query_start_loc_host
        for at, (seq_id, computed, count) in enumerate(
            zip(plan.seq_ids, plan.num_computed, plan.num_scheduled, strict=True)
        ):
            top = self._prompt_logprobs.get(seq_id)
            known = min(count, int(self.batch.num_prompt_tokens[rows[at]]) - 1 - computed)
            if top is not None and known > 0:
                told = self.batch.token_ids[rows[at], computed + 1 : computed + 1 + known]
                described.append((seq_id, self._describe(hidden[starts[at] : starts[at] + known], told, top)))
        return described

    def _describe(self, hidden: Tensor, token_ids: NDArray[np.int32], top: int) -> Logprobs:
        """Piece by piece, for the logits of a long chunk would dwarf everything else."""
        piece = max(1, _PROMPT_LOGITS_BYTES // (4 * self.batch.vocab_size))
        found = Logprobs([], [], [], [])
        for start in range(0, len(token_ids), piece):
            told = token_ids[start : start + piece]
            part = self.sampler.prompt_logprobs(self.model.logits(hidden[start : start + piece]), told, top)
            found.counts.extend(part.counts)
            found.token_ids.extend(part.token_ids)
            found.logprobs.extend(part.logprobs)
            found.ranks.extend(part.ranks)
        return found

    def _output(
        self,
        plan: SchedulerOutput,
        drawing: NDArray[np.int64],
        drawn: SamplerOutput,
        prompt_logprobs: list[tuple[int, Logprobs]],
        forward_s: float,
        started: float,
    ) -> ModelRunnerOutput:
        seq_ids = [plan.seq_ids[at] for at in drawing]
        failed = [(seq_ids[position], reason) for position, reason in drawn.failed]
        token_ids, logprobs = drawn.token_ids.tolist(), drawn.logprobs
        if failed:
            kept = sorted(set(range(len(seq_ids))) - {position for position, _ in drawn.failed})
            seq_ids, token_ids = [seq_ids[at] for at in kept], [token_ids[at] for at in kept]
            logprobs = None if logprobs is None else _select(logprobs, kept)
        return ModelRunnerOutput(
            step=plan.step,
            seq_ids=seq_ids,
            token_counts=[1] * len(seq_ids),
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
            forward_s=forward_s,
            step_s=time.perf_counter() - started,
        )


def _synchronize(device: torch.device) -> None:
    """Wait for a GPU: then the time is the forward pass's, and the buffers may be laid out anew."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _select(logprobs: Logprobs, kept: Sequence[int]) -> Logprobs:
    """The entries of the tokens ``kept``."""
    ends = np.cumsum(logprobs.counts)
    spans = [slice(int(ends[at]) - logprobs.counts[at], int(ends[at])) for at in kept]
    return Logprobs(
        counts=[logprobs.counts[at] for at in kept],
        token_ids=[token for span in spans for token in logprobs.token_ids[span]],
        logprobs=[value for span in spans for value in logprobs.logprobs[span]],
        ranks=[logprobs.ranks[at] for at in kept],
    )
