"""Experts of one layer whose weights are stacked, on devices where they are multiplied by grouped products."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from raylm.lazy import Family

logger = logging.getLogger(__name__)

Gate = Callable[[Tensor], Tensor]  # (rows, 2 * inner) -> (rows, inner)
# (x (tokens, hidden), index (tokens, chosen) int64, weights (tokens, chosen)) -> (tokens, hidden): what the experts
# ``index`` of each token give, weighed and added. Nothing waits for the device, and launches depend on shapes alone.
GroupedExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
# By device, made of gate_up (experts, 2 * inner, hidden), down (experts, hidden, inner) and a gate; without its line
# experts are multiplied one by one there.
GROUPED_EXPERTS = Family[Callable[[Tensor, Tensor, Gate], GroupedExperts]]({
    "cuda": "raylm.models.gpu.experts:TritonExperts",
})  # fmt: skip


def group_experts(gate_up: Tensor, down: Tensor, gate: Gate) -> GroupedExperts | None:
    """None where experts are better off one by one, as on a CPU; a slower way than usual is named in the log."""
    if gate_up.device.type not in GROUPED_EXPERTS:
        return None
    try:
        return GROUPED_EXPERTS[gate_up.device.type](gate_up, down, gate)
    except ModuleNotFoundError as error:
        logger.warning("Experts are multiplied one by one, and much slower: %s", error)
        return None
