"""Attention by our own kernels: the models that use them, and interpreted_paged.py in a separate process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raylm.worker.attention import select_backend
from raylm.worker.gpu import triton_attention
from raylm.worker.gpu.triton_attention import TritonBackend
from tests.worker.gpu.test_xformers import CPU, CUDA, gpu, spec  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[3]


def interpreted(marks: str) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    file = "tests/worker/gpu/interpreted_paged.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks, file]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.long
def test_the_kernels_in_tritons_interpreter() -> None:
    interpreted("not long")


@pytest.mark.long
def test_the_kernels_with_any_mix_of_sequences() -> None:
    interpreted("long")


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 9}, {"softcap": 30.0}, {"head_dim": 80}, {"head_dim": 96}], ids=str
)
def test_it_serves_every_kind_of_layer_and_nothing_is_slower(
    gpu: pytest.MonkeyPatch,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, float],
) -> None:
    with caplog.at_level(logging.INFO):
        assert select_backend([spec(), spec(**changes)], torch.bfloat16, CUDA, 64) is TritonBackend
    assert not caplog.records


def test_what_it_refuses(gpu: pytest.MonkeyPatch) -> None:  # noqa: F811
    gpu.setattr(triton_attention, "probe", lambda *args: None)

    def refusals(
        dtype: torch.dtype = torch.bfloat16, device: torch.device = CUDA, size: int = 64, **changes: int
    ) -> str:
        return "; ".join(TritonBackend.supports(spec(**changes), dtype, device, size))

    assert refusals() == ""
    assert refusals(device=CPU) == "it computes on NVIDIA GPUs only"
    assert refusals(torch.float32) == "it has no torch.float32"
    assert refusals(head_dim=512) == "it has no head_dim 512, only 16 to 256"
    assert refusals(size=48) == "it has no blocks of 48 tokens, only 16, 32, 64, .."
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "compute capability 8.0" in refusals()
    gpu.setattr(triton_attention, "probe", lambda *args: "its results are wrong")
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert refusals() == "its results are wrong"
