"""Telemetry: its metrics in Prometheus's format, parsed again."""

from __future__ import annotations

from array import array

from raylm.frontend.telemetry import Telemetry
from raylm.frontend.timelines.record import Part, Record
from raylm.messages import Counters, EngineCoreRequest, EngineStats
from raylm.metrics import STEP_TOKENS_BUCKETS
from raylm.params import SamplingParams


def samples(telemetry: Telemetry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {(s.name, frozenset(s.labels.items())): s.value for family in telemetry.collect() for s in family.samples}


def test_engines_speak_through_it() -> None:
    stats = {
        "a": EngineStats(running=2, waiting=1, kv_usage=0.5, counters=Counters(3, 40, 9)),
        "b": EngineStats(counters=Counters(prefix_queries=10, prefix_hits=4)),
    }
    found = samples(Telemetry("m", lambda: stats))
    a, b = (frozenset({("model_name", "m"), ("engine", name)}) for name in "ab")
    assert found["vllm:num_requests_running", a] == 2
    assert found["vllm:num_requests_waiting", a] == 1
    assert found["vllm:kv_cache_usage_perc", a] == 0.5
    assert found["vllm:num_preemptions_total", a] == 3
    assert found["vllm:prompt_tokens_total", a] == 40
    assert found["vllm:generation_tokens_total", a] == 9
    assert found["vllm:prefix_cache_queries_total", b] == 10
    assert found["vllm:prefix_cache_hits_total", b] == 4
    assert found["raylm:engines_ready", frozenset({("model_name", "m")})] == 2


def test_latencies_fall_into_their_buckets() -> None:
    telemetry = Telemetry("m", dict)
    telemetry.tokens(1, 0.3, first=True)
    telemetry.tokens(4, 0.1, first=False)
    telemetry.finished("stop", 0.4)
    telemetry.finished("abort", 99.0)
    found = samples(telemetry)
    only = ("model_name", "m")

    def bucket(name: str, le: str) -> float:
        return found[f"vllm:{name}_bucket", frozenset({only, ("le", le)})]

    assert (bucket("time_to_first_token_seconds", "0.2"), bucket("time_to_first_token_seconds", "0.5")) == (0, 1)
    assert (bucket("inter_token_latency_seconds", "0.02"), bucket("inter_token_latency_seconds", "0.05")) == (0, 4)
    assert found["vllm:inter_token_latency_seconds_sum", frozenset({only})] == 0.1
    assert found["vllm:e2e_request_latency_seconds_count", frozenset({only})] == 1
    assert found["vllm:request_success_total", frozenset({only, ("finished_reason", "stop")})] == 1
    assert found["vllm:request_success_total", frozenset({only, ("finished_reason", "abort")})] == 1


def test_steps_fall_into_their_buckets_by_tokens() -> None:
    steps = [0] * (len(STEP_TOKENS_BUCKETS) + 1)
    steps[0], steps[3], steps[-1] = 5, 2, 1
    stats = {"a": EngineStats(counters=Counters(step_tokens=20_053, steps_by_tokens=tuple(steps)))}
    found = samples(Telemetry("m", lambda: stats))

    def of(part: str, **labels: str) -> float:
        return found[
            f"vllm:iteration_tokens_total_{part}", frozenset({"model_name": "m", "engine": "a", **labels}.items())
        ]

    assert [of("bucket", le=bound) for bound in ("1", "16", "32", "16384", "+Inf")] == [5, 5, 7, 7, 8]
    assert (of("count"), of("sum")) == (8, 20_053)


def test_tokens_of_keys_are_counted_as_requests_end() -> None:
    clock = iter([10.0, 20.0, 30.0]).__next__
    telemetry, model = Telemetry("m", dict), ("model_name", "m")

    def end(key: str, *parts: tuple[int, list[list[int]], float | None]) -> None:
        record = Record("r", key, "/v1/completions", clock)
        for prompt_tokens, drawn, first_token in parts:
            part = Part("p", lambda: 0.0)
            part.prompt_tokens, part.drawn, part.first_token = prompt_tokens, drawn, first_token
            record.parts.append(part)
        telemetry.ended(record)

    end("alice", (5, [[1, 2], [3]], 12.5), (7, [[4]], 11.0))
    end("alice", (100, [[]], None))  # a request that was refused or ended before its first token
    end("bob", (2, [[9] * 30], 30.25))
    found = samples(telemetry)

    def of(name: str, **labels: str) -> float:
        return found[f"raylm:key_{name}_total", frozenset({model, *labels.items()})]

    assert of("tokens", key="alice", kind="prompt") == 112
    assert of("tokens", key="alice", kind="generation") == 4
    assert of("tokens", key="bob", kind="generation") == 30
    assert (of("requests", key="alice"), of("ttft_seconds", key="alice")) == (1, 1.0)
    assert of("ttft_seconds", key="bob") == 0.25


def test_lengths_and_times_of_a_prompt_are_those_of_vllms_dashboards() -> None:
    telemetry, part = Telemetry("m", dict), Part("p", lambda: 0.0)
    params = SamplingParams(n=2, max_tokens=7)
    request = EngineCoreRequest(
        key=1, request_id="r", prompt_token_ids=array("I", [1] * 5), params=params, arrival_time=10.0
    )
    part.on_open(request, [[1, 2, 3], [4]])
    part.events = [(0, "scheduled", 11.0, 1, 0, ""), (1, "scheduled", 11.5, 2, 0, "")]
    part.first_token, part.last_token = 13.0, 17.0
    record = Record("r", "", "/v1/completions", lambda: 0.0)
    record.parts.append(part)
    telemetry.ended(record)
    found, only = samples(telemetry), frozenset({("model_name", "m")})
    wanted = {
        "prompt_tokens": 5, "generation_tokens": 4, "max_num_generation_tokens": 3, "params_n": 2,
        "params_max_tokens": 7, "queue_time_seconds": 1, "prefill_time_seconds": 2, "decode_time_seconds": 4,
        "inference_time_seconds": 6, "time_per_output_token_seconds": 2,
    }  # fmt: skip
    for name, value in wanted.items():
        assert found[f"vllm:request_{name}_sum", only] == value
        assert found[f"vllm:request_{name}_count", only] == 1
