"""Random runs of the engine core: each request gets exactly the tokens that it gets alone."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.simulation import Run, random_script, random_setup


def live(seed: int, length: int, stages: int = 1) -> Run:
    """A random run of one engine with ``length`` events. With several ``stages`` there are no drafts."""
    rng = Random(seed)
    setup = random_setup(rng)
    run = Run(setup if stages == 1 else replace(setup, stages=stages, speculative_tokens=0))
    run.play(random_script(rng, length))
    return run


@settings(max_examples=1500, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(5, 80))
@example(2455, 68)  # the running sequences take the blocks of a new one, for which a sequence was preempted
def test_every_request_gets_what_it_would_have_got_alone(seed: int, length: int) -> None:
    run = live(seed, length)
    assert run.settled == {request.key for _, request in run.added}


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(5, 80), stages=st.integers(2, 4))
def test_so_it_does_over_several_stages(seed: int, length: int, stages: int) -> None:
    run = live(seed, length, stages)
    assert run.settled == {request.key for _, request in run.added}


@pytest.mark.long
def test_nor_do_lives_of_five_minutes_find_a_fault() -> None:
    until = time.process_time() + 300
    for seed in count(2**32):
        run = live(seed, 5 + seed % 160)
        assert run.settled == {request.key for _, request in run.added}, f"seed {seed}"
        if time.process_time() > until:
            return
