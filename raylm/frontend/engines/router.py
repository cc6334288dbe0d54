"""Router: owns the set of ready engines, one reader task for each, and the choice of an engine for a request."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from raylm.errors import EngineCrashedError, EngineDiedError, EngineUnavailableError, RayLMError
from raylm.frontend.engines.adapters import AdapterDirectory
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.engines.recovery import Fail, Recovery, Resume
from raylm.frontend.input_processor import Limits
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, EngineStats

logger = logging.getLogger("raylm.frontend")

CHUNK_TOKENS = 64
MAX_CHUNKS = 64
MAX_REMEMBERED = 16_384
NEAR = 4  # requests by which an engine may be busier and still get a prompt whose beginning it has seen

Deliver = Callable[[EngineCoreOutputs], list[tuple[int, int]]]


@dataclass(slots=True, eq=False)
class RoutedEngine:
    """One ready engine: its client, this process's open requests on it, and its newest stats."""

    client: EngineClient
    open_keys: set[int] = field(default_factory=set)
    stats: EngineStats = field(default_factory=EngineStats)
    reader: asyncio.Task[None] | None = None

    @property
    def load(self) -> tuple[int, int]:
        """Own open requests first: they are exact, while the stats are a step old and count other clients too."""
        return len(self.open_keys), self.stats.running + self.stats.waiting


