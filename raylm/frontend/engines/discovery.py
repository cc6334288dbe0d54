"""Discovery: watches Ray's named actors for this application's EngineCores, and hands over a client to each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from raylm.engine import NAMESPACE, EngineName, as_raylm_error
from raylm.errors import EngineDiedError
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.engines.ray_engine_client import connect_engine
from raylm.stages import about

logger = logging.getLogger("raylm.frontend")

PERIOD_S = 0.25
SETTLED_PERIOD_S = 1.0  # while there is an engine and none has come or gone for SETTLING_S
SETTLING_S = 15.0
RECONNECT_S = 1.0  # by then the name of an engine that has ended is gone; one that said that it lives is asked at once


class Discovery:
    """Started at boot, it runs for the life of the process.

    An EngineCore's name is unique to one incarnation and vanishes with it, so every name is connected to once, and
    again only if the line to an engine was lost that lives on and does not drain.

    Engines of the configuration with this ``digest`` are handed over as they come. Others of the application, which
    there are while it is updated, are if they have the fingerprint of one of those: they give the same tokens.
    """

    def __init__(self, app_name: str, digest: str, found: Callable[[EngineClient], None]) -> None:
        self._app_name, self._digest = app_name, digest
        self._found = found
        self._fingerprints: set[str] = set()
        self._connecting: dict[EngineName, asyncio.Task[None]] = {}
        self._settled_at = 0.0
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            try:
                self._follow(await asyncio.to_thread(self._names))
            except Exception as error:  # whatever Ray's control plane fails with, it may be well the next time
                logger.warning(
                    "Ray could not be asked for engines, and will be again: %s", error, extra=about("engines.unknown")
                )
            settled = self._connecting and time.monotonic() > self._settled_at
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLED_PERIOD_S if settled else PERIOD_S):
                    await self._changed.wait()

    def _unsettle(self) -> None:
        self._settled_at = time.monotonic() + SETTLING_S
        self._changed.set()

    def _follow(self, names: set[EngineName]) -> None:
        if names != self._connecting.keys():
            self._unsettle()
        for name in names - self._connecting.keys():
            self._connecting[name] = asyncio.create_task(self._connect(name))
        for name in self._connecting.keys() - names:
            self._connecting.pop(name).cancel()

    def _names(self) -> set[EngineName]:
        found = list_named_actors(all_namespaces=True)
        names = [EngineName.parse(actor["name"]) for actor in found if actor["namespace"] == NAMESPACE]
        return {name for name in names if name is not None and name.app_name == self._app_name}

    async def _connect(self, name: EngineName) -> None:
        try:
            core = await asyncio.to_thread(ray.get_actor, str(name), NAMESPACE)
            if name.digest != self._digest:
                await self._until_known((await core.info.remote()).worker.fingerprint)
            client = await connect_engine(core)
        except (ValueError, RayError, EngineDiedError) as error:
            reason = as_raylm_error(error) if isinstance(error, RayError) else error
            logger.warning("%s was gone before it was ready: %s", name, reason, extra=about("engine.gone"))
            return
        if name.digest == self._digest:
            self._fingerprints.add(client.info.worker.fingerprint)
        self._found(client)
        await client.left.wait()
        self._unsettle()
        if client.draining:
            return
        if not client.dropped:
            await asyncio.sleep(RECONNECT_S)
        logger.warning(
            "The line to %s was lost, which lives; it is opened again.", name, extra=about("engine.line_lost")
        )
        self._connecting.pop(name, None)
        self._unsettle()

    async def _until_known(self, fingerprint: str) -> None:
        while fingerprint not in self._fingerprints:  # noqa: ASYNC110 - it may be for ever
            await asyncio.sleep(PERIOD_S)

    def stop(self) -> None:
        """Look for engines no more; clients that were handed over live on."""
        self._task.cancel()
        for task in self._connecting.values():
            task.cancel()
