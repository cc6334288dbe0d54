"""HTTPMetrics: what one replica has answered, by status and by the name of the API key, and what waits in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raylm import metrics

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM


class HTTPMetrics(Collector):
    """Owned by one event loop: nothing here locks. Names of keys are labels, keys never."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._model_name = llm.model_name
        self._queue = llm.admission
        self._answers: Counter[tuple[int, str]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def answered(self, status: int, key_name: str) -> None:
        """An answer has begun; ``key_name`` is "" where nobody was let in by a key."""
        self._answers[status, key_name] += 1

    def text(self) -> bytes:
        """The series in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client calls to read the series."""
        labels = ["model_name", *metrics.HTTP_ANSWERS.labels]
        family = CounterMetricFamily(metrics.HTTP_ANSWERS.name, metrics.HTTP_ANSWERS.help, labels=labels)
        for (status, key_name), count in sorted(self._answers.items()):
            family.add_metric([self._model_name, str(status), key_name], count)
        yield family
        gauges = ((metrics.QUEUED_REQUESTS, self._queue.requests), (metrics.QUEUED_TOKENS, self._queue.tokens))
        for metric, value in gauges:
            gauge = GaugeMetricFamily(metric.name, metric.help, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge

    def describe(self) -> Iterable[Metric]:
        """No names are reserved: this collector is the only one of its registry."""
        return []
