"""The benchmarks of a simulated fleet: every policy serves all requests, and the figures are counted correctly."""

from __future__ import annotations

import pytest

from benchmarks.fleet import fairness
from benchmarks.fleet.policies import POLICIES
from raylm.simulate import LOADS, Fleet, LoadSettings, simulate
from raylm.simulate.ingress import Served


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_all(policy: str) -> None:
    fleet = Fleet.of({"engines": [{"count": 3, "num_blocks": 2000}], "ingresses": 2, "staleness_s": 0.1}, "test")
    load = LOADS["bursts"](LoadSettings(requests=32, rate=20, output_tokens=(2, 9)))
    served = simulate(fleet, load, 1, POLICIES[policy]).served
    assert len(served) == 32
    assert not any(one.error for one in served)
    assert len({one.engine for one in served}) > 1


def test_what_is_charged_within_a_time() -> None:
    one = Served(0.0, "key", 100, 40, "engine-0", first_s=1.0, last_s=5.0, cached_tokens=60)
    assert fairness.charged(one, 0.0, 9.0) == 40 + 2 * 40
    assert fairness.charged(one, 2.0, 4.0) == 2 * 20
    assert fairness.charged(one, 6.0, 9.0) == 0


def test_the_longest_prefix_goes_first_where_that_is_the_queue() -> None:
    fleet = fairness.fleet("fcfs")
    load = [(0.0, 7, 600), (0.001, 8, 600), (0.002, 9, 600), (0.003, 7, 600)]
    asked = [fairness.SimulatedRequest(at, [first] * tokens, [1], 20, "k") for at, first, tokens in load]
    narrow = fleet.model_copy(update={"config": fleet.config.model_copy(
        update={"scheduler": fleet.config.scheduler.model_copy(update={"max_num_seqs": 1})})})  # fmt: skip
    ended = {
        queue: [one.at for one in simulate(narrow, fairness.Replay(asked), queue=queue).served]
        for queue in (None, fairness.LongestPrefixFirst)
    }
    assert ended[None] == [0.0, 0.001, 0.002, 0.003]
    assert ended[fairness.LongestPrefixFirst] == [0.0, 0.003, 0.001, 0.002]
