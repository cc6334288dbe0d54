"""The OpenAI-compatible ASGI app of one ingress replica: its routes, and nothing about Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raylm.config import Config, IngressConfig
from raylm.errors import InvalidRequestError, MethodNotAllowedError, NotFoundError
from raylm.frontend import Admission, Lifecycle, Throttle
from raylm.ingress.anthropic.create import CountTokens, CreateMessage
from raylm.ingress.http.api_keys import APIKeyMiddleware, read_keys
from raylm.ingress.http.cross_origin import CrossOrigin
from raylm.ingress.http.endpoint import Handler, JSONEndpoint
from raylm.ingress.http.errors import clip, error_response
from raylm.ingress.http.metrics import HTTPMetrics
from raylm.ingress.http.middleware import RequestContextMiddleware
from raylm.ingress.http.openapi import openapi_route
from raylm.ingress.http.ops import health_routes
from raylm.ingress.openai.chat import ChatCompletions, Conversations
from raylm.ingress.openai.completions import Completions
from raylm.ingress.openai.embeddings import Embeddings
from raylm.ingress.openai.models import LoadAdapter, UnloadAdapter, model_routes
from raylm.ingress.openai.scores import Rerank, Score
from raylm.ingress.openai.tokenize import Detokenize, Tokenize
from raylm.ingress.responses.create import CreateResponse
from raylm.ingress.responses.routes import response_routes
from raylm.ingress.responses.store import Responses, ResponseStore

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM

_MIB = 1024 * 1024


def build_asgi_app(async_llm: AsyncLLM, config: Config, responses: Responses | None = None) -> Starlette:
    """Make the app; its ``state.lifecycle`` is a Lifecycle, whose ``drain`` the owner calls at shutdown.

    ``responses`` is where responses are stored, if other replicas share it.

    Raises:
        ConfigError: the API keys cannot be read.
    """
    http_metrics = HTTPMetrics(async_llm)
    lifecycle = Lifecycle(config.ingress.max_ongoing_requests)
    unqueued, throttle = Admission(), Throttle()
    conversations = Conversations(async_llm, config)
    responses = responses or ResponseStore()
    max_body_bytes = int(config.ingress.max_body_mib * _MIB)

    def post(path: str, handler: Handler, admission: Admission = async_llm.admission) -> Route:
        return Route(path, JSONEndpoint(handler, lifecycle, throttle, admission, max_body_bytes), methods=["POST"])

    routes = [
        post("/v1/chat/completions", ChatCompletions(async_llm, conversations)),
        post("/v1/completions", Completions(async_llm, config)),
        post("/v1/responses", CreateResponse(async_llm, conversations, responses, lifecycle)),
        *response_routes(responses),
        post("/v1/messages", CreateMessage(conversations)),
        post("/v1/messages/count_tokens", CountTokens(conversations), unqueued),
        post("/v1/embeddings", Embeddings(async_llm, config)),
        *(post(path, Score(async_llm, config)) for path in ("/score", "/v1/score")),
        *(post(path, Rerank(async_llm, config)) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        post("/tokenize", Tokenize(async_llm), unqueued),
        post("/detokenize", Detokenize(async_llm), unqueued),
        post("/v1/load_lora_adapter", LoadAdapter(async_llm), unqueued),
        post("/v1/unload_lora_adapter", UnloadAdapter(async_llm), unqueued),
        *model_routes(async_llm),
        *health_routes(async_llm, lifecycle, http_metrics),
        openapi_route(),
    ]
    app = Starlette(
        routes=routes,
        middleware=_middleware(config.ingress, http_metrics),
        exception_handlers={HTTPException: _routing_error_response},
    )
    app.router.redirect_slashes = False
    app.state.lifecycle = lifecycle
    return app


def _middleware(config: IngressConfig, http_metrics: HTTPMetrics) -> list[Middleware]:
    """What stands around the router, from the outside in."""
    layers = [Middleware(CrossOrigin, config.cors_origins)] if config.cors_origins else []
    layers.append(Middleware(RequestContextMiddleware, http_metrics))
    keys = read_keys(config)
    if keys is not None:
        layers.append(Middleware(APIKeyMiddleware, keys, frozenset(config.open_paths)))
    return layers


def _routing_error_response(request: Request, error: Exception) -> Response:
    """The router's own refusals, which it states as HTTPException."""
    refused = cast(HTTPException, error)
    place = f"{clip(request.method, 20)} {clip(request.scope['path'], 100)}"
    found: InvalidRequestError = NotFoundError(f"There is no route {place}.")
    if refused.status_code == 405:
        found = MethodNotAllowedError(f"The route of {place} does not take this method.")
    return error_response(found, request.scope["path"], dict(refused.headers or {}))
