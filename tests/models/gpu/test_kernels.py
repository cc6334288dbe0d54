"""The elementwise kernels, and torch in their place without triton."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raylm.models import elementwise
from raylm.models.elementwise import TORCH, select_elementwise

ROOT = Path(__file__).parents[3]
FILES = sorted(Path(__file__).parent.glob("interpreted_*.py"))


def interpreted(marks: str) -> None:
    """Run all interpreted_*.py in one process, because the interpreter is chosen for a whole process."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks, *map(str, FILES)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_kernels_in_tritons_interpreter() -> None:
    interpreted("not long")


@pytest.mark.long
def test_the_kernels_in_tritons_interpreter_with_other_shapes() -> None:
    interpreted("long")


def test_without_triton_torch_serves_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(elementwise, "ELEMENTWISE", {"cuda": absent})
    with caplog.at_level(logging.WARNING):
        assert select_elementwise(torch.device("cuda")) is TORCH
    assert "and slower: No module named 'triton'" in caplog.text
    caplog.clear()
    assert select_elementwise(torch.device("cpu")) is TORCH
    assert not caplog.text
