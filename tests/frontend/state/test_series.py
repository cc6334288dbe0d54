"""Metrics of several replicas in one answer: counts are summed, and a replica's own metrics have its label."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from raylm.frontend.engines.adapters import AdapterDirectory
from raylm.frontend.state import client as client_module
from raylm.frontend.state.application_state import LEASE_S, MOST_DEPARTED, ApplicationState, Departed, Series
from raylm.frontend.state.client import LocalState, StateClient
from raylm.frontend.state.messages import KeyLimits, StateReport
from raylm.frontend.state.series import fold, merge

Values = dict[str, float]
Families = tuple[Metric, ...]


def series_of(answers: int, queued: int, steps: int, running: int, engine: str = "e0") -> Families:
    text = f"""# HELP raylm:http_answers_total Answers.
# TYPE raylm:http_answers_total counter
raylm:http_answers_total{{status="200"}} {answers}
# HELP raylm:queued_requests Waiting.
# TYPE raylm:queued_requests gauge
raylm:queued_requests{{model_name="m"}} {queued}
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="{engine}"}} {running}
# HELP vllm:iteration_tokens_total Tokens.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{{engine="{engine}",le="+Inf"}} {steps}
vllm:iteration_tokens_total_count{{engine="{engine}"}} {steps}
vllm:iteration_tokens_total_sum{{engine="{engine}"}} {steps * 8}
# HELP vllm:time_to_first_token_seconds TTFT.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="1.0"}} {answers}
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {answers}
vllm:time_to_first_token_seconds_count {answers}
vllm:time_to_first_token_seconds_sum {answers * 0.5}
# HELP process_cpu_seconds_total CPU.
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total {answers}
"""
    return tuple(text_string_to_metric_families(text))


def values_of(families: Iterable[Metric]) -> Values:
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}|{labels}"
            assert key not in found
            found[key] = sample.value
    return found


def test_one_text_of_all() -> None:
    others = {"a": (), "b": series_of(20, 2, 90, 5), "c": series_of(1, 0, 7, 1, "e1")}
    values = values_of(merge(series_of(3, 1, 100, 4), "a", others, [series_of(1000, 9, 999, 9, "gone")]).collect())
    assert values["raylm:http_answers_total|status=200"] == 1024
    assert values["vllm:time_to_first_token_seconds_count|"] == 1024
    assert values["vllm:time_to_first_token_seconds_sum|"] == 512
    assert values["vllm:time_to_first_token_seconds_bucket|le=1.0"] == 1024
    queued = {key.partition("replica=")[2]: value for key, value in values.items() if "queued_requests" in key}
    assert queued == {"a": 1, "b": 2, "c": 0}
    running = {key: value for key, value in values.items() if "running" in key}
    assert running == {"vllm:num_requests_running|engine=e0": 4, "vllm:num_requests_running|engine=e1": 1}
    assert values["vllm:iteration_tokens_total_sum|engine=e0"] == 800
    assert values["process_cpu_seconds_total|replica=b"] == 20


def test_whichever_is_asked_tells_the_same() -> None:
    series = {"a": series_of(3, 1, 100, 4), "b": series_of(20, 2, 90, 5)}
    told = [values_of(merge(series[name], name, series, []).collect()) for name in series]
    assert told[0] == told[1]


def test_what_has_ended_stays_counted() -> None:
    now = 0.0
    state = ApplicationState(lambda: now)
    for number in range(MOST_DEPARTED + 9):
        report = StateReport(f"r{number}", now, series=series_of(number, 1, 1, 1, f"e{number}"))
        state.exchange(report)
        now += LEASE_S + 1
    state.exchange(StateReport("last", now, series=series_of(1, 1, 1, 1)))
    alive, departed = state.series()
    assert list(alive) == ["last"]
    assert len(departed) <= MOST_DEPARTED
    total = sum(range(MOST_DEPARTED + 9)) + 1
    values = values_of(merge(alive["last"], "last", alive, departed).collect())
    assert values["raylm:http_answers_total|status=200"] == total
    assert values["vllm:time_to_first_token_seconds_sum|"] == total / 2
    assert [key for key in values if key.startswith("vllm:num_requests_running")] == [
        "vllm:num_requests_running|engine=e0"
    ]


def test_who_comes_back_is_not_counted_twice() -> None:
    now = 0.0
    state = ApplicationState(lambda: now)
    introduction = StateReport("a", now, series=series_of(5, 1, 1, 1))
    state.exchange(introduction)
    now += LEASE_S + 1
    assert state.series()[1]
    state.exchange(introduction)
    alive, departed = state.series()
    assert (list(alive), departed) == (["a"], [])


class SilentState(LocalState):
    async def series(self) -> tuple[Series, Departed]:
        await asyncio.sleep(3600)
        raise AssertionError


async def test_without_the_state_a_replica_tells_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SERIES_TIMEOUT_S", 0.05)
    client = StateClient(SilentState(), "a")
    client.share(lambda: series_of(3, 1, 100, 4), AdapterDirectory())
    values = values_of(text_string_to_metric_families((await client.series()).decode()))
    assert values["raylm:http_answers_total|status=200"] == 3
    assert values["raylm:queued_requests|model_name=m,replica=a"] == 1


async def test_who_is_alone_tells_nobody_of_itself() -> None:
    client = StateClient(LocalState(), "a")
    told = 0

    def own() -> Families:
        nonlocal told
        told += 1
        return series_of(3, 1, 100, 4)

    client.share(own, AdapterDirectory())
    (await client.claim("a", KeyLimits(concurrency=1))).end()
    assert told == 0
    assert (
        values_of(text_string_to_metric_families((await client.series()).decode()))[
            "raylm:http_answers_total|status=200"
        ]
        == 3
    )
    await client.close()


def test_folding_changes_no_sum() -> None:
    series = [series_of(3, 1, 100, 4), series_of(4, 1, 7, 4)]
    folded = values_of(merge((), "x", {}, [fold(series)]).collect())
    assert values_of(merge((), "x", {}, series).collect()) == folded


async def test_a_client_that_is_closed_leaves_no_task() -> None:
    client = StateClient(LocalState(), "a")
    client.start()
    await client.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
