"""The registry of RequestObservers, which are called for each ended request, and the log of slow requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec

from raylm.config import Config
from raylm.errors import ConfigError
from raylm.frontend.timelines.describe import Raw, timeline
from raylm.frontend.timelines.record import Record
from raylm.frontend.timelines.ring import RequestObserver
from raylm.lazy import Family
from raylm.stages import about

logger = logging.getLogger("raylm.frontend")

TextOf = Callable[[list[int]], str]
Open = Callable[[Config, str, str, TextOf], RequestObserver | None]

# Each is called with the configuration, the names of application and ingress, and a function from tokens to text.
OBSERVERS: Family[Open] = Family({
    "slow": "raylm.frontend.timelines.observers:open_slow_requests",
    "otlp": "raylm.frontend.tracing.export:open_export",
})  # fmt: skip
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"


def open_observers(config: Config, application: str, instance: str, text_of: TextOf) -> tuple[RequestObserver, ...]:
    """Open the observers that ``config`` enables.

    Raises:
        ConfigError: as ``check_observers``.
    """
    check_observers(config)
    wanted = [name for name in OBSERVERS if name != "otlp" or config.ingress.otlp_endpoint is not None]
    opened = (OBSERVERS[name](config, application, instance, text_of) for name in wanted)
    return tuple(observer for observer in opened if observer is not None)


def check_observers(config: Config) -> None:
    """Raise ConfigError if spans are enabled and the exporter is not installed."""
    if config.ingress.otlp_endpoint is None:
        return
    if "otlp" not in OBSERVERS:
        raise ConfigError("ingress.otlp_endpoint: raylm.frontend.tracing, which sends spans, is not installed.")
    try:
        is_there = find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:  # a parent package is missing
        is_there = False
    if not is_there:
        raise ConfigError("ingress.otlp_endpoint: OpenTelemetry is not installed; run pip install 'raylm[otel]'.")


class SlowRequests:
    """Logs each request that took longer than ``limit_s``, with its phases and its main cause."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __call__(self, raw: Raw, record: Record) -> None:
        if record.ended is None or record.ended - record.received <= self._limit_s:
            return
        found = timeline(raw, record.ended)
        phases: dict[str, float] = {}
        for phase in found["phases"]:
            phases[phase["phase"]] = round(phases.get(phase["phase"], 0.0) + phase["seconds"], 3)
        told = ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items() if seconds >= 0.001)
        cause = found["causes"][0]["cause"] if found["causes"] else ""
        logger.warning(
            "request %s took %.3f s, mostly for %s: %s",
            record.id,
            found["wall_s"],
            cause,
            told,
            extra=about("request.slow", record.id, seconds=found["wall_s"], cause=cause, phases=phases),
        )

    def close(self, timeout_s: float) -> None:
        """Do nothing: no records are held back."""


def open_slow_requests(config: Config, application: str, instance: str, text_of: TextOf) -> SlowRequests | None:
    limit_s = config.ingress.slow_request_s
    return None if limit_s is None else SlowRequests(limit_s)
