"""The ASGI app of one ingress replica: routes and middleware. It does not depend on Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp

from raylm.config import Config
from raylm.frontend import Admission, FairShares, Request, Requests, StateClient
from raylm.ingress.anthropic.body import CountTokensRequest, MessagesRequest
from raylm.ingress.anthropic.create import PING, CountTokens, CreateMessage
from raylm.ingress.console.cluster import ListActors, cluster_routes
from raylm.ingress.console.pages import PAGES, console_routes
from raylm.ingress.console.peers import Alone, Desk, Peers
from raylm.ingress.console.requests import request_routes
from raylm.ingress.http.api_keys import APIKeyMiddleware, APIKeys
from raylm.ingress.http.body import BodyReader
from raylm.ingress.http.docs import docs_route
from raylm.ingress.http.endpoint import Answer, JSONEndpoint
from raylm.ingress.http.middleware import ConfiguredOriginsMiddleware, HostMiddleware, RequestContextMiddleware
from raylm.ingress.http.openapi import openapi_route
from raylm.ingress.http.ops import HTTPMetrics, ops_routes
from raylm.ingress.http.stream_ids import Posted, StreamIds
from raylm.ingress.openai.chat import ChatCompletionRequest, ChatCompletions
from raylm.ingress.openai.completions import CompletionRequest, Completions
from raylm.ingress.openai.embeddings import EmbeddingRequest, Embeddings
from raylm.ingress.openai.fields import Body
from raylm.ingress.openai.models import AdapterHandlers, LoadAdapterRequest, UnloadAdapterRequest, model_routes
from raylm.ingress.openai.scores import Rerank, RerankRequest, Score, ScoreRequest
from raylm.ingress.openai.tokenize import Detokenize, DetokenizeRequest, Tokenize, TokenizeRequest
from raylm.ingress.openai.unknown_fields import IncomingFields, KnownFields
from raylm.ingress.responses.body import ResponsesRequest
from raylm.ingress.responses.compact import CompactRequest
from raylm.ingress.responses.conversations import (
    AddItemsRequest,
    Conversations,
    CreateConversationRequest,
    UpdateConversationRequest,
    conversation_routes,
)
from raylm.ingress.responses.create import CreateResponse
from raylm.ingress.responses.mcp.servers import McpServers
from raylm.ingress.responses.routes import response_routes
from raylm.ingress.responses.shared_store import open_store

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from raylm.frontend import AsyncLLM

B = TypeVar("B", bound=Body)


class _App(Starlette):
    def build_middleware_stack(self) -> ASGIApp:
        """Omit starlette's two layers for exceptions, because RequestContextMiddleware handles exceptions."""
        app: ASGIApp = self.router
        for middleware, args, kwargs in reversed(self.user_middleware):
            app = middleware(app, *args, **kwargs)
        return app


@dataclass(frozen=True)
class Surroundings:
    """What an app in a replica gets from its replica. An app without a replica needs none of the fields.

    Attributes:
        state: The connection to the state that all replicas share. The default is a state of this app alone.
        secret: Signs the ids of streams, the same in all replicas.
        application: The application's name in Serve.
        create_peers: Makes the object that asks the other replicas.
        actors: Lists Ray's actors.
        dashboard: Returns the URL of Ray's dashboard.
        node: The address of the replica's node, as Ray has it.
        nodes: Lists the addresses of all nodes, whose proxies may send it requests.
        on_loopback: Whether other machines cannot reach the server.
    """

    state: StateClient | None = None
    secret: bytes | None = None
    application: str = ""
    create_peers: Callable[[Desk], Peers] = Alone
    actors: ListActors = list
    dashboard: Callable[[], str | None] = str
    node: str = ""
    nodes: Callable[[], Collection[str]] = tuple
    on_loopback: bool = False


@dataclass(frozen=True)
class _PostRoutes:
    """Makes the routes for POST. They share the replica's Requests, BodyReader and queue."""

    incoming: IncomingFields
    requests: Requests
    bodies: BodyReader
    queue: Admission

    def __call__(
        self,
        path: str,
        body: type[B],
        handler: Callable[[B, Request], Awaitable[Answer]] | Callable[[B, Request, Posted], Awaitable[Answer]],
        *,
        queued: bool = True,
        keep_alive: bytes = b"",
        for_admins: bool = False,
        resumable: bool = False,
    ) -> Route:
        queue = self.queue if queued else Admission()
        endpoint = JSONEndpoint(
            body, handler, self.incoming, self.requests, self.bodies, queue, keep_alive, for_admins, resumable
        )
        return Route(path, endpoint, methods=["POST"])


