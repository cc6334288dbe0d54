"""Steps compute in the order of their numbers, whatever the order of their threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raylm.engine.ray_executor import Turns


def test_steps_run_one_by_one_and_in_order() -> None:
    turns, ran, running = Turns(), [], threading.Semaphore(1)

    def run(step: int) -> None:
        time.sleep(0.001 * (step % 3))
        with turns.wait_for(step):
            assert running.acquire(blocking=False), "two steps compute at the same time"
            ran.append(step)
            running.release()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, [2, 1, 4, 3, 6, 7, 8, 5]))
    assert ran == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_step_that_fails_passes_the_turn_on() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="broken"), turns.wait_for(1):
        raise ValueError("broken")
    with turns.wait_for(2):
        pass
