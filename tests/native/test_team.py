"""The team of threads computes the results of one thread, whatever delays its threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from raylm.native.build import SOURCES, find_compiler


def compiled(name: str, folder: Path) -> Path:
    """Compile one of the programs in this folder."""
    program, source = folder / name, Path(__file__).with_name(f"{name}.cpp")
    command = [find_compiler(), "-O2", "-std=c++20", "-pthread", f"-I{SOURCES}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that runs a team through random phases while its threads fall asleep."""
    return compiled("team_stress", tmp_path_factory.mktemp("team"))


@pytest.mark.parametrize("threads", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_phase_is_computed_whole_whoever_is_held_up(stress: Path, threads: int, seed: int) -> None:
    done = subprocess.run(
        [stress, str(threads), "20", str(seed)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "right\n"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_step_does_not_wait_for_threads_that_get_no_core(tmp_path: Path, threads: int) -> None:
    command = [compiled("team_absent", tmp_path), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "right\n"
