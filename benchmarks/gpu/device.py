"""What a device can do at best, and what it did: bandwidth, multiplications, launches, and the time it stood idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """One run's time, the mean of several after one that is not counted."""
    run()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def bandwidth(device: torch.device) -> float:
    """Bytes per second, of a copy: what is read and what is written."""
    size = 2 << 30 if device.type == "cuda" else 64 << 20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def gemm_peak(device: torch.device) -> float:
    """Floating-point operations per second of a large square product in bfloat16."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device)


@dataclass(frozen=True)
class Trace:
    """Of one step: calls that launch something, calls that wait, and seconds in which the device computed."""

    launches: float
    waits: float
    busy_s: float


def trace(run: Callable[[], object], steps: int, device: torch.device) -> Trace | None:
    """What torch's profiler sees of ``steps`` runs, for each; None where there is no GPU."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        synchronize(device)
    on_host, on_device = [], []
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            on_device.append((event.time_range.start, event.time_range.end))
        else:
            on_host.append(event.name)
    return Trace(
        sum(name.startswith(_LAUNCHES) for name in on_host) / steps,
        sum(name.startswith(_WAITS) for name in on_host) / steps,
        covered(on_device) * 1e-6 / steps,
    )


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of ``spans``."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
