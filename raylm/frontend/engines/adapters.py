"""AdapterDirectory: the LoRA adapters of an application, and the engines that have each of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Literal

from raylm.errors import EngineUnavailableError, InvalidRequestError, ModelNotFoundError, NotFoundError, RayLMError
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.state.messages import AdapterEntry
from raylm.messages import LoRAAdapter
from raylm.stages import about

logger = logging.getLogger("raylm.frontend")
_EVENT = about("adapter")


class AdapterDirectory:
    """Tracks adapters in all engines. Engines report each change of their adapters to all clients.

    ``known`` maps the names that requests may use to adapters. ``lost`` maps the names of adapters that were lost
    without being unloaded to the reason. The directory loads known adapters into new engines, which replace lost ones
    or join. Decisions to load and unload are shared by the application's state, so that they survive changes of
    engines. An engine that still has an unloaded adapter has to unload it.
    """

    def __init__(self) -> None:
        self.known: dict[str, LoRAAdapter] = {}
        self.lost: dict[str, str] = {}
        self._engines: dict[str, tuple[EngineClient, frozenset[LoRAAdapter]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._decided: dict[str, AdapterEntry] = {}
        self._publish: Callable[[], Awaitable[None]] = _tell_nobody

    def check(self, name: str) -> None:
        """Raise ModelNotFoundError if no adapter has this name."""
        if name not in self.known:
            state = f"was lost: {self.lost[name]}" if name in self.lost else "is not loaded."
            raise ModelNotFoundError(f"The LoRA adapter '{name}' {state}", param="model")

    def engines_with(self, name: str) -> set[str]:
        """The ids of the engines that can serve an adapter.

        Raises:
            ModelNotFoundError: the adapter is not loaded.
            EngineUnavailableError: the adapter is being loaded again.
        """
        self.check(name)
        adapter = self.known[name]
        found = {engine_id for engine_id, (_, adapters) in self._engines.items() if adapter in adapters}
        if not found:
            raise EngineUnavailableError(f"The LoRA adapter '{name}' is being loaded again; try again shortly.")
        return found

    def digest(self, engine_id: str, name: str) -> str:
        """The digest of the content of an engine's adapter; its name until the engine has reported a digest."""
        _, adapters = self._engines[engine_id]
        return next((adapter.digest for adapter in adapters if adapter.name == name), "") or name

    def on_report(self, client: EngineClient, adapters: Iterable[LoRAAdapter]) -> None:
        """Process an engine's report of its adapters. Must be called from a task that no request cancels."""
        engine_id, now = client.info.engine_id, frozenset(adapters)
        is_new = engine_id not in self._engines
        _, before = self._engines.get(engine_id, (client, frozenset[LoRAAdapter]()))
        self._engines[engine_id] = client, now
        for adapter in now - before:
            if self._is_unloaded(adapter.name):
                self._start(self._take_out(client, adapter))
            else:
                self._learn(adapter)
        for adapter in before - now:
            if self.known.get(adapter.name) == adapter:
                del self.known[adapter.name]
        if is_new:
            for adapter in set(self.known.values()) - now:
                self._start(self._restore(client, adapter))

    def connect(self, publish: Callable[[], Awaitable[None]]) -> None:
        """Set ``publish``, which exchanges decisions with other replicas."""
        self._publish = publish

    def entries(self) -> Iterable[AdapterEntry]:
        return self._decided.values()

    def merge(self, entries: Iterable[AdapterEntry]) -> None:
        """Apply decisions of other replicas, or of earlier replicas."""
        for entry in entries:
            known = self._decided.get(entry.name)
            if known is not None and known.revision >= entry.revision:
                continue
            self._decided[entry.name] = entry
            if entry.decided == "unloaded":
                self.known.pop(entry.name, None)
            elif entry.decided == "loaded":
                self._learn(entry.adapter)
            for client, adapters in list(self._engines.values()):
                if entry.decided == "unloaded" and any(adapter.name == entry.name for adapter in adapters):
                    self._start(self._take_out(client, entry.adapter))
                elif entry.decided == "loaded" and entry.adapter not in adapters:
                    self._start(self._restore(client, entry.adapter))

    def has_all_of(self, engine_id: str, other_id: str) -> bool:
        """Whether an engine has all adapters of another engine."""
        return self._adapters_of(engine_id) >= self._adapters_of(other_id)

    def _adapters_of(self, engine_id: str) -> frozenset[LoRAAdapter]:
        return self._engines[engine_id][1] if engine_id in self._engines else frozenset()

    def leave(self, engine_id: str) -> None:
        """Remove an engine that is gone. Its adapters stay known."""
        self._engines.pop(engine_id, None)

    async def load(self, adapter: LoRAAdapter) -> None:
        """Load an adapter into every engine. If one fails, unload it from all and raise the error."""
        if adapter.name in self.known:
            message = f"A LoRA adapter '{adapter.name}' is loaded already; unload it first."
            raise InvalidRequestError(message, param="lora_name")
        clients = self._clients()
        await self._decide(adapter, "loading")
        fresh = [client for client in clients if adapter not in self._engines[client.info.engine_id][1]]
        try:
            await _all(client.load_adapter(adapter) for client in clients)
        except RayLMError:
            for client in fresh:
                await self._undo(client, adapter)
            if adapter.name not in self.known:
                await self._decide(adapter, "unloaded")
            raise
        for client in clients:  # the engines' own reports may arrive later
            engine_id = client.info.engine_id
            if engine_id in self._engines:
                self._engines[engine_id] = client, self._engines[engine_id][1] | {adapter}
        self._learn(adapter)
        await self._decide(adapter, "loaded")

    async def unload(self, name: str) -> None:
        """Unload an adapter from every engine. Requests that use it end with an error that names it."""
        if name not in self.known:
            raise NotFoundError(f"The LoRA adapter '{name}' is not loaded.", param="lora_name")
        clients = self._clients()
        await self._decide(self.known.pop(name), "unloaded")
        await _all(client.unload_adapter(name) for client in clients)

    def _clients(self) -> list[EngineClient]:
        if not self._engines:
            raise EngineUnavailableError("No engine is ready; try again shortly.")
        return [client for client, _ in self._engines.values()]

    def _learn(self, adapter: LoRAAdapter) -> None:
        self.known[adapter.name] = adapter
        self.lost.pop(adapter.name, None)
        self._decided.setdefault(adapter.name, AdapterEntry(adapter, "loaded", 0))  # no live replica has decided

    async def _decide(self, adapter: LoRAAdapter, decided: Literal["loading", "loaded", "unloaded"]) -> None:
        before = self._decided.get(adapter.name)
        revision = max(time.time_ns(), before.revision + 1 if before is not None else 1)
        self._decided[adapter.name] = AdapterEntry(adapter, decided, revision)
        await self._publish()

    def _is_unloaded(self, name: str) -> bool:
        return name in self._decided and self._decided[name].decided == "unloaded"

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_out(self, client: EngineClient, adapter: LoRAAdapter) -> None:
        """Unload an adapter that an engine was loading while it was unloaded elsewhere."""
        await self._publish()  # first learn whether it was loaded again
        if not self._is_unloaded(adapter.name):
            if any(adapter in adapters for _, adapters in self._engines.values()):
                self._learn(adapter)
            return
        try:
            await client.unload_adapter(adapter.name)
        except RayLMError as error:
            logger.warning(
                "engine %s may still have adapter %s: %s", client.info.engine_id, adapter.name, error, extra=_EVENT
            )

    async def _undo(self, client: EngineClient, adapter: LoRAAdapter) -> None:
        """Undo a failed load. Keeps an earlier adapter of the same name."""
        if self.known.get(adapter.name, adapter) != adapter:
            return
        try:
            await client.unload_adapter(adapter.name)
        except RayLMError as error:
            logger.warning(
                "engine %s may still have adapter %s: %s", client.info.engine_id, adapter.name, error, extra=_EVENT
            )

    async def _restore(self, client: EngineClient, adapter: LoRAAdapter) -> None:
        try:
            await client.load_adapter(adapter)
        except RayLMError as error:
            logger.warning(
                "engine %s: adapter %s was not restored: %s", client.info.engine_id, adapter.name, error, extra=_EVENT
            )
            elsewhere = any(adapter in adapters for _, adapters in self._engines.values())
            if self.known.get(adapter.name) == adapter and not elsewhere:
                del self.known[adapter.name]
                self.lost[adapter.name] = error.message


async def _tell_nobody() -> None:
    """Publish for an application with one replica, which shares no state."""


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Wait for all calls, then raise the first error."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if result is not None:
            raise result
