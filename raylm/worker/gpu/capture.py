"""on_all_ranks: captures a graph on all ranks that share a model, or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from raylm.models import Ranks

T = TypeVar("T")


def on_all_ranks(ranks: Ranks, attempt: Callable[[], T]) -> T:
    """Capture with ``attempt`` if every rank has enough memory.

    NCCL requires that all ranks capture a sum or none. A rank that fails during the capture would leave the others
    waiting in a sum. So each rank first tries alone, without sums, and drops the result. If all have succeeded, they
    capture together.

    Raises:
        torch.OutOfMemoryError: on all ranks, if one has not enough memory.
        RuntimeError: this rank had enough memory in the trial, but not in the capture. Other ranks may wait for it.
    """
    if ranks.world_size == 1:
        return attempt()
    lacking: torch.OutOfMemoryError | None = None
    with ranks.apart():
        try:
            attempt()
        except torch.OutOfMemoryError as error:
            lacking = error.with_traceback(None)
    if not ranks.all_reduce_min([lacking is None])[0]:
        raise lacking or torch.OutOfMemoryError("another rank has none for it")
    try:
        return attempt()
    except torch.OutOfMemoryError as error:
        raise RuntimeError("A CUDA graph had enough memory in its trial, but not in its capture.") from error
