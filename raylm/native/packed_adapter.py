"""A LoRA adapter packed for the native decoder: for each linear layer one product down, and one up for each part."""

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
    """Consecutive tokens of a step, ``start`` .. ``start + count``, with one packed adapter."""

    adapter: object
    start: int
    count: int


class PackedAdapter:
    """An adapter in the form of the native decoder.

    ``layers`` has, for qkv, output, gate and up, and down of each decoder layer in turn, (first column, down, up) of
    their parts: down (rank, in) and up (columns, rank), both of the decoder's dtype.
    """

    def __init__(self, layers: Sequence[Parts]) -> None:
        self._arena = Arena()  # its own arena, which is freed with the adapter
        self._kept: list[Tensor] = []
        self.sites = (lib.LowRankStruct * len(layers))(*map(self._site, layers))

    def _site(self, parts: Parts) -> lib.LowRankStruct:
        site, rank_at = lib.LowRankStruct(), 0
        if not parts:
            return site
        downs = [_whole_lanes(down) for _, down, _ in parts]
        site.down, site.parts = self._pack(torch.cat(downs)), len(parts)
        for place, ((column, _, up), down) in enumerate(zip(parts, downs, strict=True)):
            packed = self._pack(F.pad(up, (0, len(down) - up.shape[1])))
            site.part[place] = lib.LowRankPart(up=packed, column=column, rank_at=rank_at)
            rank_at += len(down)
        return site

    def _pack(self, weight: Tensor) -> lib.LinearStruct:
        """As raylm_pack, but without the team of threads, which may be running a step."""
        rows, depth = _whole_lanes(weight), weight.shape[1]
        words = rows.contiguous().view(torch.int32)
        streams = words.view(-1, lib.LANES, words.shape[1]).transpose(1, 2)
        packed = self._arena.empty(tuple(streams.shape), torch.int32).copy_(streams)
        self._kept.append(packed)
        return lib.LinearStruct(KINDS[weight.dtype], len(rows), depth, words.shape[1], packed.data_ptr())


def _whole_lanes(weight: Tensor) -> Tensor:
    """Pad rows with zeros to a multiple of 16."""
    return F.pad(weight, (0, 0, 0, -len(weight) % lib.LANES))
