"""The device of a worker, and its KV blocks."""

from __future__ import annotations

import warnings

import pytest
import torch

from raylm.errors import ConfigError
from raylm.worker.startup import resolve_device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CUDA build of torch on a machine whose GPU it cannot use. Ray gave the process no GPU."""

    def is_available() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_without_a_gpu_the_cpu_serves(machine: pytest.MonkeyPatch) -> None:
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    machine.setenv("CUDA_VISIBLE_DEVICES", "")  # as Ray sets it for actors without GPUs
    assert resolve_device("auto") == torch.device("cpu")


def test_with_a_gpu_it_serves(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")


def test_a_gpu_that_cannot_be_used_is_refused_by_its_reason(machine: pytest.MonkeyPatch) -> None:
    """Ray gave the worker a GPU, so it must not serve on the CPU."""
    machine.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"^device: this worker was given GPU 3 .*The NVIDIA driver .* is too old"):
        resolve_device("auto")
    with pytest.raises(ConfigError, match=r"^device: cuda is requested, but torch .*too old"):
        resolve_device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")
    machine.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="this build of torch has no CUDA"):
        resolve_device("auto")
