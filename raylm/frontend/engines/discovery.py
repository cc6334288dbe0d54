"""Discovery: finds this application's EngineCores among Ray's named actors, and connects a client to each."""

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
SETTLED_PERIOD_S = 1.0  # if there is an engine, and none joined or left for SETTLING_S
SETTLING_S = 15.0
RECONNECT_S = 1.0  # the name of an ended engine is gone by then; an engine that reported to live is asked at once


class Discovery:
    """Finds engines from construction to ``stop``, which no request may cancel.

    An EngineCore's name belongs to one incarnation and is removed when it ends. So each name is connected once, and
    again only if the engine lives and does not drain: it did not answer, or the connection was lost.

    Engines whose configuration has this ``digest`` are passed to ``found`` when they join. While an application is
    updated, it has engines of other digests. They are passed on if they have the fingerprint of one with this digest,
    because then they produce the same tokens.
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
            except Exception as error:  # any error of Ray's control plane may be temporary
                logger.warning(
                    "could not list engines from Ray, trying again: %s", error, extra=about("engines.unknown")
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
            logger.warning("%s ended before it was ready: %s", name, reason, extra=about("engine.gone"))
            return
        except TimeoutError:
            logger.warning("%s does not answer, and is asked again.", name, extra=about("engine.silent"))
            await asyncio.sleep(RECONNECT_S)
            self._forget(name)
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
            "lost the connection to %s, which is alive; connecting again", name, extra=about("engine.line_lost")
        )
        self._forget(name)

    def _forget(self, name: EngineName) -> None:
        """Connect to this engine anew, as long as it has its name."""
        self._connecting.pop(name, None)
        self._unsettle()

    async def _until_known(self, fingerprint: str) -> None:
        while fingerprint not in self._fingerprints:  # noqa: ASYNC110 - may wait forever
            await asyncio.sleep(PERIOD_S)

    def stop(self) -> None:
        """Stop looking for engines. Clients that were passed on stay open."""
        self._task.cancel()
        for task in self._connecting.values():
            task.cancel()
