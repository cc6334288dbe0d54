"""Measures a device's limits and its use: bandwidth, matrix multiplication, launches, and idle time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Seconds of one run: the mean of ``repeats`` runs after one warm-up."""
    run()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def replayed(run: Callable[[T], object], inputs: Sequence[T]) -> float:
    """Seconds of one run: the least of three replays of a CUDA graph with a run for each of ``inputs``."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(inputs[0])
        run(inputs[-1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for each in inputs:
            run(each)
    graph.replay()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 1e-3 * min(times) / len(inputs)


def bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy."""
    size = 2 << 30 if device.type == "cuda" else 64 << 20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def gemm_peak(device: torch.device) -> float:
    """Floating-point operations per second of a large square matrix product in bfloat16."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device)


@dataclass(frozen=True)
class Trace:
    """The trace of one step: launching calls, waiting calls, and seconds in which the device computed.

    ``kernels`` has the launches and the seconds of each kernel in a step, the longest first.
    """

    launches: float
    waits: float
    busy_s: float
    kernels: dict[str, tuple[float, float]]


def trace(run: Callable[[], object], steps: int, device: torch.device) -> Trace | None:
    """The average trace of ``steps`` runs by torch's profiler. None without a GPU."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        synchronize(device)
    on_host, on_device = [], []
    kernels: dict[str, tuple[float, float]] = {}
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            on_device.append((event.time_range.start, event.time_range.end))
            name = event.name.removeprefix("void ").split("<", 1)[0][:80]
            calls, taken = kernels.get(name, (0.0, 0.0))
            kernels[name] = calls + 1 / steps, taken + event.time_range.elapsed_us() * 1e-6 / steps
        else:
            on_host.append(event.name)
    return Trace(
        sum(name.startswith(_LAUNCHES) for name in on_host) / steps,
        sum(name.startswith(_WAITS) for name in on_host) / steps,
        covered(on_device) * 1e-6 / steps,
        dict(sorted(kernels.items(), key=lambda kernel: -kernel[1][1])),
    )


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of ``spans``."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
