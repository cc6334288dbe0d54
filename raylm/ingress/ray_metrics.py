"""RayMetrics: copies the series of /metrics to Ray's own metrics, as ``ray_vllm_…`` and ``ray_raylm_…``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from prometheus_client.core import Metric
from ray.util.metrics import Gauge

logger = logging.getLogger("raylm.ingress")

PERIOD_S = 5.0  # Ray collects every 10 s, and drops a series without an update in 20 s


class _Gauge(Protocol):
    def set(self, value: float, tags: dict[str, str]) -> object: ...


class RayMetrics:
    """Copies the metrics of all replicas from one replica, at an interval. It counts nothing itself.

    Every sample becomes a Gauge with the name that it has in /metrics, because Ray's counters and histograms accept
    only single observations. ``rate()`` and ``histogram_quantile()`` work on gauges too. Metrics of processes that Ray
    has itself are omitted.
    """

    def __init__(
        self,
        application: str,
        series: Callable[[], Awaitable[Iterable[Metric] | None]],
        gauge: Callable[[str, str, tuple[str, ...]], _Gauge] = Gauge,
    ) -> None:
        """Create the object. ``run`` does the copying.

        Args:
            series: Returns the metrics of all replicas, or None if another replica copies them.
        """
        self._application, self._series, self._create = application, series, gauge
        self._gauges: dict[str, _Gauge] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                if (families := await self._series()) is not None:
                    await asyncio.to_thread(self.copy, families)
            except Exception as error:  # of any class: requests must not fail because of metrics
                logger.warning("could not add RayLM's metrics to Ray's: %s", error)

    def copy(self, families: Iterable[Metric]) -> None:
        """Copy the current value of each sample."""
        for family in families:
            if family.name.startswith("process_"):
                continue
            for sample in family.samples:
                name = sample.name.replace(":", "_")  # Ray allows no colons in names
                if name not in self._gauges:
                    labels = ("application", *sample.labels)
                    self._gauges[name] = self._create(name, family.documentation, labels)
                tags = {"application": self._application, **sample.labels}
                self._gauges[name].set(sample.value, {tag: _ascii(value) for tag, value in tags.items()})


def _ascii(text: str) -> str:
    """Escape other characters like Python's repr, because Ray encodes the values of tags as ASCII."""
    return text.encode("ascii", "backslashreplace").decode("ascii")
