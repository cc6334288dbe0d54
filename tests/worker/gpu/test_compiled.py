"""Runs compiled_kernels.py, which compiles kernels for GPUs that this machine lacks, in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def compiled(marks: str) -> None:
    env = os.environ | {"XFORMERS_ENABLE_TRITON": "1", "PYTHONPATH": str(ROOT)}
    file = "tests/worker/gpu/compiled_kernels.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks, file]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_kernels_for_each_architecture() -> None:
    compiled("not long")


@pytest.mark.long
def test_the_kernels_of_rarer_shapes() -> None:
    compiled("long")
