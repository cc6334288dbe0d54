"""Ingress: the Serve deployment whose replicas each hold one HTTP app, one AsyncLLM, and the lines to all engines."""

from __future__ import annotations

import asyncio

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from raylm.config import Config
from raylm.engine import engine_core_prefix
from raylm.frontend import AsyncLLM, Discovery
from raylm.ingress.http_app import build_asgi_app

_POLL_S = 0.1


class Ingress:
    """One replica. ``engine`` is bound only so that Serve deploys the engines with the ingress."""

    def __init__(self, config: Config, engine: DeploymentHandle) -> None:
        self._config = config

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Serve calls this once, at boot: here start all tasks that must outlive every request."""
        self._llm = AsyncLLM(self._config)
        prefix = engine_core_prefix(serve.get_replica_context().app_name, self._config)
        self._discovery = Discovery(prefix, self._llm.add_engine)
        app = build_asgi_app(self._llm, self._config)
        self._drain = asyncio.create_task(self._drain_when_stopped(app))
        return app

    async def _drain_when_stopped(self, app: Starlette) -> None:
        """End running streams in order when Serve stops this replica.

        Serve tells user code of a stop only when no request is left, or cuts it off. Its replica, in this process,
        knows from the first moment.
        """
        actor_id = ray.get_runtime_context().current_actor._actor_id
        replica = ray._private.worker.global_worker.actors[actor_id]._replica_impl
        while not replica._shutting_down:  # noqa: ASYNC110 - it is Serve's flag, nothing to wait for
            await asyncio.sleep(_POLL_S)
        await app.state.lifecycle.drain(self._config.ingress.shutdown_grace_s)
