"""Penalties on the device, where the token counts stay."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raylm.worker.arrays import IntArray
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.logits_processors import Penalties


class DevicePenalties:
    """As Penalties, for rows whose last tokens the host may not have yet.

    By row of the batch, allocated for the first row with penalties: ``counts`` (rows, vocab_size) of generated tokens,
    and whether tokens are ``seen`` there or, with a repetition penalty, in the prompt. A row is known up to a number of
    tokens. If the host has appended other tokens, its counts are copied from the host.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._max_num_seqs, self._device = max_num_seqs, device
        self._counts = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._seen = torch.zeros(0, 0, dtype=torch.bool, device=device)
        self._known: dict[int, int] = {}
        self._step: tuple[bytes, bytes] | None = None
        self._where = self._rows = torch.zeros(0, dtype=torch.int64, device=device)
        self._weights = torch.zeros(3, 0, 1, device=device)
        self._counting = False

    def forget(self, row: int) -> None:
        """Forget a row, because another sequence has it."""
        if self._known.pop(row, None) is not None:
            self._step = None

    def knows(self, rows: IntArray, batch: InputBatch) -> bool:
        """Whether the device has the counts of these rows. Otherwise ``apply`` needs all their tokens on the host."""
        return all(self._known.get(row) == batch.num_tokens[row] for row in rows.tolist())

    def apply(
        self, logits: Tensor, positions: IntArray, rows: IntArray, batch: InputBatch, penalties: Penalties
    ) -> None:
        """Change ``logits`` (rows of the step, vocab_size) at ``positions``, which are the ``rows`` of the batch."""
        for row in rows.tolist():
            if self._known.get(row) != batch.num_tokens[row]:
                self._take_over(row, penalties, batch.vocab_size)
            self._known[row] = int(batch.num_tokens[row]) + 1  # including the token of this step
        if self._step != (step := (positions.tobytes(), rows.tobytes())):
            self._step = step
            self._where, self._rows = (torch.from_numpy(column).to(self._device) for column in (positions, rows))
            states = [penalties.states[row] for row in rows.tolist()]
            columns = np.array([(s.repetition, s.frequency, s.presence) for s in states], np.float32).T
            self._weights = torch.from_numpy(np.ascontiguousarray(columns)).to(self._device)[:, :, None]
        repetition, frequency, presence = self._weights
        counts, values = self._counts[self._rows].float(), logits[self._where]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(self._seen[self._rows], repeated, values)
        logits[self._where] = values - frequency * counts - presence * (counts > 0)
        self._counting = True

    def count(self, drawn: Tensor) -> None:
        """Count the tokens (rows of the step,) that were drawn after ``apply``."""
        if not self._counting:
            return
        self._counting = False
        tokens = drawn[self._where]
        one = torch.ones((), dtype=self._counts.dtype, device=self._device)
        self._counts.index_put_((self._rows, tokens), one, accumulate=True)
        self._seen.index_put_((self._rows, tokens), one.bool())

    def _take_over(self, row: int, penalties: Penalties, vocab_size: int) -> None:
        if not len(self._counts):
            self._counts = self._counts.new_zeros(self._max_num_seqs, vocab_size)
            self._seen = self._seen.new_zeros(self._max_num_seqs, vocab_size)
        state = penalties.states[row]
        counts, seen = np.zeros(vocab_size, np.int32), np.zeros(vocab_size, np.bool_)
        ids = state.ids[: state.size]
        counts[ids], seen[ids] = state.counts[: state.size], True
        self._counts[row] = torch.from_numpy(counts).to(self._device)
        self._seen[row] = torch.from_numpy(seen).to(self._device)
