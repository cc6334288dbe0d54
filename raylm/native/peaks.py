"""most_likely: the most likely tokens, computed by the native kernels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raylm.native.runtime import kernels


def most_likely(logits: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The largest logit of each row of (rows, vocabulary) float32 on the CPU, and the smallest id that has it.

    If a row has NaN, its largest logit is NaN, and its id has no meaning.
    """
    assert (logits.dtype, logits.stride(1)) == (torch.float32, 1)
    rows, columns = logits.shape
    values, ids = np.empty(rows, np.float32), np.empty(rows, np.int64)
    native = kernels()
    with native.lock:
        native.library.raylm_peaks(
            native.team.handle, logits.data_ptr(), rows, columns, logits.stride(0), values.ctypes.data, ids.ctypes.data
        )
    return values, ids
