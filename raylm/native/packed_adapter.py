"""A LoRA adapter packed for the native decoder: per linear layer one product down, and one up for each of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import raylm.native.library as lib
from raylm.native.linear import KINDS
from raylm.native.memory import Arena

Parts = Sequence[tuple[int, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Consecutive tokens of a step, ``start`` .. ``start + count``, that one packed adapter changes."""

    adapter: object
    start: int
    count: int


class PackedAdapter:
    """``layers`` holds, for qkv, output, gate and up, and down of each decoder layer in turn, (first column, down, up)
    of their parts.

    ``down`` is (rank, in) and ``up`` (columns, rank), both of the decoder's type. Ranks are filled up with zeros to a
    multiple of 16.
    """

    def __init__(self, layers: Sequence[Parts]) -> None:
        self._arena = Arena()  # of its own: it goes when the adapter does
        self._kept: list[Tensor] = []
        self.sites = (lib.LowRank * len(layers))(*map(self._site, layers))

    def _site(self, parts: Parts) -> lib.LowRank:
        site, rank_at = lib.LowRank(), 0
        if not parts:
            return site
        downs = [_filled(down, rows=-len(down) % lib.LANES) for _, down, _ in parts]
        site.down, site.parts = self._pack(torch.cat(downs)), len(parts)
        for place, ((column, _, up), down) in enumerate(zip(parts, downs, strict=True)):
            packed = self._pack(_filled(up, columns=len(down) - up.shape[1]))
            site.part[place] = lib.LowRankPart(up=packed, column=column, rank_at=rank_at)
            rank_at += len(down)
        return site

    def _pack(self, weight: Tensor) -> lib.Linear:
        """As raylm_pack does it, but without the team, which may be in the middle of a step."""
        rows = _filled(weight, rows=-len(weight) % lib.LANES)
        words = rows.contiguous().view(torch.int32)
        units = words.shape[1]
        streams = words.view(-1, lib.LANES, units).transpose(1, 2)
        packed = self._arena.empty(tuple(streams.shape), torch.int32).copy_(streams)
        self._kept.append(packed)
        return lib.Linear(
            kind=KINDS[weight.dtype], columns=len(rows), depth=weight.shape[1], units=units, packed=packed.data_ptr()
        )


def _filled(weight: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    return F.pad(weight, (0, columns, 0, rows))
