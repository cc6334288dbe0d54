"""What operators and probes ask: /health, /ready, /metrics, /version, and a signpost at /."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import raylm
from raylm.errors import EngineUnavailableError, ShuttingDownError
from raylm.frontend import Lifecycle
from raylm.ingress.http.metrics import HTTPMetrics
from raylm.ingress.http.openapi import endpoints

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM

_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def health_routes(llm: AsyncLLM, lifecycle: Lifecycle, http_metrics: HTTPMetrics) -> list[Route]:
    """The GET routes of this module."""

    async def health(request: Request) -> Response:
        if lifecycle.shutting_down:
            raise ShuttingDownError("The server is shutting down.")
        if not llm.is_ready:
            raise EngineUnavailableError("No engine is ready.")
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def metrics(request: Request) -> Response:
        return Response(llm.metrics_text() + http_metrics.text(), headers={"content-type": _PROMETHEUS_TEXT})

    async def version(request: Request) -> Response:
        return Response(orjson.dumps({"version": raylm.__version__}), media_type="application/json")

    async def signpost(request: Request) -> Response:
        about: dict[str, object] = {"name": "RayLM", "version": raylm.__version__, "model": llm.model_name}
        about["endpoints"] = endpoints(request.app.routes)
        return Response(orjson.dumps(about), media_type="application/json")

    return [
        Route("/health", health),
        Route("/ready", health),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/", signpost),
    ]