def build_asgi_app(
    async_llm: AsyncLLM,
    config: Config,
    shared_actors: Mapping[str, DeploymentHandle] | None = None,
    surroundings: Surroundings = Surroundings(),
) -> Starlette:
    """Make the app. ``state.requests`` are the Requests of the replica. The caller must call ``drain`` at shutdown.

    Args:
        shared_actors: The actors of SHARED_ACTORS, if there are several replicas.

    The app's ``state.desk`` answers questions of other replicas for operators. The caller runs the functions in
    ``state.jobs`` while the app runs.
    """
    http_metrics, state = HTTPMetrics(async_llm, config), surroundings.state or StateClient()
    state.share(lambda: (*async_llm.metrics(), *http_metrics.collect()), async_llm.adapters)
    bounds = config.ingress
    requests = Requests(bounds.max_ongoing_requests, async_llm.timelines, state)
    bodies = BodyReader(int(bounds.max_body_mib * 2**20), bounds.max_ongoing_requests, bounds.body_timeout_s)
    incoming = (KnownFields if config.ingress.unknown_fields == "warn" else IncomingFields)(async_llm)
    post = _PostRoutes(incoming, requests, bodies, async_llm.admission)
    stream_ids = StreamIds(surroundings.secret)
    chat, adapters = ChatCompletions(async_llm, config, stream_ids), AdapterHandlers(async_llm)
    store = open_store(shared_actors or {}, config.ingress.store, surroundings.application)
    servers = McpServers(config.ingress.mcp_servers, config.ingress.mcp_timeout_s)
    responses = CreateResponse(async_llm, chat, store, requests, servers, surroundings.secret)
    conversations = Conversations(store, responses.histories)
    desk = Desk(async_llm, requests, surroundings.node)
    peers = surroundings.create_peers(desk)

    routes = [
        post("/v1/chat/completions", ChatCompletionRequest, chat, resumable=True),
        post("/v1/completions", CompletionRequest, Completions(async_llm, config, stream_ids), resumable=True),
        post("/v1/responses", ResponsesRequest, responses),
        post("/v1/responses/compact", CompactRequest, responses.compact),
        *response_routes(store, config.ingress.max_ongoing_requests),
        post("/v1/conversations", CreateConversationRequest, conversations.create, queued=False),
        post("/v1/conversations/{conversation_id}", UpdateConversationRequest, conversations.update, queued=False),
        post("/v1/conversations/{conversation_id}/items", AddItemsRequest, conversations.add, queued=False),
        *conversation_routes(store),
        post("/v1/messages", MessagesRequest, CreateMessage(chat), keep_alive=PING, resumable=True),
        post("/v1/messages/count_tokens", CountTokensRequest, CountTokens(chat)),
        post("/v1/embeddings", EmbeddingRequest, Embeddings(async_llm, config)),
        *(post(path, ScoreRequest, Score(async_llm, config)) for path in ("/score", "/v1/score")),
        *(post(path, RerankRequest, Rerank(async_llm, config)) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        post("/tokenize", TokenizeRequest, Tokenize(async_llm)),
        post("/detokenize", DetokenizeRequest, Detokenize(async_llm)),
        post("/v1/load_lora_adapter", LoadAdapterRequest, adapters.load, queued=False, for_admins=True),
        post("/v1/unload_lora_adapter", UnloadAdapterRequest, adapters.unload, queued=False, for_admins=True),
        *model_routes(async_llm, config, requests),
        *ops_routes(async_llm, requests, state),
        *request_routes(peers),
        *cluster_routes(async_llm, peers, surroundings.actors, surroundings.dashboard),
        *console_routes(),
        openapi_route(),
        docs_route(),
    ]
    app = _App(routes=routes, middleware=_middleware(async_llm, config, http_metrics, state, surroundings))
    app.router.redirect_slashes = False
    app.state.requests = requests
    app.state.desk = desk
    app.state.jobs = [responses.take_over, desk.kept.keep]
    return app


def _middleware(
    async_llm: AsyncLLM, config: Config, http_metrics: HTTPMetrics, state: StateClient, around: Surroundings
) -> list[Middleware]:
    """The middleware, outermost first. With API keys, the keys share the queue."""
    middleware = [Middleware(RequestContextMiddleware, http_metrics, config.ingress.access_log)]
    if origins := config.ingress.cors_origins:
        middleware.insert(0, Middleware(ConfiguredOriginsMiddleware, origins))
    if (hosts := config.ingress.allowed_hosts) or not config.ingress.has_keys:
        enforced = bool(hosts) or around.on_loopback
        middleware.append(Middleware(HostMiddleware, hosts, around.nodes, enforced=enforced))
    if config.ingress.has_keys:
        keys = APIKeys(config.ingress, config.scheduler.policy, config.cache.share_prefixes)
        open_paths = set(config.ingress.open_paths)
        if "/console" in open_paths:
            open_paths |= PAGES.keys()
        async_llm.admission.policy = FairShares(lambda: len(keys))
        middleware.append(Middleware(APIKeyMiddleware, keys, frozenset(open_paths), state))
    return middleware
