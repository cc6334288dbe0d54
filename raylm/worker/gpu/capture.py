"""Capturing on all of the ranks that share a model, or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from raylm.models import Ranks

T = TypeVar("T")


def on_all_ranks(ranks: Ranks, attempt: Callable[[], T]) -> T:
    """What ``attempt`` captures, once every rank has found the memory for it.

    NCCL asks that a sum is captured by all ranks or by none, and a rank that gave up half-way would leave the others in
    a sum that never ends. So each tries by itself first, without any sum, and drops what it captured; if all had the
    memory they capture together.

    Raises:
        torch.OutOfMemoryError: on all ranks, if one has no memory for it.
        RuntimeError: this rank had the memory when it tried, and then not; the others may wait for it.
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
        raise RuntimeError("A CUDA graph had memory when it was tried, and none when it was captured.") from error
