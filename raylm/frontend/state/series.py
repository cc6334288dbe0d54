"""Merges the metrics of several ingress replicas. Between processes, metrics are numbers by name and labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from raylm import metrics

_SUMMED = frozenset({"counter", "histogram"})
_PROCESS = "process_"  # prefix of prometheus_client's metrics of a process
_STEPS = f"{metrics.STEP_TOKENS.name}_count"
_Labels = tuple[tuple[str, str], ...]


@dataclass
class _Family:
    """One metric: its samples by name and labels, in order of arrival."""

    metric: Metric
    values: dict[tuple[str, _Labels], float] = field(default_factory=dict)


class Merged(Collector):
    """Merged metrics. Counters and histograms are summed over the replicas.

    All replicas report the series of an engine; the newest is used. Gauges, and metrics of processes, have the label
    ``replica``.
    """

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._steps: dict[str, float] = {}  # number of steps of each engine in the newest series

    def add(self, families: Iterable[Metric], replica: str) -> None:
        """Add the metrics of a replica."""
        families = tuple(families)
        newest = self._newest(families)
        for metric in families:
            for sample in metric.samples:
                engine = sample.labels.get("engine")
                if engine is None:
                    self._add(metric, sample.name, sample.labels, sample.value, replica)
                elif engine in newest:
                    self._family(metric).values[sample.name, tuple(sample.labels.items())] = sample.value

    def add_departed(self, families: Iterable[Metric]) -> None:
        """Add the counters of a replica that has ended."""
        for metric in families:
            for sample in metric.samples if _is_summed(metric) else ():
                if "engine" not in sample.labels:
                    self._add(metric, sample.name, sample.labels, sample.value, "")

    def collect(self) -> Iterator[Metric]:
        for family in self._families.values():
            shown = Metric(family.metric.name, family.metric.documentation, family.metric.type)
            for (name, labels), value in family.values.items():
                shown.add_sample(name, dict(labels), value)
            yield shown

    def _newest(self, families: Iterable[Metric]) -> set[str]:
        """The engines for which this replica has the newest series, measured by the number of steps."""
        steps: dict[str, float] = defaultdict(float)
        for metric in families:
            for sample in metric.samples:
                if "engine" in sample.labels:
                    steps[sample.labels["engine"]] += sample.value if sample.name == _STEPS else 0.0
        newest = {engine for engine, count in steps.items() if count > self._steps.get(engine, -1.0)}
        self._steps |= {engine: steps[engine] for engine in newest}
        return newest

    def _add(self, metric: Metric, name: str, labels: Mapping[str, str], value: float, replica: str) -> None:
        values = self._family(metric).values
        if _is_summed(metric):
            key = name, tuple(labels.items())
            values[key] = values.get(key, 0.0) + value
        else:
            values[name, (*labels.items(), ("replica", replica))] = value

    def _family(self, metric: Metric) -> _Family:
        return self._families.setdefault(metric.name, _Family(metric))


def _is_summed(metric: Metric) -> bool:
    return metric.type in _SUMMED and not metric.name.startswith(_PROCESS)


def fold(departed: Iterable[Iterable[Metric]]) -> tuple[Metric, ...]:
    """Sum the counters of several replicas that have ended."""
    merged = Merged()
    for families in departed:
        merged.add_departed(families)
    return tuple(merged.collect())


def merge(
    own: Iterable[Metric],
    replica: str,
    others: Mapping[str, Iterable[Metric]],
    departed: Iterable[Iterable[Metric]],
) -> Merged:
    """Merge the metrics of this replica, the last known ones of the ``others``, and those of ``departed`` replicas."""
    merged = Merged()
    merged.add(own, replica)
    for name, families in others.items():
        if name != replica:
            merged.add(families, name)
    for families in departed:
        merged.add_departed(families)
    return merged
