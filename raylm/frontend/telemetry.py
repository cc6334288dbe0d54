"""Telemetry: the Prometheus series of one AsyncLLM: latencies measured here, and the newest stats of its engines."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from raylm import metrics
from raylm.config import CacheConfig
from raylm.frontend.timelines.record import Part, Record
from raylm.messages import EngineStats, WorkerInfo

_ENGINE_SERIES: list[tuple[type[GaugeMetricFamily | CounterMetricFamily], metrics.Metric, str]] = [
    (GaugeMetricFamily, metrics.RUNNING, "running"),
    (GaugeMetricFamily, metrics.WAITING, "waiting"),
    (GaugeMetricFamily, metrics.KV_USAGE, "kv_usage"),
    (CounterMetricFamily, metrics.PREEMPTIONS, "counters.preemptions"),
    (CounterMetricFamily, metrics.PREFIX_QUERIES, "counters.prefix_queries"),
    (CounterMetricFamily, metrics.PREFIX_HITS, "counters.prefix_hits"),
    (CounterMetricFamily, metrics.PROMPT_TOKENS, "counters.prompt_tokens"),
    (CounterMetricFamily, metrics.GENERATION_TOKENS, "counters.generation_tokens"),
    (CounterMetricFamily, metrics.DRAFTED_TOKENS, "counters.drafted_tokens"),
    (CounterMetricFamily, metrics.ACCEPTED_TOKENS, "counters.accepted_tokens"),
]


_LENGTHS = (
    metrics.PROMPT_LENGTH, metrics.GENERATION_LENGTH, metrics.LONGEST_GENERATION, metrics.PARAMS_N,
    metrics.PARAMS_MAX_TOKENS,
)  # fmt: skip
_TIMES = (metrics.QUEUE_TIME, metrics.PREFILL_TIME, metrics.DECODE_TIME, metrics.INFERENCE_TIME, metrics.TPOT)
_OF_KEYS = (metrics.KEY_TOKENS, metrics.KEY_REQUESTS, metrics.KEY_TTFT)


class _Histogram:
    """Counts by bucket. Takes 0.3 µs for a token; prometheus_client, with a lock and a linear search, takes 2 µs."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = metrics.LATENCY_BUCKETS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += count
        self.total += seconds * count


def _cumulative(bounds: tuple[float, ...], counts: Iterable[int]) -> list[tuple[str, int]]:
    return list(zip([*map(str, bounds), "+Inf"], accumulate(counts), strict=True))


