"""Log-probabilities of tokens drawn on the device, computed there and copied to the host with the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raylm.messages import Logprobs
from raylm.worker.arrays import IntArray, Ints, Mask
from raylm.worker.input_batch import NO_LOGPROBS, InputBatch
from raylm.worker.sampling.logprobs import WIDTH, FoundLogits, logprob_columns_of

_BEFORE_VALUES = 2  # columns before the largest logits in ``numbers``, and before their ids in ``places``


@dataclass(frozen=True, slots=True)
class Asked:
    """The rows of a step [S] that want log-probabilities, the number of ``tops``, and chosen tokens by position."""

    wanted: Mask
    tops: IntArray
    chosen: Mapping[int, Ints]


@dataclass(frozen=True, slots=True)
class LogprobsOnTheirWay:
    """Results that the host has after the step, for the W rows that request log-probabilities.

    ``numbers`` (W, 2 + WIDTH + most requested tokens) float64: the drawn token's logit, the logarithm of the sum of all
    exponentials, the largest logits in descending order, the logits of the requested tokens. ``places`` (W, 2 + WIDTH)
    int64: the token, its rank, the ids of the largest logits.
    """

    asked: Asked
    numbers: Tensor
    places: Tensor

    def columns(self, usable: Mask) -> Logprobs:
        """The columns over all rows of the step. Only rows in ``usable`` [S] have entries."""
        wanted = self.asked.wanted & usable
        at = np.flatnonzero(usable[self.asked.wanted])
        numbers, places = self.numbers.numpy()[at], self.places.numpy()[at]
        width = places.shape[1] - _BEFORE_VALUES
        values = numbers[:, _BEFORE_VALUES : _BEFORE_VALUES + width].astype(np.float32)
        own = numbers[:, 0].astype(np.float32)
        found = FoundLogits(places[:, 0], own, numbers[:, 1], places[:, 1], values, places[:, _BEFORE_VALUES:])
        where = np.cumsum(wanted) - 1
        given = {
            position: (ids, numbers[where[position], _BEFORE_VALUES + width :][: len(ids)].astype(np.float32))
            for position, ids in self.asked.chosen.items()
            if wanted[position]
        }
        return logprob_columns_of(found, self.asked.tops, wanted, given)


class DeviceLogprobs:
    """Describes drawn tokens by the model's logits, like logprobs.describe_tokens on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: tuple[bytes, ...] = ()
        self._where = self._chosen = torch.zeros(0, dtype=torch.int64, device=device)

    def asked(self, rows: IntArray, owners: IntArray, batch: InputBatch) -> Asked | None:
        """What the ``rows`` with these ``owners`` request, None if nothing."""
        tops = batch.sampling[rows]["logprobs"]
        wanted = tops != NO_LOGPROBS
        if not wanted.any():
            return None
        given = batch.logprob_token_ids
        asked = Asked(wanted, tops, {at: given[row] for at, row in enumerate(rows.tolist()) if row in given})
        if self._step != (step := (rows.tobytes(), owners.tobytes())):
            self._step = step
            positions = np.flatnonzero(wanted)
            most = max((len(ids) for ids in asked.chosen.values()), default=0)
            chosen = np.zeros((len(positions), most), np.int64)
            for row, position in zip(chosen, positions.tolist(), strict=True):
                ids = asked.chosen.get(position, ())
                row[: len(ids)] = ids
            self._where, self._chosen = (torch.from_numpy(column).to(self._device) for column in (positions, chosen))
        return asked

    def keep(self, logits: Tensor) -> Tensor:
        """Copy the logits of the requesting rows, before processors change them."""
        return logits.index_select(0, self._where)

    def describe(self, asked: Asked, raw: Tensor, drawn: Tensor) -> LogprobsOnTheirWay:
        """Describe the tokens ``drawn`` (rows of the step,) by the kept logits. Does not wait."""
        tokens = drawn.index_select(0, self._where)[:, None]
        own = raw.gather(1, tokens)
        values, ids = raw.topk(min(WIDTH, raw.shape[1]))
        peak = values[:, :1]
        sums = raw.sub(peak).exp_().sum(dim=1, keepdim=True, dtype=torch.float64).log_() + peak
        ranks = 1 + (raw > own).sum(dim=1, keepdim=True)
        numbers = torch.cat([own.double(), sums, values.double(), raw.gather(1, self._chosen).double()], dim=1)
        places = torch.cat([tokens, ranks, ids], dim=1)
        return LogprobsOnTheirWay(asked, self._to_host(numbers), self._to_host(places))

    def _to_host(self, found: Tensor) -> Tensor:
        """Start a copy to the host. torch does not reuse the memory before the copy has ended."""
        place = torch.empty(found.shape, dtype=found.dtype, pin_memory=self._device.type == "cuda")
        return place.copy_(found, non_blocking=True)
