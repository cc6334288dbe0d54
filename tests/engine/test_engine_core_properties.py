"""Random runs of EngineCores: each client gets the tokens of its requests, also after losses of engines."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.core_lives import Life


def live(seed: int, length: int) -> Life:
    """Run ``length`` random events."""
    life = Life(seed)
    asyncio.run(life.live(length))
    return life


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(20, 120))
def test_every_client_gets_what_it_would_have_got_alone(seed: int, length: int) -> None:
    live(seed, length)


def test_lives_are_full_of_all_that_may_happen() -> None:
    done = Counter[str]()
    ends = Counter[str]()
    for seed in range(40):
        life = live(seed, 80)
        done += life.done
        for asked in life.asked.values():
            ends["whole" if asked.error is None and not asked.gone else type(asked.error).__name__] += 1
    assert min(done.values()) > 20
    assert ends["whole"] > 500
    assert {"DeadlineExceededError", "ModelNotFoundError", "InvalidRequestError"} <= ends.keys()


@pytest.mark.long
def test_nor_do_lives_of_five_minutes_find_a_fault() -> None:
    until = time.process_time() + 300
    for seed in count(2**32):
        live(seed, 20 + seed % 100)
        if time.process_time() > until:
            return
