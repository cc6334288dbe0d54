"""Bad words on the device, matched against the last tokens of each row, which stay there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raylm.worker.arrays import IntArray
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.logits_processors import BadWords

_ANY, _NONE = -1, -2  # matches every token; matches no token


class DeviceBadWords:
    """As BadWords, for rows whose last tokens the host may not have yet.

    ``tails`` (rows of the batch, longest prefix) int64 are the last generated tokens of each row, _NONE before the
    first. A row is known up to a number of tokens. If the host has appended other tokens, its tail is copied from the
    host.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._tails = torch.full((max_num_seqs, 0), _NONE, dtype=torch.int64, device=device)
        self._known: dict[int, int] = {}
        self._step: tuple[bytes, bytes] | None = None
        self._where = self._rows = self._owners = self._places = torch.zeros(0, dtype=torch.int64, device=device)
        self._prefixes = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._following = False

    def forget(self, row: int) -> None:
        """Forget a row, because another sequence has it, or because it did not draw its token."""
        if self._known.pop(row, None) is not None:
            self._step = None

    def knows(self, rows: IntArray, batch: InputBatch) -> bool:
        """Whether the device has the tails of these rows. Otherwise ``apply`` needs all their tokens on the host."""
        return all(self._known.get(row) == batch.num_tokens[row] for row in rows.tolist())

    def apply(self, logits: Tensor, positions: IntArray, rows: IntArray, batch: InputBatch, words: BadWords) -> None:
        """Change ``logits`` (rows of the step, vocab_size) at ``positions``, which are the ``rows`` of the batch."""
        if self._step != (step := (positions.tobytes(), rows.tobytes())):
            self._step = step
            self._prepare(positions, rows, words)
        for row in rows.tolist():
            if self._known.get(row) != batch.num_tokens[row]:
                self._take_over(row, batch)
            self._known[row] = int(batch.num_tokens[row]) + 1  # including the token of this step
        met = ((self._prefixes == _ANY) | (self._prefixes == self._tails[self._owners])).all(dim=1)
        # The minimum, because two words may end with the same token.
        least = torch.where(met, -torch.inf, torch.inf).to(logits.dtype)
        logits.view(-1).scatter_reduce_(0, self._places, least, "amin")
        self._following = True

    def count(self, drawn: Tensor) -> None:
        """Append the tokens (rows of the step,) that were drawn after ``apply``."""
        if not self._following:
            return
        self._following = False
        tails = torch.cat([self._tails[self._rows], drawn[self._where][:, None]], dim=1)
        self._tails[self._rows] = tails[:, 1:]

    def _prepare(self, positions: IntArray, rows: IntArray, words: BadWords) -> None:
        """Copy the words of these rows to the device, one line for each."""
        lines = [
            (position, row, prefix, last)
            for position, row in zip(positions.tolist(), rows.tolist(), strict=True)
            for group in words.states[row].values()
            for prefix, last in group
        ]
        longest = max(self._tails.shape[1], *(len(prefix) for *_, prefix, _ in lines))
        prefixes = np.full((len(lines), longest), _ANY, np.int64)
        for line, (*_, prefix, _) in zip(prefixes, lines, strict=True):
            line[longest - len(prefix) :] = prefix
        places = [position * words.vocab_size + last for position, _, _, last in lines]
        columns = positions, rows, np.array([row for _, row, *_ in lines]), np.array(places), prefixes
        on_device = (torch.from_numpy(column).to(self._device) for column in columns)
        self._where, self._rows, self._owners, self._places, self._prefixes = on_device
        if longest > self._tails.shape[1]:
            self._known.clear()
            self._tails = self._tails.new_full((len(self._tails), longest), _NONE)

    def _take_over(self, row: int, batch: InputBatch) -> None:
        longest = self._tails.shape[1]
        tail = np.full(longest, _NONE, np.int64)
        generated = batch.token_ids[row, batch.num_prompt_tokens[row] : batch.num_tokens[row]]
        if count := min(longest, len(generated)):
            tail[-count:] = generated[-count:]
        self._tails[row] = torch.from_numpy(tail).to(self._device)
