"""The ResponseStore of an application: in the replica, or as an actor that replicas share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, cast

from raylm.config import Config
from raylm.errors import StoreLostError
from raylm.ingress.responses.database import FileDatabase
from raylm.ingress.responses.postgres import PostgresDatabase, is_postgres
from raylm.ingress.responses.storage import become_owner, store_path
from raylm.ingress.responses.store import FOLLOW_S, ResponseStore
from raylm.ray_private import listen_where_ray_does

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


ANSWER_S = 4.0  # for an answer of the store; a store that lives takes milliseconds
LONGER_S: dict[str, float | None] = {"follow": FOLLOW_S + ANSWER_S, "until_cancelled": None}


class SharedResponseStore(ResponseStore):
    """The store as an actor of the application, on the head node, where its file is."""

    def __init__(self, config: Config) -> None:
        from ray import serve

        listen_where_ray_does()
        path = store_path(config.ingress.store, serve.get_replica_context().app_name)
        self._owned = become_owner(path)
        super().__init__(FileDatabase(path))
        self.renew_all()


def open_store(
    shared_actors: Mapping[str, DeploymentHandle], knob: str | None = None, application: str = ""
) -> ResponseStore:
    """The store shared by all replicas, or this replica's own store if it is the only replica or uses Postgres."""
    if knob is not None and is_postgres(knob):
        return ResponseStore(PostgresDatabase(knob, application))
    shared = shared_actors.get("response_store")
    if shared is None:
        return ResponseStore(FileDatabase(store_path(knob, application)))
    return cast(ResponseStore, _RemoteStore(shared))


class _RemoteStore:
    """Calls the methods of a ResponseStore that is a deployment.

    A call raises StoreLostError if the store is lost during the call, or does not answer within ANSWER_S. So no call
    waits for the store of a silent node, which Ray notices later.
    """

    def __init__(self, store: DeploymentHandle) -> None:
        from ray.exceptions import RayActorError

        self._store = store
        self._lost = RayActorError

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: object) -> Any:
            try:
                async with asyncio.timeout(LONGER_S.get(name, ANSWER_S)):
                    return await getattr(self._store, name).remote(*args)
            except (self._lost, TimeoutError) as error:
                message = "The store of responses was lost and is restarting; try again shortly."
                raise StoreLostError(message) from error

        return call
