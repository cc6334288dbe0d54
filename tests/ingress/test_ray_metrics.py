"""RayMetrics passes every sample to Ray under its name in /metrics, from only one replica."""

from __future__ import annotations

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from raylm.frontend.engines.adapters import AdapterDirectory
from raylm.frontend.state.application_state import ApplicationState, Departed, Series
from raylm.frontend.state.client import LocalState, StateClient, StateLostError
from raylm.frontend.state.messages import StateReport
from raylm.ingress.ray_metrics import RayMetrics

TEXT = """# HELP vllm:generation_tokens_total Tokens generated.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="m",engine="e.0"} 7.0
# HELP vllm:time_to_first_token_seconds TTFT.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{model_name="m",le="1.0"} 2.0
vllm:time_to_first_token_seconds_bucket{model_name="m",le="+Inf"} 3.0
vllm:time_to_first_token_seconds_count{model_name="m"} 3.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 4.5
# HELP raylm:requests_total Requests.
# TYPE raylm:requests_total counter
raylm:requests_total{key="josé"} 2.0
# HELP process_open_fds Files.
# TYPE process_open_fds gauge
process_open_fds 9.0
"""
SERIES = tuple(text_string_to_metric_families(TEXT))


class Gauges:
    """Replaces ray.util.metrics.Gauge. It requires exactly the tags that it was created with."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self.made: list[str] = []

    def __call__(self, name: str, about: str, tag_keys: tuple[str, ...]) -> Gauges.One:
        assert about
        assert ":" not in name
        self.made.append(name)
        return Gauges.One(self, name, tag_keys)

    class One:
        def __init__(self, owner: Gauges, name: str, tag_keys: tuple[str, ...]) -> None:
            self._owner, self._name, self._keys = owner, name, tag_keys

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self._keys)
            assert all(text.isascii() for text in tags.values()), "Ray encodes tags as ASCII"
            self._owner.values[self._name, frozenset(tags.items())] = value


async def nothing() -> None:
    return None


def test_each_sample_is_a_gauge() -> None:
    gauges = Gauges()
    copier = RayMetrics("chat", nothing, gauges)
    for _ in range(2):
        copier.copy(SERIES)
    both = ("application", "chat"), ("model_name", "m")
    ttft = "vllm_time_to_first_token_seconds"
    assert gauges.values == {
        ("vllm_generation_tokens_total", frozenset({*both, ("engine", "e.0")})): 7,
        (f"{ttft}_bucket", frozenset({*both, ("le", "1.0")})): 2,
        (f"{ttft}_bucket", frozenset({*both, ("le", "+Inf")})): 3,
        (f"{ttft}_count", frozenset(both)): 3,
        (f"{ttft}_sum", frozenset(both)): 4.5,
        ("raylm_requests_total", frozenset({("application", "chat"), ("key", "jos\\xe9")})): 2,
    }
    assert len(gauges.made) == len(set(gauges.made))


def replica(name: str, state: LocalState) -> StateClient:
    client = StateClient(state, name)
    client.share(lambda: SERIES, AdapterDirectory())
    return client


async def test_one_replica_tells_for_all() -> None:
    state = ApplicationState()
    told = {name: replica(name, LocalState(state)) for name in ("a", "b", "c")}
    for name in told:
        state.exchange(StateReport(name, 0.0, series=SERIES))
    found = {name: await client.series_for_all() for name, client in told.items()}
    assert found["a"] == await shown(told["a"])
    assert found["b"] is found["c"] is None
    state.leave("a")
    assert await told["b"].series_for_all() == await shown(told["b"])
    assert await told["c"].series_for_all() is None


async def shown(client: StateClient) -> tuple[Metric, ...]:
    return tuple(text_string_to_metric_families((await client.series()).decode()))


class NoState(LocalState):
    async def series(self) -> tuple[Series, Departed]:
        raise StateLostError("gone")


async def test_alone_it_tells_and_without_the_state_nobody_does() -> None:
    assert await replica("a", LocalState()).series_for_all() is not None
    assert await replica("a", NoState()).series_for_all() is None
