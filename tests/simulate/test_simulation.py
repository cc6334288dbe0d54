"""Simulation: times that can be calculated by hand, and complete answers."""

from __future__ import annotations

from typing import Any

import pytest

from raylm.config import knobs
from raylm.errors import ConfigError
from raylm.simulate import LOADS, Fleet, LoadSettings, Replay, Targets, figures, simulate
from raylm.simulate.fleet import SIMULATED_KNOBS
from raylm.simulate.trace import SimulatedRequest

COSTS = {"base_s": 0.01, "token_s": 0.001, "sequence_s": 0.0, "attention_s": 0.0}


def fleet(**over: Any) -> Fleet:
    return Fleet.of({"costs": COSTS} | over, "test")


def request(at: float, prompt_tokens: int, output_tokens: int = 1, first: int = 0) -> SimulatedRequest:
    prompt = list(range(first, first + prompt_tokens))
    return SimulatedRequest(at, prompt, [7], output_tokens)


def test_alone_a_request_takes_its_own_steps() -> None:
    served = simulate(fleet(), Replay([request(2.0, 100, 5)])).served
    assert served[0].first_s == pytest.approx(2.0 + 0.01 + 0.1)
    assert served[0].last_s == pytest.approx(2.0 + 0.11 + 4 * 0.011)


def test_one_after_the_other_they_wait_as_in_lindleys_recursion() -> None:
    load = LOADS["poisson"](LoadSettings(requests=300, rate=6, prompt_tokens=(10, 300), output_tokens=(1, 1)))
    asked = list(load.arrivals())
    alone = {"config": {"scheduler": {"max_num_seqs": 1, "max_num_batched_tokens": 512}}}
    served = simulate(fleet(**alone), Replay(asked)).served
    free_at = 0.0
    for one, expected in zip(served, asked, strict=True):
        free_at = max(free_at, expected.at) + 0.01 + 0.001 * len(expected.prompt)
        assert (one.at, one.prompt_tokens) == (expected.at, len(expected.prompt))
        assert one.first_s == pytest.approx(free_at)


def test_a_slow_engine_takes_longer_and_gets_less() -> None:
    load = LOADS["poisson"](LoadSettings(requests=200, rate=6, prompt_tokens=(100, 200), output_tokens=(1, 8)))
    outcome = simulate(fleet(engines=[{"count": 1}, {"count": 1, "slowness": 4.0}]), load)
    by_engine = [sum(one.engine == f"engine-{n}" for one in outcome.served) for n in range(2)]
    assert sum(by_engine) == 200
    assert by_engine[0] > 1.5 * by_engine[1]


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize(("ingresses", "staleness_s"), [(1, 0.0), (2, 0.3)])
def test_every_request_of_every_load_is_served_once_and_again_alike(
    kind: str, ingresses: int, staleness_s: float
) -> None:
    def outcome() -> list[tuple[int, str, float, float]]:
        settings = LoadSettings(requests=48, rate=20, output_tokens=(2, 9), keys=3)
        small = fleet(engines=[{"count": 2, "num_blocks": 2000}], ingresses=ingresses, staleness_s=staleness_s)
        served = simulate(small, LOADS[kind](settings)).served
        return [(one.prompt_tokens, one.engine, one.first_s, one.last_s) for one in served]

    found = outcome()
    assert found == outcome(), "the same seed must give the same result"
    assert len(found) >= 12
    assert all(0 <= first <= last for _, _, first, last in found)


def test_what_finds_the_queue_full_is_refused_and_counted() -> None:
    queue = {"config": {"ingress": {"max_queued_requests": 2}, "scheduler": {"max_num_seqs": 1}}}
    asked = [request(0.001 * n, 100, 1, first=200 * n) for n in range(6)]
    outcome = simulate(fleet(**queue), Replay(asked))
    found = figures(outcome, Targets())
    assert found["errors"] == {"OverloadedError": 4}
    assert found["requests"] == 2


def test_a_prompt_that_does_not_fit_fails_alone() -> None:
    asked = [request(0, 5000), request(0.1, 10)]
    outcome = simulate(fleet(max_model_len=4096), Replay(asked))
    assert sorted(one.error for one in outcome.served) == ["", "ContextLengthError"]


def test_figures_by_hand() -> None:
    asked = [request(0.0, 100, 3), request(10.0, 100, 3), request(20.0, 200, 3, first=1000)]
    for one, key in zip(asked, "aab", strict=True):
        one.key = key
    found = figures(simulate(fleet(), Replay(asked)), Targets(ttft_ms=150.0))
    assert found["ttft_ms"]["mean"] == pytest.approx((110 + 14 + 210) / 3)
    assert found["itl_ms"]["mean"] == pytest.approx(11, rel=0.01)
    assert found["itl_ms"]["p99"] == pytest.approx(11, rel=0.01)
    assert found["hit_rate"] == pytest.approx(96 / 400)
    assert found["good_share"] == pytest.approx(2 / 3)
    assert found["keys"]["a"]["token_share"] == pytest.approx(2 / 3)
    assert found["busy_engine_s"] == pytest.approx(0.11 + 0.014 + 0.21 + 6 * 0.011)
    assert found["engine_s"] == pytest.approx(found["duration_s"])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"engine": {"executor": "local", "threads": 3}}, "config.engine.executor, config.engine.threads"),
        ({"ingress": {"api_keys_file": "keys"}}, "config.ingress.api_keys_file"),
        (
            {"scheduler": {"speculative_tokens": 4, "max_num_seqs": 3}},
            "config.scheduler.speculative_tokens: not simulated",
        ),
        ({"cache": {"num_blocks": 7}}, "config.cache.num_blocks: .*engines.num_blocks"),
        ({"model": "embedded"}, "config.model"),
    ],
)
def test_what_only_a_served_model_has_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        fleet(config=config)


def test_every_knob_of_a_simulated_fleet_is_one_of_a_served_model() -> None:
    assert {name for name, *_ in knobs()} >= SIMULATED_KNOBS
