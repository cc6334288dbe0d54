"""Kernels that begin while the previous one ends (programmatic dependent launch, Hopper and later). Needs triton."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

_HOPPER = 9, 0


@lru_cache
def early(device: torch.device) -> dict[str, bool]:
    """Further arguments of a launch on ``device``: the kernel's constant EARLY, and Triton's option if it is true."""
    is_able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER
    return {"EARLY": True, "launch_pdl": True} if is_able else {"EARLY": False}


@triton.jit
def wait_for_previous(EARLY: tl.constexpr) -> None:  # noqa: N803
    """Wait for the results of the previous kernel, if this one is launched EARLY.

    Before this call a kernel may read only what kernels before the previous one wrote, as weights.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
