"""Grouped products for experts of one layer with stacked weights, on devices that support them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from raylm.lazy import Family

logger = logging.getLogger(__name__)

Gate = Callable[[Tensor], Tensor]  # (rows, 2 * inner) -> (rows, inner)
# (x (tokens, hidden), index (tokens, chosen) int64, weights (tokens, chosen)) -> (tokens, hidden): the weighted sum of
# the outputs of each token's experts ``index``. Does not wait for the device, and launches depend only on shapes.
GroupedExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
# By device, constructed from gate_up (experts, 2 * inner, hidden), down (experts, hidden, inner) and a gate. On other
# devices, experts are multiplied one by one.
GROUPED_EXPERTS = Family[Callable[[Tensor, Tensor, Gate], GroupedExperts]]({
    "cuda": "raylm.models.gpu.experts:TritonExperts",
})  # fmt: skip


def group_experts(gate_up: Tensor, down: Tensor, gate: Gate) -> GroupedExperts | None:
    """Grouped experts. None if single products are better, as on a CPU. Logs a warning if a slower way is used."""
    if gate_up.device.type not in GROUPED_EXPERTS:
        return None
    try:
        return GROUPED_EXPERTS[gate_up.device.type](gate_up, down, gate)
    except ModuleNotFoundError as error:
        logger.warning("Experts are multiplied one by one, and much slower: %s", error)
        return None
