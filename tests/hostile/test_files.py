"""Untrusted files: mutated checkpoints, adapters and GGUF files are served or refused, and none crashes its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters import make_adapter
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf
from tests.hostile.files import attempt


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("files")
    checkpoint = make_checkpoint(folder / "checkpoint")
    return (
        checkpoint,
        make_adapter(checkpoint, folder / "adapter"),
        make_gguf(checkpoint, folder / "model.gguf", "Q8_0"),
    )


@pytest.mark.parametrize(
    ("checkpoints", "adapters", "ggufs"),
    [(12, 6, 12), pytest.param(200, 60, 60, marks=pytest.mark.long)],
    ids=["some", "hundreds"],
)
def test_mutated_files_are_served_or_refused(
    made: tuple[Path, Path, Path], checkpoints: int, adapters: int, ggufs: int
) -> None:
    counts = ["--checkpoints", str(checkpoints), "--adapters", str(adapters), "--ggufs", str(ggufs)]
    command = [sys.executable, "-m", "tests.hostile.files", *map(str, made), *counts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_what_goes_wrong_in_a_child_is_found() -> None:
    def wrong() -> str:
        raise TypeError("a traceback")

    assert attempt(wrong).startswith("FOUND Traceback")
    too_much = attempt(lambda: bytearray(2**40))
    assert too_much.startswith("FOUND")
    assert "MemoryError" in too_much
