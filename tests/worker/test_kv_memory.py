"""KVMemory: the pool's memory exists before a step writes it, and no more than needed."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from resource import RUSAGE_THREAD, getrusage

import pytest
import torch

from raylm.native import huge_empty, populate
from raylm.worker import kv_memory
from raylm.worker.kv_memory import KVMemory

BLOCKS, BLOCK_BYTES, AHEAD = 64, 1 << 20, 16
FEW = 5  # faults of the interpreter in the meantime; missing blocks would give 32 or more


@pytest.fixture
def halves() -> list[torch.Tensor]:
    return [half for _ in range(2) for half in huge_empty((2, BLOCKS, BLOCK_BYTES), torch.uint8)]


def faults(halves: list[torch.Tensor], first: int, last: int) -> int:
    """The number of page faults while blocks are written."""
    torch.set_num_threads(1)
    torch.zeros(BLOCK_BYTES, dtype=torch.uint8).fill_(1)  # the memory that the call itself needs exists already
    before = getrusage(RUSAGE_THREAD).ru_minflt
    for half in halves:
        half[first:last].fill_(1)
    return getrusage(RUSAGE_THREAD).ru_minflt - before


def test_the_first_blocks_are_there_before_the_first_step_and_no_others(halves: list[torch.Tensor]) -> None:
    KVMemory(halves, AHEAD).wait()
    assert faults(halves, 0, AHEAD) <= FEW
    assert faults(halves, AHEAD + 2, BLOCKS) > 40, "a huge page may reach 2 MiB further"


def test_and_those_ahead_of_what_is_written(halves: list[torch.Tensor]) -> None:
    memory = KVMemory(halves, AHEAD)
    memory.wait()
    for blocks, there in [([3, 20, 9], 37), ([], 37), ([10], 37), ([60], BLOCKS), ([BLOCKS - 1], BLOCKS)]:
        with memory:
            memory.reach(blocks)
        memory.wait()
        assert faults(halves, 0, there) <= FEW


class Clock:
    """The clock of KVMemory. It does not advance by itself."""

    sleep = staticmethod(time.sleep)
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """With this clock a step begins before the thread asks for memory, however busy the machine is."""
    clock = Clock()
    monkeypatch.setattr(kv_memory, "time", clock)
    return clock


def test_nothing_is_asked_for_while_a_step_runs(halves: list[torch.Tensor], clock: Clock) -> None:
    memory = KVMemory(halves, AHEAD)
    with memory:
        clock.now += 1.0
        time.sleep(0.1)
        written = faults(halves, 0, AHEAD)
    clock.now += 1.0
    memory.wait()
    assert written > 20


def test_what_is_written_stays(halves: list[torch.Tensor]) -> None:
    halves[0][:3] = torch.arange(3 * BLOCK_BYTES).view(3, -1) % 251
    halves[0][3] = 7
    before = halves[0][:4].clone()
    assert populate(halves[0][1:3])
    KVMemory(halves, AHEAD).wait()
    assert torch.equal(halves[0][:4], before)


def test_the_thread_ends_with_the_worker(halves: list[torch.Tensor], clock: Clock) -> None:
    memory = KVMemory(halves, AHEAD)
    with memory:
        clock.now += 1.0
        thread = memory._thread
        assert thread is not None
        time.sleep(0.1)
        assert thread.is_alive(), "the thread waits for the step to end"
    del memory
    gc.collect()  # the generator of missing pieces refers to it
    thread.join(300)
    assert not thread.is_alive()


def test_where_the_system_cannot_it_comes_with_the_first_write(
    halves: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raylm.worker.kv_memory.populate", lambda piece: False)
    memory = KVMemory(halves, AHEAD)
    memory.wait()
    with memory:
        memory.reach([40])
    memory.wait()
    assert faults(halves, 0, AHEAD) > 20


def test_there_is_nothing_to_do_on_a_gpu() -> None:
    memory = KVMemory()
    with memory:
        memory.reach([5])
    assert memory._thread is None


def test_a_program_may_end_while_memory_is_asked_for() -> None:
    """A daemon thread would abort the process if torch waits for the interpreter at its end."""
    program = (
        "import time\n"
        "from raylm.native import huge_empty\n"
        "from raylm.worker import kv_memory\n"
        "kv_memory.populate, kv_memory.time.sleep, kv_memory._PIECE_BYTES = lambda piece: True, lambda pause: None, 1\n"
        "import torch\n"
        "memory = kv_memory.KVMemory([half for half in huge_empty((2, 10**6, 4096), torch.uint8)], 10**6)\n"
        "until = time.monotonic() + 0.2\n"
        "while time.monotonic() < until: pass\n"
        "assert memory._thread.is_alive()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
