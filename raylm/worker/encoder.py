"""Encoders in the worker: a prompt is computed when its last chunk arrives, alone and whole."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from raylm.models import Encoder, LowRank
from raylm.worker.forward import Forward
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import StepInputs
from raylm.worker.pooler import PooledPrompt, Pooler, finish, take_in
from raylm.worker.step_batch import StepBatch


class EncoderForward(Forward):
    """Computes nothing: each token depends on later ones, which may belong to a later step. EncoderPooler computes."""

    batch_invariant = True

    def __init__(self, model: Encoder) -> None:
        self._model = model

    def hidden(self, inputs: StepInputs) -> Tensor:
        return torch.empty((len(inputs.input_ids), 0))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def pack(self, weights: Mapping[str, LowRank]) -> object:
        raise AssertionError("an encoder has no adapters")


class EncoderPooler(Pooler):
    """Encodes each prompt by itself, so that its vector has the same bits in any batch and for any chunks."""

    def __init__(self, model: Encoder) -> None:
        super().__init__()
        self._model = model

    def _vector(self, row: PooledPrompt, step: StepBatch, at: int, hidden: Tensor, batch: InputBatch) -> Tensor | None:
        place, count = step.rows[at], int(batch.num_prompt_tokens[step.rows[at]])
        if int(step.computed[at] + step.counts[at]) < count:
            return None
        ids = torch.from_numpy(batch.token_ids[place, :count].astype(np.int64))
        pair_at = row.params.pair_at
        types = (torch.arange(count) >= (count if pair_at is None else pair_at)).long()
        encoded = self._model.encode(ids, types)
        if pair_at is not None:
            return self._model.score(encoded)
        take_in(row, encoded, first=True, last=True)
        return finish(row, count)
