"""Endpoints for operators and probes: /health, /ready, /ping, /load, /metrics, /version, and / with all endpoints."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raylm import metrics
from raylm.errors import EngineUnavailableError, ShuttingDownError
from raylm.ingress.http.answer import json_response
from raylm.ingress.http.openapi import endpoints
from raylm.ingress.http.probes import READY
from raylm.version import VERSION

if TYPE_CHECKING:
    from raylm.config import Config
    from raylm.frontend import AsyncLLM, Requests, StateClient

_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class HTTPMetrics(Collector):
    """Counts the answers of one replica and its requests without a first token. Used by one event loop only."""

    def __init__(self, llm: AsyncLLM, config: Config) -> None:
        # by status and, for routes that need a key, the name of the key
        self.answers: Counter[tuple[int, str]] = Counter()
        self._model_name = llm.model_name
        self._admission = llm.admission
        self._constants = (
            (metrics.QUEUED_REQUESTS_LIMIT, config.ingress.max_queued_requests),
            (metrics.QUEUED_TOKENS_LIMIT, config.ingress.max_queued_tokens),
            (metrics.ENGINES_WANTED, config.engine.min_replicas),
        )
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", *metrics.HTTP_ANSWERS.labels]
        answers = CounterMetricFamily(metrics.HTTP_ANSWERS.name, metrics.HTTP_ANSWERS.help, labels=labels)
        for (status, key_name), count in sorted(self.answers.items()):
            answers.add_metric([self._model_name, str(status), key_name], count)
        yield answers
        queue = self._admission
        queued = (metrics.QUEUED_REQUESTS, queue.requests), (metrics.QUEUED_TOKENS, queue.tokens)
        for metric, value in (*queued, *self._constants):
            gauge = GaugeMetricFamily(metric.name, metric.help, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        build = InfoMetricFamily(metrics.BUILD.name, metrics.BUILD.help, labels=["model_name"])
        build.add_metric([self._model_name], {"version": VERSION, "python": platform.python_version()})
        yield build
        yield from self._process.collect()


def check_ready(llm: AsyncLLM, requests: Requests) -> None:
    """Raise the error with which a request would be refused now, if any."""
    if requests.shutting_down:
        raise ShuttingDownError("The server is shutting down.")
    if not llm.is_ready:
        raise EngineUnavailableError("No engine is ready; try again shortly.")


def ops_routes(llm: AsyncLLM, requests: Requests, state: StateClient) -> list[Route]:
    async def health(request: Request) -> Response:
        check_ready(llm, requests)
        return json_response(READY)

    async def series(request: Request) -> Response:
        return Response(await state.series(), headers={"content-type": _PROMETHEUS_TEXT})

    async def load(request: Request) -> Response:
        return json_response({"server_load": requests.num_ongoing})

    async def version(request: Request) -> Response:
        return json_response({"version": VERSION})

    async def index(request: Request) -> Response:
        about = {"name": "RayLM", "version": VERSION, "model": llm.model_name}
        return json_response(about | {"endpoints": endpoints(request.app.routes)})

    served = {"/metrics": series, "/load": load, "/version": version, "/": index}
    served |= dict.fromkeys(("/health", "/ready", "/ping"), health)
    return [Route(path, endpoint) for path, endpoint in served.items()]
