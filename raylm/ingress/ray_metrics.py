"""RayMetrics: the series of /metrics in Ray's own metrics as well, as ``ray_vllm_…`` and ``ray_raylm_…``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from prometheus_client.core import Metric
from ray.util.metrics import Gauge

logger = logging.getLogger("raylm.ingress")

PERIOD_S = 5.0  # Ray collects every 10 s, and forgets what it was not told in two of these times


class _Gauge(Protocol):
    def set(self, value: float, tags: dict[str, str]) -> object: ...


class RayMetrics:
    """Copies what one replica tells for all, now and then: nothing is counted here.

    Every sample is a Gauge with the whole name that it has in /metrics, as Ray's counters and histograms take only
    single observations; ``rate()`` and ``histogram_quantile()`` do not ask for the type. What Ray knows of processes
    itself is left out.
    """

    def __init__(
        self,
        application: str,
        series: Callable[[], Awaitable[Iterable[Metric] | None]],
        gauge: Callable[[str, str, tuple[str, ...]], _Gauge] = Gauge,
    ) -> None:
        """``series`` gives the metrics of all replicas, None where another replica tells them."""
        self._application, self._series, self._create = application, series, gauge
        self._gauges: dict[str, _Gauge] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                if (families := await self._series()) is not None:
                    await asyncio.to_thread(self.copy, families)
            except Exception as error:  # of any class: requests are served all the same
                logger.warning("could not add RayLM's metrics to Ray's: %s", error)

    def copy(self, families: Iterable[Metric]) -> None:
        """Hand over each sample as it is now."""
        for family in families:
            if family.name.startswith("process_"):
                continue
            for sample in family.samples:
                name = sample.name.replace(":", "_")  # which Ray's names may not have
                if name not in self._gauges:
                    labels = ("application", *sample.labels)
                    self._gauges[name] = self._create(name, family.documentation, labels)
                self._gauges[name].set(sample.value, {"application": self._application, **sample.labels})
