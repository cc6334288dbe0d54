"""The number of threads of a step: the search on a simulated machine, and results that do not depend on it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from raylm.native import NativeLinear, kernels
from raylm.native.team_size import TeamSize

Machine = Callable[[int, int], float]


def free_machine(tokens: int, threads: int) -> float:
    """Seconds of a step without other processes."""
    return (0.004 + 0.001 * tokens) / threads


def shared_machine(busy: int, cores: int = 4) -> Machine:
    """Others use ``busy`` cores. A step with more threads than free cores waits for them in every phase."""

    def seconds(tokens: int, threads: int) -> float:
        free = cores - busy
        return free_machine(tokens, min(threads, free)) * (1 + 0.5 * max(0, threads - free))

    return seconds


def steps(size: TeamSize, machine: Machine, tokens: int, count: int, noise: random.Random) -> list[int]:
    """Run ``count`` steps. Returns the number of threads chosen for each."""
    chosen = []
    for _ in range(count):
        chosen.append(size.choose(tokens))
        size.observe(tokens, machine(tokens, chosen[-1]) * noise.uniform(0.98, 1.06))
    return chosen


def share(chosen: list[int], threads: int) -> float:
    """The fraction of the steps with ``threads`` threads."""
    return chosen.count(threads) / len(chosen)


@pytest.mark.parametrize("tokens", [1, 8, 700])
@pytest.mark.parametrize("seed", range(5))
def test_an_undisturbed_team_keeps_all_threads(tokens: int, seed: int) -> None:
    chosen = steps(TeamSize(4), free_machine, tokens, 2000, random.Random(seed))
    assert share(chosen, 4) > 0.98


@pytest.mark.parametrize("seed", range(5))
def test_a_trial_that_is_hopeless_ends_with_its_first_step(seed: int) -> None:
    """With one thread in place of two, a long prompt takes twice the time."""
    chosen = steps(TeamSize(2), free_machine, 2048, 140, random.Random(seed))
    assert chosen.count(1) == 2, "after 32 steps, and after 64 more"


@pytest.mark.parametrize("seed", range(10))
def test_steps_of_one_kind_that_differ_by_half_do_not_mislead_it(seed: int) -> None:
    noise, size = random.Random(seed), TeamSize(4)
    chosen = []
    for _ in range(1500):
        chosen += steps(
            size, lambda tokens, threads: free_machine(tokens, threads) * noise.uniform(1, 1.5), 900, 1, noise
        )
    assert share(chosen, 4) > 0.9


@pytest.mark.parametrize("busy", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_cores_that_others_use_are_left_to_them_and_taken_back(busy: int, seed: int) -> None:
    noise, size = random.Random(seed), TeamSize(4)
    steps(size, free_machine, 1, 500, noise)
    disturbed = steps(size, shared_machine(busy), 1, 600, noise)
    assert share(disturbed[200:], 4 - busy) > 0.9
    freed = steps(size, free_machine, 1, 3000, noise)
    assert share(freed[1500:], 4) > 0.9


def test_a_prompt_and_a_token_are_climbed_apart() -> None:
    def machine(tokens: int, threads: int) -> float:
        return shared_machine(1)(tokens, threads) if tokens == 1 else free_machine(tokens, threads)

    noise, size = random.Random(0), TeamSize(4)
    for _ in range(300):
        steps(size, machine, 1, 3, noise)
        steps(size, machine, 500, 1, noise)
    assert (size.choose(1), size.choose(500)) == (3, 4)


def test_one_thread_is_one_thread() -> None:
    assert set(steps(TeamSize(1), free_machine, 4, 200, random.Random(0))) == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [32, 80, 1040])
def test_results_do_not_depend_on_how_many_take_part(dtype: torch.dtype, columns: int) -> None:
    native = kernels()
    before = native.team.threads
    native.use_threads(4)
    draw = torch.Generator().manual_seed(columns)
    weight = torch.randn(columns, 64, generator=draw).to(dtype)
    x = torch.randn(5, 64, generator=draw).to(dtype)
    layer = NativeLinear(native, weight, None)
    try:
        found = []
        for threads in (4, 1, 3, 2, 4, 3, 4, 1, 4):
            native.team.use(threads)
            found.append(layer(x))
    finally:
        native.use_threads(before)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(found[0].double(), expected, rtol=2e-2, atol=2e-2)
    for other in found[1:]:
        assert torch.equal(found[0], other)
