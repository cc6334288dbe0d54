"""Triton's compiler for GPUs that this machine lacks: kernels are compiled but not launched. Keeps ptxas' reports."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

KIB = 1024
# Compute capability -> bytes of shared memory that a program may use.
SHARED = {
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (12, 0): 99 * KIB,
}

_REPORTS: dict[str, str] = {}  # ptxas' report of each kernel, which is compiled only once


@dataclass(frozen=True)
class Compiled:
    """One kernel: bytes of shared memory and of spilled registers (stored and loaded), and its PTX."""

    name: str
    shared: int
    registers: int
    spilled: int
    ptx: str


class Driver:
    """Triton's driver of a GPU with this compute capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._arch = 10 * capability[0] + capability[1]

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # Triton caches kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def compiling(capability: tuple[int, int], folder: Path) -> Iterator[list[Compiled]]:
    """Compile all kernels that are launched in the block, and collect them. Launch none."""
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []
    compile_and_launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        report = io.StringIO()
        with contextlib.redirect_stdout(report):
            kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in _REPORTS:
            _REPORTS[kernel.hash] = report.getvalue()
        found.append(_compiled(self.fn.__name__, kernel, _REPORTS[kernel.hash]))
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(JITFunction, "run", run)
        patch.setattr(knobs.nvidia, "dump_ptxas_log", True)
        patch.setattr(knobs.cache, "dir", str(folder))
        patch.setattr(driver, "_active", Driver(capability))
        yield found


@contextlib.contextmanager
def asking(capability: tuple[int, int]) -> Iterator[set[tuple[str, str]]]:
    """Collect the (kernel, specialization) pairs of all launches in the block. Compile and launch none."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: set[tuple[str, str]] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        *_, binder = self.device_caches[driver.active.get_current_device()]
        options |= {"debug": False, "instrumentation_mode": ""}
        _, specialization, rest = binder(*args, **options)
        found.add((self.fn.__name__, f"{specialization} {rest}"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(JITFunction, "run", run)
        patch.setattr(driver, "_active", Driver(capability))
        yield found


def _compiled(name: str, kernel: Any, report: str) -> Compiled:
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert spilled, f"ptxas said nothing of {name}: {report}"
    assert registers
    bytes_spilled = sum(map(int, spilled.groups()))
    return Compiled(name, kernel.metadata.shared, int(registers[1]), bytes_spilled, kernel.asm["ptx"])
