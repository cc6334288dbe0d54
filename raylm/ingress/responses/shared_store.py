"""The ResponseStore of an application, in the replica or as an actor that replicas share, and the path of its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from raylm.config import Config
from raylm.errors import ConfigError, StoreLostError
from raylm.ingress.responses.database import MEMORY, keep_private
from raylm.ingress.responses.store import ResponseStore
from raylm.ray_private import listen_where_ray_does

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


class SharedResponseStore(ResponseStore):
    """The store as an actor of the application."""

    def __init__(self, config: Config) -> None:
        from ray import serve

        listen_where_ray_does()
        super().__init__(store_path(config.ingress.store, serve.get_replica_context().app_name))
        self.renew_all()


def open_store(
    shared_actors: Mapping[str, DeploymentHandle], knob: str | None = None, application: str = ""
) -> ResponseStore:
    """The store shared by all replicas, or this replica's own store if it is the only replica."""
    shared = shared_actors.get("response_store")
    if shared is None:
        return ResponseStore(store_path(knob, application))
    return cast(ResponseStore, _RemoteStore(shared))


def find_store(knob: str | None, application: str) -> Path | None:
    """The path of the store: ``ingress.store``, by default a file of the application. None means in memory.

    Outside an application the default is in memory. Does not create or read files.
    """
    if knob == MEMORY or (knob is None and not application):
        return None
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "raylm"
    return (state / f"{quote(application, safe='')}.sqlite" if knob is None else Path(knob)).expanduser()


def store_path(knob: str | None, application: str) -> str:
    """As ``find_store``, and create the file. Raises ConfigError if it cannot be written."""
    if (path := find_store(knob, application)) is None:
        return MEMORY
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_private(path)
    except OSError as error:
        raise ConfigError(f"ingress.store: {path} cannot be written ({error.strerror}); choose another file.") from None
    return str(path)


class _RemoteStore:
    """Calls the methods of a ResponseStore that is a deployment.

    Calls wait while it is restarted. A call raises StoreLostError if the store is lost during the call.
    """

    def __init__(self, store: DeploymentHandle) -> None:
        from ray.exceptions import RayActorError

        self._store = store
        self._lost = RayActorError

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: object) -> Any:
            try:
                return await getattr(self._store, name).remote(*args)
            except self._lost as error:
                message = "The store of responses was lost and is restarting; try again shortly."
                raise StoreLostError(message) from error

        return call
