"""The ResponseStore of an application: a replica's own, or an actor that all of them share; and where its file lies."""

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
    """The store that all replicas share, or one of this replica's own where it is the only one."""
    shared = shared_actors.get("response_store")
    if shared is None:
        return ResponseStore(store_path(knob, application))
    return cast(ResponseStore, _RemoteStore(shared))


def find_store(knob: str | None, application: str) -> Path | None:
    """The file that ``ingress.store`` names, by default one of the application's; None for one in memory.

    Outside of an application the default is in memory. Nothing is made or looked at.
    """
    if knob == MEMORY or (knob is None and not application):
        return None
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "raylm"
    return (state / f"{quote(application, safe='')}.sqlite" if knob is None else Path(knob)).expanduser()


def store_path(knob: str | None, application: str) -> str:
    """As ``find_store``, a file that can be written; ConfigError if there can be none."""
    if (path := find_store(knob, application)) is None:
        return MEMORY
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_private(path)
    except OSError as error:
        raise ConfigError(
            f"ingress.store: {path} cannot be written ({error.strerror}); name a file that can."
        ) from None
    return str(path)


class _RemoteStore:
    """The methods of a ResponseStore that is a deployment of its own, by its handle.

    They wait while it is started again, and raise StoreLostError where it is lost meanwhile.
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
                message = "The store of responses was lost, and is being started again; try again shortly."
                raise StoreLostError(message) from error

        return call
