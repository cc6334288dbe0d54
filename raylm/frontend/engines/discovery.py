"""Discovery: watches Ray's named actors for this application's EngineCores, and hands over a client to each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import ray
from ray.util import list_named_actors

from raylm.engine import NAMESPACE
from raylm.errors import EngineDiedError
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.engines.ray_engine_client import RayEngineClient

logger = logging.getLogger("raylm.frontend")

PERIOD_S = 0.25
RECONNECT_S = 1.0  # by then the name of an engine that has ended is gone


class Discovery:
    """Started at boot, it runs for the life of the process.

    An EngineCore's name is unique to one incarnation and vanishes with it, so every name is connected to once, and
    again only if the line to an engine was lost that lives on.
    """

    def __init__(self, prefix: str, found: Callable[[EngineClient], None]) -> None:
        self._prefix = prefix
        self._found = found
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            try:
                self._follow(await asyncio.to_thread(self._names))
            except Exception as error:  # whatever Ray's control plane fails with, it may be well the next time
                logger.warning("Ray could not be asked for engines, and will be again: %s", error)
            await asyncio.sleep(PERIOD_S)

    def _follow(self, names: set[str]) -> None:
        for name in names - self._connecting.keys():
            self._connecting[name] = asyncio.create_task(self._connect(name))
        for name in self._connecting.keys() - names:
            self._connecting.pop(name).cancel()

    def _names(self) -> set[str]:
        found = list_named_actors(all_namespaces=True)
        return {a["name"] for a in found if a["namespace"] == NAMESPACE and a["name"].startswith(self._prefix)}

    async def _connect(self, name: str) -> None:
        try:
            core = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            client = await RayEngineClient.connect(core)
        except (ValueError, EngineDiedError) as error:
            logger.warning("%s was gone before it was ready: %s", name, error)
            return
        self._found(client)
        await client.left.wait()
        await asyncio.sleep(RECONNECT_S)
        logger.warning("The line to %s was lost, which lives; it is opened again.", name)
        self._connecting.pop(name, None)

    def stop(self) -> None:
        """Look for engines no more; clients that were handed over live on."""
        self._task.cancel()
        for task in self._connecting.values():
            task.cancel()
