"""Ingress: the Serve deployment whose replicas each hold one HTTP app and one AsyncLLM with clients of all engines."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray import ObjectRef, serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from raylm.config import Config
from raylm.engine import engine_digest
from raylm.errors import ConfigError
from raylm.frontend import Requests
from raylm.ingress.console.peers import Alone, Desk, Peers, ServePeers
from raylm.ingress.ray_metrics import RayMetrics
from raylm.lazy import Family
from raylm.params import PoolingParams, SamplingParams
from raylm.ray_private import (
    dashboard_url,
    listen_where_ray_does,
    listening_host,
    raylm_actors,
    routed_for_s,
    shared_secret,
    stop_flag,
)
from raylm.stages import LogSource, about, configure_logs, report

if TYPE_CHECKING:
    from ray.serve.context import ReplicaContext

    from raylm.frontend import AsyncLLM, RequestOutput, StateClient
    from raylm.ingress.handle_calls import HandleCalls

logger = logging.getLogger("raylm.ingress")

_POLL_S = 0.1
_NODES_S = 5.0  # between two looks at which nodes the cluster has
_LAST_SPANS_S = 2.0  # for observers of requests to tell of the last ones
_LEAVE_S = 0.5  # for proxies to forget this replica, beyond the time that Serve itself gives them

# Actors that all replicas share where there are several, by the name under which the app knows them.
SHARED_ACTORS: Family[type] = Family({
    "response_store": "raylm.ingress.responses.shared_store:SharedResponseStore",
})  # fmt: skip


class Ingress:
    """One replica. Python callers reach the public methods by handle, HTTP clients the app.

    ``engine`` is bound so that Serve deploys the engines with the ingress, and is called only where there may be none;
    ``shared_actors`` are SHARED_ACTORS, none where there is a single replica.
    """

    docs_path = "/console"  # Serve's REST API has it with the application

    _llm: AsyncLLM
    _requests: Requests
    _state: StateClient
    _calls: HandleCalls
    _desk: Desk
    _tasks: tuple[object, ...]

    def __init__(self, config: Config, engine: DeploymentHandle, **shared_actors: DeploymentHandle) -> None:
        listen_where_ray_does()
        self._config = config
        self._engine = engine
        self._engine_wanted = asyncio.Event()
        self._leave: Callable[[], object] | None = None
        self._shared_actors = shared_actors
        self._nodes: frozenset[str] = frozenset()  # addresses of the nodes that live

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Serve calls this once, at boot. The reason why it cannot start is reported in one line."""
        try:
            return await self._build()
        except ConfigError as error:
            report("error", "config", f"{serve.get_replica_context().app_name}: {error.message}")
            raise

    async def _build(self) -> Starlette:
        """Build the app, and start all tasks that must outlive every request.

        It ends when there is an engine. So an update takes away the old replicas, and with them what they serve, only
        when new ones can answer.
        """
        from raylm.frontend import RemoteState, StateClient  # building need not wait for the imports here
        from raylm.ingress.handle_calls import HandleCalls
        from raylm.ingress.http.hosts import is_loopback
        from raylm.ingress.routes import Surroundings, build_asgi_app

        context = serve.get_replica_context()
        app_name = context.app_name
        self._llm = self._create_llm(context)
        self._state = StateClient(RemoteState(app_name) if _is_shared(self._config) else None, context.replica_tag)
        app = build_asgi_app(
            self._llm,
            self._config,
            self._shared_actors,
            Surroundings(
                state=self._state,
                secret=shared_secret(f"raylm streams {app_name}"),
                application=app_name,
                create_peers=self._peers,
                actors=raylm_actors,
                dashboard=dashboard_url,
                node=ray.util.get_node_ip_address(),
                nodes=lambda: self._nodes,
                on_loopback=is_loopback(await asyncio.to_thread(listening_host)),
            ),
        )
        self._requests, self._desk = app.state.requests, app.state.desk
        self._calls = HandleCalls(self._llm, self._config, self._requests)
        self._start(app_name, app.state.jobs)
        if not self._config.engine.scales_to_zero:
            await self._llm.until_engine()
        return app

    def _create_llm(self, context: ReplicaContext) -> AsyncLLM:
        from raylm.frontend import Admission, AsyncLLM, check_observers, current_id, open_observers
        from raylm.ingress.http.haproxy_start import lacking_variables

        bounds, app_name = self._config.ingress, context.app_name
        admission = Admission(bounds.max_queued_requests, bounds.max_queued_tokens)
        configure_logs(self._config.log_format, LogSource("ingress", app_name), current_id)
        check_observers(self._config)
        wake = self._engine_wanted.set if self._config.engine.scales_to_zero else None
        llm = AsyncLLM(self._config, admission, bounds.recovery_timeout_s, wake, context.rank.rank)
        report("stage", "chat", f"{app_name}: {llm.chat_description}")
        if lacking := lacking_variables():
            report("stage", "limits", f"{app_name}: {lacking}")
        llm.timelines.ingress = instance = context.replica_id.unique_id
        llm.timelines.observers = open_observers(self._config, app_name, instance, llm.text_of)
        return llm

    def _start(self, app_name: str, jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Start the tasks that outlive every request."""
        from raylm.frontend import Discovery

        self._state.start()
        gc.collect()
        gc.freeze()  # libraries and tokenizer: walking through them would stop the loop for tens of milliseconds
        self._tasks = (
            Discovery(app_name, engine_digest(self._config), self._llm.add_engine),
            asyncio.create_task(self._drain_when_stopped()),
            asyncio.create_task(self._start_engines_when_wanted()),
            asyncio.create_task(self._watch_nodes()),
            asyncio.create_task(RayMetrics(app_name, self._state.series_for_all).run()),
            *(asyncio.create_task(job()) for job in jobs),
        )
        loop = asyncio.get_running_loop()

        def leave() -> object:
            stopping = loop.create_task(self._llm.stop())
            self._llm.timelines.close(_LAST_SPANS_S)
            return stopping

        self._leave = leave

    async def generate(
        self, prompt: str | list[int], params: SamplingParams | None = None, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt (text or token ids); call it with ``handle.options(stream=True)``.

        ``fields`` are those of POST /v1/completions, with its defaults; sampling may be said by ``params`` instead.
        ``model`` names a LoRA adapter that was loaded. Outputs are deltas; the last one is ``finished``.

        Raises:
            RayLMError: what HTTP clients would get as an error.
        """
        async with aclosing(self._calls.generate(None, prompt, params, **fields)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self, messages: list[dict[str, Any]], params: SamplingParams | None = None, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The next turn of a conversation; as ``generate``, with the fields of POST /v1/chat/completions."""
        async with aclosing(self._calls.chat(None, messages, params, **fields)) as outputs:
            async for output in outputs:
                yield output

    async def complete(
        self, prompt: str | list[int], params: SamplingParams | None = None, **fields: Any
    ) -> RequestOutput:
        """As ``generate``, in one output and without ``stream=True``."""
        return await self._calls.complete(None, prompt, params, **fields)

    async def reply(
        self, messages: list[dict[str, Any]], params: SamplingParams | None = None, **fields: Any
    ) -> RequestOutput:
        """As ``chat``, in one output and without ``stream=True``."""
        return await self._calls.reply(None, messages, params, **fields)

    async def embed(self, prompt: str | list[int], params: PoolingParams | None = None, **fields: Any) -> RequestOutput:
        """The vector of one prompt (text or token ids), as float32 bytes in ``vector`` of the output."""
        return await self._calls.embed(None, prompt, params, **fields)

    async def score(self, text_1: str | list[str], text_2: str | list[str], **fields: Any) -> dict[str, Any]:
        """What POST /score answers."""
        return await self._calls.score(None, text_1, text_2, **fields)

    async def rerank(self, query: str, documents: list[str], **fields: Any) -> dict[str, Any]:
        """What POST /rerank answers."""
        return await self._calls.rerank(None, query, documents, **fields)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self._calls.tokenize(None, text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: list[int]) -> str:
        return await self._calls.detokenize(None, token_ids)

    def _peers(self, desk: Desk) -> Peers:
        if self._config.ingress.replicas == 1:
            return Alone(desk)
        context = serve.get_replica_context()
        return ServePeers(desk, DeploymentHandle(context.deployment, context.app_name))

    async def desk(self, method: str, *args: Any) -> tuple[str, Any]:
        """What another replica asks for an operator, behind the name of this one."""
        return self._desk.ask(method, *args)

    async def stream_to(
        self, caller: list[ObjectRef], method: Literal["generate", "chat"], /, *args: Any, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """What ``method`` yields, until the process that owns the one object in ``caller`` is gone."""
        async with aclosing(getattr(self._calls, method)(*caller, *args, **fields)) as outputs:
            async for output in outputs:
                yield output

    async def answer_to(self, caller: list[ObjectRef], method: str, /, *args: Any, **fields: Any) -> Any:
        """As ``stream_to``, for methods that return their answer."""
        return await getattr(self._calls, method)(*caller, *args, **fields)

    async def _watch_nodes(self) -> None:
        """Without keys, some answers are for clients on the cluster's nodes alone."""
        while not self._config.ingress.has_keys:
            with suppress(Exception):  # of any class; Ray is asked again
                found = await asyncio.to_thread(ray.nodes)
                self._nodes = frozenset(node["NodeManagerAddress"] for node in found if node["Alive"])
            await asyncio.sleep(_NODES_S)

    async def _start_engines_when_wanted(self) -> None:
        """A call that waits for a replica is what makes Serve start one where there is none."""
        while True:
            await self._engine_wanted.wait()
            self._engine_wanted.clear()
            try:
                await self._engine.wake.remote()
            except Exception as error:  # of any class; a request that waits for an engine asks again
                logger.warning("could not request an engine: %s", error, extra=about("engines.none"))

    async def _drain_when_stopped(self) -> None:
        """End running streams in order when Serve stops this replica.

        Serve tells user code of a stop only when no request is left; its replica, in this process, knows at once. What
        proxies send until they have heard of it is served as ever.
        """
        is_stopping = stop_flag()
        while not is_stopping():  # noqa: ASYNC110 - Serve's own flag, which nothing announces
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(routed_for_s() + _LEAVE_S)
        await self._requests.drain(self._config.ingress.shutdown_grace_s)
        await self._state.close()
        await asyncio.to_thread(self._llm.timelines.close, _LAST_SPANS_S)

    def __del__(self) -> None:
        """Serve calls this when no request is left, which may be before ``_drain_when_stopped`` has come to its end.

        Engines that drain need not wait for this client.
        """
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


def _is_shared(config: Config) -> bool:
    """Whether there is something that other replicas, or the next one in this one's place, must know of."""
    return config.ingress.replicas > 1 or config.ingress.has_keys or config.lora.root is not None
