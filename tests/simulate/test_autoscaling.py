"""Autoscaling of a simulated fleet: decisions for given loads, and requests whose engine ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from raylm.config import ReplicaRange
from raylm.engine import EngineLoad
from raylm.errors import ConfigError
from raylm.simulate import LOADS, Fleet, LoadSettings, Outcome, Replay, Targets, figures, simulate
from raylm.simulate.autoscaler import Autoscaler
from raylm.simulate.trace import SimulatedRequest

IDLE = EngineLoad(places=64)
BUSY = EngineLoad(sequences=10, places=64, queued_s=7.0)
COSTS = {"base_s": 0.01, "token_s": 0.001, "sequence_s": 0.0, "attention_s": 0.0}


def fleet(start_s: float, staleness_s: float = 0.0, ingresses: int = 1, **limits: Any) -> Fleet:
    replicas = {"min": 1, "max": 4, "target_ttft_s": 1.0, "downscale_delay_s": 10} | limits
    group = {"count": 1, "num_blocks": 4000, "replicas": replicas, "start_s": start_s}
    delays = {"staleness_s": staleness_s, "ingresses": ingresses}
    return Fleet.of({"engines": [group], "costs": COSTS} | delays, "test")


def burst(number: int, at: float = 0.0, output_tokens: int = 20) -> list[SimulatedRequest]:
    return [SimulatedRequest(at, [1000 * n + place for place in range(400)], [7], output_tokens) for n in range(number)]


def test_more_engines_are_started_after_three_seconds_and_fewer_after_the_delay() -> None:
    scaler = Autoscaler(1, ReplicaRange(min=1, max=8, target_ttft_s=2.0, downscale_delay_s=5))
    loads = [BUSY] * 5 + [IDLE] * 2 + [BUSY] * 4
    assert [scaler.decide([load], float(now)) for now, load in enumerate(loads)] == [1, 1, 1, 4, 4, 4, 4, 4, 4, 4, 4]
    quiet = [scaler.decide([IDLE] * 4, float(now)) for now in range(11, 18)]
    assert quiet == [4, 4, 4, 4, 4, 1, 1], "after five seconds without a break"


def test_a_pause_begins_the_delay_again() -> None:
    scaler = Autoscaler(1, ReplicaRange(min=1, max=8, target_ttft_s=2.0))
    assert [scaler.decide([load], float(now)) for now, load in enumerate([BUSY, BUSY, IDLE, BUSY, BUSY, BUSY])] == [
        1
    ] * 6


def held(outcome: Outcome) -> list[float]:
    return sorted(outcome.held_s.values(), reverse=True)


def test_a_backlog_starts_engines_and_quiet_ends_them() -> None:
    later = [SimulatedRequest(60.0 + n, [n] * 10, [7], 2) for n in range(3)]
    outcome = simulate(fleet(start_s=5.0), Replay(burst(60) + later))
    assert Counter(bool(one.error) for one in outcome.served) == {False: 63}
    first, *others = held(outcome)
    assert first == pytest.approx(outcome.end_s)
    assert len(others) == 3
    assert all(8 < seconds < 40 for seconds in others), "started after 3 s, and ended 10 s after their last work"
    assert {one.engine for one in outcome.served if one.at >= 60} == {"engine-0"}
    assert figures(outcome, Targets())["engine_s"] == pytest.approx(sum(held(outcome)))


def test_engines_that_start_late_help_less() -> None:
    means = [
        figures(simulate(fleet(start_s=start_s), Replay(burst(120))), Targets())["ttft_ms"]["mean"]
        for start_s in (1.0, 10.0, 60.0)
    ]
    assert means[0] < means[1] < means[2]


@pytest.mark.parametrize(("staleness_s", "ingresses"), [(0.0, 1), (0.2, 2)])
def test_another_engine_continues_the_requests_of_an_engine_that_ends(staleness_s: float, ingresses: int) -> None:
    """Long answers keep two engines running.

    The engine that ends hands its answers over, and no token is drawn twice.
    """
    asked = burst(60) + [SimulatedRequest(2.0, [5, n], [8, 9, 10, n + 20], 4000) for n in range(8)]
    outcome = simulate(fleet(2.0, staleness_s, ingresses, max=2, downscale_delay_s=2), Replay(asked))
    assert [one.error for one in outcome.served] == [""] * 68
    ends = {name: seconds for name, seconds in outcome.held_s.items() if seconds < outcome.end_s}
    assert set(ends) == {"engine-1"}, "it ended while answers were generated"
    long = [one for one in outcome.served if one.output_tokens == 4000]
    assert {one.engine for one in long} == {"engine-0"}
    steps = sum(outcome.intervals.values())
    assert steps == 60 * 19 + 8 * 3999, "each token after the first came once"


def test_a_fleet_that_scales_serves_every_request_once() -> None:
    settings = LoadSettings(requests=300, rate=12, output_tokens=(2, 40), keys=3)
    for load in ("bursts", "diurnal", "sessions"):
        outcome = simulate(fleet(3.0, 0.1, 2, downscale_delay_s=1), LOADS[load](settings))
        assert {one.error for one in outcome.served} == {""}
        assert sum(outcome.intervals.values()) <= sum(one.output_tokens - 1 for one in outcome.served)


@pytest.mark.parametrize(
    ("group", "named"),
    [
        ({"start_s": 3.0}, "start_s: needs replicas"),
        ({"count": 9, "replicas": {"min": 1, "max": 4}}, "count: 9 is not a number of engines between"),
        ({"count": 2, "replicas": {"min": 3, "max": 4}}, "count: 2 is not"),
        ({"replicas": {"min": 1, "max": 4, "delay": 4}}, "unknown key 'delay'"),
    ],
)
def test_a_wrong_group_is_refused_by_name(group: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Fleet.of({"engines": [group]}, "test")
