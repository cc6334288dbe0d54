"""Pooler: computes vectors from the hidden states of prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from raylm.messages import NewSequence
from raylm.params import PoolingParams
from raylm.worker.input_batch import InputBatch
from raylm.worker.step_batch import StepBatch

NOT_FINITE = "the model's hidden states are not finite"


@dataclass(slots=True)
class PooledPrompt:
    """A partly computed prompt. ``state`` [hidden_size] float32 is the result of its chunks so far."""

    params: PoolingParams
    state: Tensor | None = None


class Pooler:
    """Owns the intermediate results of pooled prompts, by sequence id. Costs a step nothing if there are none.

    ``last`` takes its state from the last chunk, ``cls`` from the first; the mean is summed over the chunks in float32.
    A preempted sequence starts again: if more than the last token is needed, its whole prompt is computed again.
    """

    def __init__(self) -> None:
        self._rows: dict[int, PooledPrompt] = {}

    def takes_part(self, step: StepBatch) -> bool:
        """Whether the step computes tokens of pooled prompts."""
        return bool(self._rows) and any(seq_id in self._rows for seq_id in step.seq_ids)

    def add(self, new: NewSequence) -> None:
        if new.pooling is not None:
            self._rows[new.seq_id] = PooledPrompt(new.pooling)

    def remove(self, seq_id: int) -> None:
        self._rows.pop(seq_id, None)

    def claim(self, step: StepBatch) -> StepBatch:
        """Return the step without draws for pooled sequences."""
        if not self._rows:
            return step
        mine = np.fromiter((seq_id in self._rows for seq_id in step.seq_ids), np.bool_, len(step.seq_ids))
        return replace(step, draws=np.where(mine, 0, step.draws))

    def pool(
        self, step: StepBatch, hidden: Tensor, batch: InputBatch
    ) -> tuple[list[tuple[int, bytes]], list[tuple[int, str]]]:
        """Process the ``hidden`` states (tokens, hidden_size) of a step.

        Returns:
            (seq_id, float32 bytes) of the prompts that ended in this step, and (seq_id, reason) of failed prompts.
        """
        ready: list[tuple[int, bytes]] = []
        failed: list[tuple[int, str]] = []
        if not self._rows:
            return ready, failed
        for at, seq_id in enumerate(step.seq_ids):
            if (row := self._rows.get(seq_id)) is None:
                continue
            vector = self._vector(row, step, at, hidden, batch)
            if vector is None:
                continue
            if torch.isfinite(vector).all():
                ready.append((seq_id, vector.cpu().numpy().tobytes()))
            else:
                failed.append((seq_id, NOT_FINITE))
        return ready, failed

    def _vector(self, row: PooledPrompt, step: StepBatch, at: int, hidden: Tensor, batch: InputBatch) -> Tensor | None:
        """Take in the chunk of a prompt, that of index ``at`` in the step. The vector if it was the last one."""
        end, count, computed = int(step.counts[: at + 1].sum()), int(step.counts[at]), int(step.computed[at])
        last = computed + count == int(batch.num_prompt_tokens[step.rows[at]])
        take_in(row, hidden[end - count : end], first=computed == 0, last=last)
        return finish(row, computed + count) if last else None


def take_in(row: PooledPrompt, chunk: Tensor, *, first: bool, last: bool) -> None:
    if row.params.pooling == "mean":
        total = chunk.sum(dim=0, dtype=torch.float32)
        row.state = total if row.state is None else row.state + total
    elif row.params.pooling == "cls" and first:
        row.state = chunk[0].float()
    elif row.params.pooling == "last" and last:
        row.state = chunk[-1].float()


def finish(row: PooledPrompt, num_tokens: int) -> Tensor:
    """Divide a sum for the mean, cut the vector to its dimensions, and normalize it to length 1 if requested."""
    params, state = row.params, row.state
    assert state is not None, "a prompt whose first token counts was not computed from its beginning"
    vector = (state / num_tokens if params.pooling == "mean" else state)[: params.dimensions]
    return torch.nn.functional.normalize(vector, dim=0) if params.normalize else vector
