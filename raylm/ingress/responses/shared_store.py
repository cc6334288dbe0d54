"""The ResponseStore of an application: a replica's own, or an actor that all of them share; and where its file lies."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from raylm.config import Config
from raylm.errors import StoreLostError
from raylm.ingress.responses.store import MEMORY, ResponseStore
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


def store_path(knob: str | None, application: str) -> str:
    """The file that ``ingress.store`` names; by default one of the application's, or none outside of an application."""
    if knob == MEMORY or (knob is None and not application):
        return MEMORY
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "raylm"
    path = (state / f"{quote(application, safe='')}.sqlite" if knob is None else Path(knob)).expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _keep_private(path)
    return str(path)


def _keep_private(path: Path) -> None:
    """SQLite's file of what was asked and answered, and those beside it, are for this user alone to read."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # new files beside it get its mode
    for one in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(FileNotFoundError):
            if one.stat().st_uid == os.geteuid():
                one.chmod(0o600)


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
