"""The number of engines for a load: worked examples, properties, and a simulated fleet."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raylm.engine.deployment.autoscaling import EngineLoad, EnginePolicy, ScalingTargets, wanted_engines
from raylm.engine.load_report import Pace
from raylm.messages import EngineStats, OtherClients

TARGETS = ScalingTargets(0, 10, target_ttft_s=2.0, target_itl_s=0.1)
IDLE = EngineLoad(places=64, step_s=0.02, itl_s=0.02)


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([], 0),
        ([IDLE], 0),
        ([IDLE] * 3, 0),
        ([replace(IDLE, sequences=1)], 1),
        ([replace(IDLE, sequences=64)], 1),
        ([replace(IDLE, sequences=65)], 2),
        ([replace(IDLE, sequences=64), IDLE], 1),
        ([replace(IDLE, sequences=1, queued_s=2.0)], 1),
        ([replace(IDLE, sequences=1, queued_s=5.0)], 3),
        ([replace(IDLE, sequences=1, queued_s=3.0), replace(IDLE, sequences=1, queued_s=1.0)], 2),
        ([replace(IDLE, sequences=9, itl_s=0.1)], 1),
        ([replace(IDLE, sequences=9, itl_s=0.12)], 2),
        ([replace(IDLE, sequences=9, itl_s=0.06)] * 2, 1),
        ([replace(IDLE, sequences=9, step_s=0.2, itl_s=0.3)], 1),
        ([replace(IDLE, sequences=1000)], 10),
    ],
)
def test_each_target_asks_for_its_number(loads: list[EngineLoad], wanted: int) -> None:
    assert wanted_engines(loads, len(loads), TARGETS) == wanted


def test_an_engine_that_loads_is_not_ended_before_it_could_say_anything() -> None:
    assert [wanted_engines([], there, TARGETS) for there in (0, 1, 3, 20)] == [0, 1, 3, 10]
    assert wanted_engines([IDLE], 2, TARGETS) == 0


def test_without_a_target_the_pace_does_not_count() -> None:
    assert wanted_engines([replace(IDLE, sequences=9, itl_s=9.0)], 1, replace(TARGETS, target_itl_s=None)) == 1


some_load = st.builds(
    EngineLoad,
    sequences=st.integers(0, 500).map(float),
    places=st.integers(0, 64).map(float),
    queued_s=st.floats(0, 100),
    step_s=st.floats(0, 0.5),
    itl_s=st.floats(0, 5),
)
fleets = st.lists(some_load, max_size=8)
some_targets = st.builds(
    lambda least, more, ttft, itl: ScalingTargets(least, max(1, least + more), ttft, itl),
    st.integers(0, 5),
    st.integers(0, 20),
    st.floats(0.1, 60),
    st.none() | st.floats(0.001, 5),
)


@given(fleets, st.integers(0, 12), some_targets)
def test_the_number_is_within_its_bounds_and_grows_only_when_none_loads(
    loads: list[EngineLoad], loading: int, targets: ScalingTargets
) -> None:
    there = len(loads) + loading
    wanted = wanted_engines(loads, there, targets)
    assert targets.min <= wanted <= targets.max
    if loading:
        assert wanted <= max(there, targets.min)


@given(fleets, some_targets, st.data())
def test_more_to_do_never_asks_for_fewer(loads: list[EngineLoad], targets: ScalingTargets, data: Any) -> None:
    assume(loads)
    place = data.draw(st.integers(0, len(loads) - 1))
    name = data.draw(st.sampled_from(["sequences", "queued_s", "itl_s"]))
    more = replace(loads[place], **{name: getattr(loads[place], name) + data.draw(st.floats(0, 50))})
    busier = [*loads[:place], more, *loads[place + 1 :]]
    assert wanted_engines(busier, len(loads), targets) >= wanted_engines(loads, len(loads), targets)


@given(st.integers(1, 10), st.integers(0, 600), st.integers(1, 100), st.floats(0.001, 0.02), st.floats(0.0001, 0.01))
def test_under_a_steady_load_the_number_settles(
    start: int, sequences: int, places: int, step_s: float, each_s: float
) -> None:
    """A step takes ``step_s``, and ``each_s`` more for each sequence."""

    def loads(engines: int) -> list[EngineLoad]:
        here = sequences / engines
        return [EngineLoad(here, places, 0.0, step_s, step_s + each_s * min(here, places))] * engines

    targets = replace(TARGETS, min=1, max=50)
    numbers = [start]
    for _ in range(12):
        numbers.append(wanted_engines(loads(numbers[-1]), numbers[-1], targets))
    assert numbers[-1] in (numbers[-2], numbers[-2] + 1, numbers[-2] - 1)
    assert sequences <= places * numbers[-1] or numbers[-1] == 50


def context(target: int, *told: dict[str, float]) -> Any:
    """The context that Serve's controller passes to the policy.

    Each dict of ``told`` has the metrics of one replica.
    """
    metrics: dict[str, dict[str, list[Any]]] = {"running_requests": {"a": [SimpleNamespace(value=0.0)]}}
    for replica, values in zip("abc", told, strict=False):
        for name, value in values.items():
            series = [SimpleNamespace(value=0.0), SimpleNamespace(value=value)]
            metrics.setdefault(name, {})[replica] = series
    return SimpleNamespace(raw_metrics=metrics, target_num_replicas=target)


def test_the_policy_takes_what_each_replica_told_last() -> None:
    policy = EnginePolicy(**asdict(TARGETS))
    busy = asdict(replace(IDLE, sequences=1, queued_s=5.0))
    assert policy(context(1, busy)) == (3, {})
    assert policy(context(2, busy)) == (2, {}), "one engine is still loading"
    assert policy(context(2, busy, {"sequences": 4.0})) == (2, {}), "one engine has not reported all its metrics"
    assert policy(context(2, busy, asdict(IDLE))) == (3, {})
    assert policy(context(0)) == (0, {})


@pytest.mark.filterwarnings("ignore")  # importing Ray Serve gives a warning
def test_serve_can_pickle_the_policy_and_ask_it() -> None:
    from ray.serve.config import AutoscalingPolicy

    made = AutoscalingPolicy(policy_function=EnginePolicy, policy_kwargs=asdict(TARGETS))
    policy = made.get_policy()(**made.policy_kwargs)
    assert policy(context(1, asdict(replace(IDLE, sequences=65)))) == (2, {})


def test_a_pace_is_measured_while_an_engine_is_busy() -> None:
    pace = Pace()
    busy = EngineStats(running=3, places=61, steps=10, step_s=0.02, token_s=0.001, others=OtherClients(500, 4))
    assert pace.load(busy, 100.0) == EngineLoad(4, 64, 0.5, 0.02, 0.02)
    assert pace.load(replace(busy, steps=30), 101.0).itl_s == 0.05
    assert pace.load(replace(busy, steps=30), 102.0).itl_s == 0.02, "no step was computed"
    assert pace.load(replace(busy, steps=40, waiting=1, kv_usage=0.99), 103.0).places == 3