class Telemetry(Collector):
    """Collects metrics. Belongs to one event loop, so it has no locks.

    ``engines`` returns the newest EngineStats by engine id, ``workers`` the WorkerInfo by engine id.
    """

    def __init__(
        self,
        model_name: str,
        engines: Callable[[], Mapping[str, EngineStats]],
        workers: Callable[[], Mapping[str, WorkerInfo]] = dict,
        cache: CacheConfig | None = None,
    ) -> None:
        self._workers, self._cache = workers, cache or CacheConfig()
        self._model_name = model_name
        self._engines = engines
        self._ttft, self._itl, self._e2e = _Histogram(), _Histogram(), _Histogram()
        self._shapes = {metric: _Histogram(metrics.LENGTH_BUCKETS) for metric in _LENGTHS}
        self._shapes |= {metric: _Histogram() for metric in _TIMES}
        self._success: Counter[str] = Counter()
        self._keys: dict[metrics.Metric, defaultdict[tuple[str, ...], float]] = {
            metric: defaultdict(float) for metric in _OF_KEYS
        }

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Count tokens of a sequence that arrived together, ``seconds`` after the previous tokens.

        With ``first``, ``seconds`` is the time since the request arrived.
        """
        if first:
            self._ttft.observe(max(seconds, 0.0))
        else:
            self._itl.observe(max(seconds, 0.0) / count, count)

    def finished(self, reason: str, seconds: float) -> None:
        """Count the end of a sequence. ``seconds`` since its arrival count only for the reasons "stop" and "length"."""
        reason = "stop" if reason == "tool_calls" else reason
        self._success[reason] += 1
        if reason in ("stop", "length"):
            self._e2e.observe(max(seconds, 0.0))

    def ended(self, record: Record) -> None:
        """Count the end of a caller's request with all its prompts."""
        tokens = self._keys[metrics.KEY_TOKENS]
        for part in record.parts:
            prompt, generation = part.charged()
            tokens[record.key, "prompt"] += prompt
            tokens[record.key, "generation"] += generation
            self._measure(part)
        if first := [part.first_token for part in record.parts if part.first_token is not None]:
            self._keys[metrics.KEY_REQUESTS][record.key,] += 1
            self._keys[metrics.KEY_TTFT][record.key,] += max(min(first) - record.received, 0.0)

    def _measure(self, part: Part) -> None:
        """Observe the lengths and times of one prompt that has tokens. Omits times that the engine did not report."""
        request, first, last = part.request, part.first_token, part.last_token
        if request is None or request.pooling is not None or first is None:
            return
        drawn = [len(ids) for ids in part.drawn]
        found: dict[metrics.Metric, float] = {
            metrics.PROMPT_LENGTH: part.prompt_tokens,
            metrics.GENERATION_LENGTH: sum(drawn),
            metrics.LONGEST_GENERATION: max(drawn, default=0),
            metrics.PARAMS_N: request.params.n,
        }
        if request.params.max_tokens is not None:
            found[metrics.PARAMS_MAX_TOKENS] = request.params.max_tokens
        if scheduled := [event[2] for event in part.events if event[1] == "scheduled"]:
            found[metrics.QUEUE_TIME] = min(scheduled) - request.arrival_time
            found[metrics.PREFILL_TIME] = first - min(scheduled)
            found[metrics.INFERENCE_TIME] = (first if last is None else last) - min(scheduled)
        if last is not None:
            found[metrics.DECODE_TIME] = last - first
            if (behind := max(drawn, default=0) - 1) > 0:
                found[metrics.TPOT] = (last - first) / behind
        for metric, value in found.items():
            self._shapes[metric].observe(max(value, 0.0))

    def _cache_config(self) -> Metric:
        metric, cache = metrics.CACHE_CONFIG, self._cache
        family = GaugeMetricFamily(metric.name, metric.help, labels=["model_name", *metric.labels])
        for engine_id, worker in self._workers().items():
            sizes = str(worker.block_size), str(worker.num_blocks)
            family.add_metric([self._model_name, engine_id, *sizes, cache.dtype, str(cache.prefix_caching)], 1)
        return family

    def collect(self) -> Iterator[Metric]:
        engines = self._engines()
        for kind, metric, attribute in _ENGINE_SERIES:
            family = kind(metric.name, metric.help, labels=["model_name", "engine"])
            for engine_id, stats in engines.items():
                family.add_metric([self._model_name, engine_id], attrgetter(attribute)(stats))
            yield family
        steps = HistogramMetricFamily(
            metrics.STEP_TOKENS.name, metrics.STEP_TOKENS.help, labels=["model_name", "engine"]
        )
        for engine_id, stats in engines.items():
            counted = _cumulative(metrics.STEP_TOKENS_BUCKETS, stats.counters.steps_by_tokens)
            steps.add_metric([self._model_name, engine_id], counted, stats.counters.step_tokens)
        yield steps
        yield self._cache_config()
        latencies_seen = (metrics.TTFT, self._ttft), (metrics.ITL, self._itl), (metrics.E2E, self._e2e)
        for metric, histogram in (*latencies_seen, *self._shapes.items()):
            latencies = HistogramMetricFamily(metric.name, metric.help, labels=["model_name"])
            counted = _cumulative(histogram.bounds, histogram.counts)
            latencies.add_metric([self._model_name], counted, histogram.total)
            yield latencies
        labels = ["model_name", "finished_reason"]
        success = CounterMetricFamily(metrics.SUCCESS.name, metrics.SUCCESS.help, labels=labels)
        for reason in sorted({"stop", "length", "abort", "error"} | self._success.keys()):
            success.add_metric([self._model_name, reason], self._success[reason])
        yield success
        for metric, counted_by in self._keys.items():
            of_keys = CounterMetricFamily(metric.name, metric.help, labels=["model_name", *metric.labels])
            for key, count in counted_by.items():
                of_keys.add_metric([self._model_name, *key], count)
            yield of_keys
        ready = GaugeMetricFamily(metrics.ENGINES.name, metrics.ENGINES.help, labels=["model_name"])
        ready.add_metric([self._model_name], len(engines))
        yield ready
