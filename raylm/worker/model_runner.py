"""ModelRunner: runs one forward pass for a SchedulerOutput and draws its tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raylm import logprob_columns
from raylm.messages import Logprobs, ModelRunnerOutput, SchedulerOutput
from raylm.native import AdapterRun
from raylm.worker.arrays import Ints, slices
from raylm.worker.features import Adapters, AsyncDecode, Pending, Pipeline, Speculator
from raylm.worker.forward import Forward
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import InputBuffers, StepInputs
from raylm.worker.kv_memory import KVMemory
from raylm.worker.pooler import Pooler
from raylm.worker.sampling.sampler import LATE, NOT_FINITE, Sampler, SamplerOutput
from raylm.worker.step_batch import DrawRows, StepBatch

_PROMPT_LOGITS_BYTES = 64 << 20


class ModelRunner:
    """Runs steps strictly in the given order. Owns the rows of all sequences."""

    def __init__(
        self,
        forward: Forward,
        batch: InputBatch,
        buffers: InputBuffers,
        speculator: Speculator | None = None,
        sampler: Sampler | None = None,
        async_decode: AsyncDecode | None = None,
        adapters: Adapters | None = None,
        kv_memory: KVMemory | None = None,
        pipeline: Pipeline | None = None,
        pooler: Pooler | None = None,
    ) -> None:
        self.forward, self.batch, self.buffers = forward, batch, buffers
        self.sampler = sampler or Sampler()
        self.speculator = speculator or Speculator()
        self.adapters = adapters or Adapters()
        self.async_decode = async_decode or AsyncDecode()
        self.kv_memory = kv_memory or KVMemory()
        self.pipeline = pipeline or Pipeline()
        self.pooler = pooler or Pooler()
        self._prompt_logprobs: dict[int, int] = {}
        self._has_deferred = False

    def compile_at_start(self, vocab_size: int) -> None:
        """Compile the kernels that steps on a GPU may need in addition to those of the profile run."""
        self.forward.compile_at_start()
        self.async_decode.compile_at_start(vocab_size)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> Pending:
        """Update the rows, run the step, draw tokens and append them. The returned call may wait for the output."""
        started = time.perf_counter() - self.pipeline.waited_s  # waiting for other stages is no part of the step
        with self.kv_memory:
            step = self.pooler.claim(StepBatch.of(plan, self._apply(plan)))
            self.pipeline.settle(step, self.batch)
            step = self._up_to_date(step)
            step = self.speculator.propose(step, self.batch)
            step = self.adapters.arrange(step)
            adapters = self.adapters.runs(step)
            if step.seq_ids and not self._reads_prompts(step) and self.async_decode.takes(step, self.batch):
                return self.async_decode.launch(plan.step, step, self.batch, self.forward, adapters)
            waited = time.perf_counter()
            self.async_decode.settle(self.batch)
            started += time.perf_counter() - waited  # the wait belongs to earlier steps
            output = self._run(plan, step, adapters, started)
        return lambda: output

    def _reads_prompts(self, step: StepBatch) -> bool:
        """Whether the step's hidden states are read at tokens of prompts."""
        if self.pooler.takes_part(step):
            return True
        if not self._prompt_logprobs:
            return False
        inside = step.computed < self.batch.num_prompt_tokens[step.rows] - 1
        return any(step.seq_ids[place] in self._prompt_logprobs for place in np.flatnonzero(inside).tolist())

    def _run(
        self, plan: SchedulerOutput, step: StepBatch, adapters: Sequence[AdapterRun], started: float
    ) -> ModelRunnerOutput:
        if not step.seq_ids:
            return self._without_tokens(plan, started)
        inputs = self.pipeline.begin(self.buffers.build(step, self.batch, adapters), self.forward)
        forward_started = time.perf_counter()
        hidden = self.forward.hidden(inputs)
        if not self.pipeline.is_last:
            self.pipeline.end(hidden, step)
            return self._without_tokens(plan, started)
        draws = DrawRows.of(step)
        logits = self.forward.logits(_rows(hidden, draws.tokens))
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)  # to time the forward pass, and to reuse the buffers afterwards
        forward_s = time.perf_counter() - forward_started
        prompt_logprobs = self._describe_prompts(step, hidden, inputs)
        pooled, lost = self.pooler.pool(step, hidden, self.batch)
        drawn, kept = self._draw(logits, step, draws)
        late = draws.places[drawn.token_ids == LATE]
        self._has_deferred |= len(late) > 0
        refused = [(step.seq_ids[place], reason) for place, reason in drawn.failed]
        logprobs = drawn.logprobs
        if logprobs is not None and len(kept) < len(logprobs.counts):
            logprobs = logprob_columns.select(logprobs, kept.tolist())
        token_counts = np.bincount(draws.places[kept], minlength=len(step.seq_ids))
        step_s = time.perf_counter() - self.pipeline.waited_s - started
        self.speculator.observe(step, step_s)
        return ModelRunnerOutput(
            step=plan.step,
            seq_ids=[step.seq_ids[place] for place in np.flatnonzero(token_counts).tolist()],
            token_counts=token_counts[token_counts > 0].tolist(),
            token_ids=drawn.token_ids[kept].tolist(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            deferred=[step.seq_ids[place] for place in late.tolist()],
            failed=[*(row for row in refused if row[1] == NOT_FINITE), *lost],
            undrawable=[row for row in refused if row[1] != NOT_FINITE],
            forward_s=forward_s,
            step_s=step_s,
            drafted_tokens=int(step.drafts.sum()),
            pooled=pooled,
        )

    def _without_tokens(self, plan: SchedulerOutput, started: float) -> ModelRunnerOutput:
        step_s = time.perf_counter() - self.pipeline.waited_s - started
        return ModelRunnerOutput(plan.step, [], [], [], step_s=step_s)

    def _up_to_date(self, step: StepBatch) -> StepBatch:
        """Let decoding sequences continue where their rows end: the scheduler may not know yet which were deferred."""
        if not (self._has_deferred or self.async_decode.has_deferred or self.pipeline.has_deferred):
            return step
        decoding = (step.counts == 1) & (step.draws == 1)
        return replace(step, computed=np.where(decoding, self.batch.num_tokens[step.rows] - 1, step.computed))

    def _apply(self, plan: SchedulerOutput) -> Ints:
        for row, seq_id in zip(self.batch.rows(plan.finished).tolist(), plan.finished, strict=True):
            self.speculator.remove(row, self.batch)
            self.batch.remove(seq_id)
            self.pipeline.remove(row)
            self._prompt_logprobs.pop(seq_id, None)
            self.pooler.remove(seq_id)
        for new in plan.new:
            row = self.batch.add(new)
            self.speculator.add(row, new)
            self.async_decode.add(row)
            self.adapters.add(row, new)
            self.pooler.add(new)
            if new.params.prompt_logprobs is not None:
                self._prompt_logprobs[new.seq_id] = new.params.prompt_logprobs
        self.kv_memory.reach([*plan.new_block_ids, *(block for new in plan.new for block in new.block_ids)])
        rows = self.batch.rows(plan.seq_ids)
        self.batch.append_blocks(rows, plan.new_block_counts, plan.new_block_ids)
        return rows

    def _draw(self, logits: Tensor, step: StepBatch, draws: DrawRows) -> tuple[SamplerOutput, Ints]:
        """Draw tokens and append the accepted ones.

        Returns all draws, with ``failed`` by index in the step, and the indexes of the draws to report. A late row
        draws in a later step. Its last token is computed in this step nevertheless, as others may share its blocks.
        """
        rows = step.rows[draws.places]
        drawn = self.sampler.sample(logits, rows, self.batch, draws.offsets)
        self.pipeline.tell(drawn.token_ids)
        counts = drawn.token_ids != LATE
        if draws.offsets.any():
            drafts = self.batch.token_ids[rows, self.batch.num_tokens[rows] + draws.offsets]
            counts &= draws.accepted((drawn.token_ids == drafts) & (draws.offsets < step.drafts[draws.places]))
        # Failed rows too: a step already in flight may compute the token that should have been drawn here.
        self.batch.append_tokens(rows[counts], drawn.token_ids[counts], draws.offsets[counts])
        lost = {int(draws.places[at]): reason for at, reason in drawn.failed if counts[at]}
        if lost:
            counts &= ~np.isin(draws.places, list(lost))
        return replace(drawn, failed=list(lost.items())), np.flatnonzero(counts)

    def _describe_prompts(self, step: StepBatch, hidden: Tensor, inputs: StepInputs) -> list[tuple[int, Logprobs]]:
        described: list[tuple[int, Logprobs]] = []
        if not self._prompt_logprobs:
            return described
        known = np.minimum(step.counts, self.batch.num_prompt_tokens[step.rows] - 1 - step.computed)
        for at, (start, seq_id) in enumerate(zip(inputs.metadata.query_start_loc_host, step.seq_ids, strict=False)):
            top = self._prompt_logprobs.get(seq_id)
            if top is not None and known[at] > 0:
                first = step.computed[at] + 1
                token_ids = self.batch.token_ids[step.rows[at], first : first + known[at]]
                described.append((seq_id, self._describe(hidden[start : start + known[at]], token_ids, top)))
        return described

    def _describe(self, hidden: Tensor, token_ids: NDArray[np.int32], top: int) -> Logprobs:
        """Describe prompt tokens in pieces, because the logits of a long chunk would take too much memory."""
        pieces = slices(len(token_ids), max(1, _PROMPT_LOGITS_BYTES // (4 * self.batch.vocab_size)))
        return logprob_columns.join(
            self.sampler.prompt_logprobs(self.forward.logits(hidden[at]), token_ids[at], top) for at in pieces
        )


def _rows(hidden: Tensor, tokens: Ints) -> Tensor:
    """The rows ``tokens`` of ``hidden``, in order. If every token draws, ``hidden`` itself, without a copy."""
    return hidden if len(tokens) == len(hidden) else hidden[torch.from_numpy(tokens).to(hidden.device)]