class Router:
    """``deliver`` takes every output and returns sequences to stop; ``fail`` ends requests with an error.

    A request whose engine is lost goes on on another one: ``resume`` gives it with the tokens it has. Where there is
    none it waits for one, at most ``recovery_timeout_s``.
    """

    def __init__(self, deliver: Deliver, fail: Fail, resume: Resume, recovery_timeout_s: float = 0.0) -> None:
        self._engines: dict[str, RoutedEngine] = {}
        self._engine_of: dict[int, RoutedEngine] = {}
        self._recovery = Recovery(resume, self._send_again, fail, recovery_timeout_s)
        self._prefixes: OrderedDict[int, str] = OrderedDict()
        self._deliver = deliver
        self._closing: set[asyncio.Task[None]] = set()
        self.adapters = AdapterDirectory()

    @property
    def is_ready(self) -> bool:
        return bool(self._engines)

    @property
    def limits(self) -> Limits:
        """What every ready engine can take; EngineUnavailableError without any."""
        self._check_ready()
        infos = [engine.client.info for engine in self._engines.values()]
        return Limits(min(i.max_model_len for i in infos), min(i.worker.vocab_size for i in infos))

    @property
    def fingerprint(self) -> str:
        """Of what all ready engines compute with; "" without any. Where they differ nothing can be promised."""
        found = sorted({engine.client.info.worker.fingerprint for engine in self._engines.values()})
        if len(found) < 2:
            return "".join(found)
        return f"fp_{hashlib.sha256(' '.join(found).encode()).hexdigest()[:16]}_varies"

    def stats(self) -> dict[str, EngineStats]:
        return {engine_id: engine.stats for engine_id, engine in self._engines.items()}

    def add(self, client: EngineClient) -> None:
        """Take in a ready engine and start reading from it; call it from a task that outlives every request."""
        engine = self._engines[client.info.engine_id] = RoutedEngine(client)
        engine.reader = asyncio.create_task(self._read(engine), name=f"read {client.info.engine_id}")
        self._recovery.retry()

    async def close(self) -> None:
        """Leave all engines; open requests end with EngineUnavailableError."""
        out_of_service = EngineUnavailableError("The engine that served this request was taken out of service.")
        engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            if engine.reader is not None:
                engine.reader.cancel()
            self._lose(engine, out_of_service, crashed=False)
            await self._close_client(engine.client)
        self._recovery.close(out_of_service)
        await asyncio.gather(*self._closing)

    def send(self, request: EngineCoreRequest, engine: RoutedEngine) -> None:
        """Hand a request to the engine that was picked for it; ``leave`` when it is over."""
        engine.open_keys.add(request.key)
        self._engine_of[request.key] = engine
        engine.client.add(request)

    def leave(self, key: int, *, abort: bool) -> None:
        """A request is over; with ``abort`` its engine may still be at work on it."""
        self._recovery.forget(key)
        if (engine := self._engine_of.pop(key, None)) is not None:
            engine.open_keys.discard(key)
            if abort:
                engine.client.abort([key])

    def _send_again(self, request: EngineCoreRequest, fingerprint: str) -> None:
        """Only an engine of the same fingerprint goes on with the tokens of another."""
        self.send(request, self.pick(request, fingerprint if any(request.drawn) else None))

    def pick(self, request: EngineCoreRequest, fingerprint: str | None = None) -> RoutedEngine:
        """The least loaded engine; among those about as free, the one that has seen most of the prompt's beginning.

        Raises:
            EngineUnavailableError: none is ready, has the adapter or the ``fingerprint``.
            ModelNotFoundError: the adapter is not loaded.
        """
        self._check_ready()
        engines, adapter = self._engines, request.adapter
        if adapter is not None:
            able = self.adapters.engines_with(adapter)
            engines = {engine_id: engine for engine_id, engine in engines.items() if engine_id in able}
        if fingerprint is not None:
            engines = {name: e for name, e in engines.items() if e.client.info.worker.fingerprint == fingerprint}
        if not engines:
            raise EngineUnavailableError("No engine is ready that could go on with this request.")
        best = min(engines.values(), key=lambda engine: engine.load)
        if len(engines) == 1:
            return best
        hashes = list(_prefix_hashes(request.prompt_token_ids, (request.cache_salt, adapter)))
        seen = (engines.get(self._prefixes.get(value, "")) for value in reversed(hashes))
        most_open = len(best.open_keys) + NEAR
        chosen = next((engine for engine in seen if engine is not None and len(engine.open_keys) <= most_open), best)
        self._remember(hashes, chosen.client.info.engine_id)
        return chosen

    def _remember(self, hashes: list[int], engine_id: str) -> None:
        for value in hashes:
            self._prefixes[value] = engine_id
            self._prefixes.move_to_end(value)
        while len(self._prefixes) > MAX_REMEMBERED:
            self._prefixes.popitem(last=False)

    async def _read(self, engine: RoutedEngine) -> None:
        """Read until the engine is lost; nothing else ends this task but ``close``."""
        lost = EngineDiedError("The engine that served this request was lost; sending it again is safe.")
        crashed = False
        try:
            async for outputs in engine.client.outputs():
                engine.stats = outputs.stats
                if outputs.adapters is not None:
                    self.adapters.on_report(engine.client, outputs.adapters)
                    self._recovery.retry()
                if self._recovery.watches:
                    self._recovery.on_tokens(outputs.keys)
                if stops := self._deliver(outputs):
                    engine.client.stop(stops)
        except EngineDiedError as error:
            # Its supervisor tells what was lost; a line to an engine that lives is Discovery's to tell.
            open_requests = f"{len(engine.open_keys)} open requests"
            logger.info("engine %s was lost with %s: %s", engine.client.info.engine_id, open_requests, error)
            lost.__cause__ = error  # clients get the neutral text above, logs and offline users the reason
            crashed = isinstance(error, EngineCrashedError)
        except Exception as error:
            logger.exception("engine %s: reading its outputs failed", engine.client.info.engine_id)
            lost.__cause__ = error
        self._lose(engine, lost, crashed=crashed)
        task = asyncio.create_task(self._close_client(engine.client))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _lose(self, engine: RoutedEngine, error: RayLMError, *, crashed: bool) -> None:
        engine_id = engine.client.info.engine_id
        if self._engines.get(engine_id) is engine:
            del self._engines[engine_id]
            self.adapters.leave(engine_id)
        for key in engine.open_keys:
            del self._engine_of[key]
        if crashed:
            self._recovery.suspect(engine.open_keys)
        self._recovery.take(engine.open_keys, engine.client.info.worker.fingerprint, error)

    async def _close_client(self, client: EngineClient) -> None:
        try:
            await client.close()
        except Exception as error:
            logger.warning("engine %s: could not be left in order: %s", client.info.engine_id, error)

    def _check_ready(self) -> None:
        if not self._engines:
            raise EngineUnavailableError("No engine is ready; try again shortly.")


def _prefix_hashes(token_ids: list[int], content: tuple[str | None, ...]) -> Iterator[int]:
    """One hash for each whole chunk of the prompt's beginning, each over all chunks up to it, and what else counts."""
    value = hash(content)
    for end in range(CHUNK_TOKENS, min(len(token_ids), MAX_CHUNKS * CHUNK_TOKENS) + 1, CHUNK_TOKENS):
        value = hash((value, *token_ids[end - CHUNK_TOKENS : end]))
        yield value
