"""Router: owns the set of ready engines, one reader task for each, and the choice of an engine for a request."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from raylm.errors import EngineDiedError, EngineUnavailableError, RayLMError
from raylm.frontend.engines.adapters import AdapterDirectory
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.input_processor import Limits
from raylm.messages import EngineCoreOutputs, EngineStats

logger = logging.getLogger("raylm.frontend")

CHUNK_TOKENS = 64
MAX_CHUNKS = 64
MAX_REMEMBERED = 16_384
NEAR = 4  # requests by which an engine may be busier and still get a prompt whose beginning it has seen

Deliver = Callable[[EngineCoreOutputs], list[tuple[int, int]]]
Fail = Callable[[Iterable[int], RayLMError], None]


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
    """``deliver`` takes every output and returns sequences to stop; ``fail`` ends requests whose engine is lost."""

    def __init__(self, deliver: Deliver, fail: Fail) -> None:
        self._engines: dict[str, RoutedEngine] = {}
        self._prefixes: OrderedDict[int, str] = OrderedDict()
        self._deliver = deliver
        self._fail = fail
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

    def stats(self) -> dict[str, EngineStats]:
        return {engine_id: engine.stats for engine_id, engine in self._engines.items()}

    def add(self, client: EngineClient) -> None:
        """Take in a ready engine and start reading from it; call it from a task that outlives every request."""
        engine = self._engines[client.info.engine_id] = RoutedEngine(client)
        engine.reader = asyncio.create_task(self._read(engine), name=f"read {client.info.engine_id}")

    async def close(self) -> None:
        """Leave all engines; open requests end with EngineUnavailableError."""
        out_of_service = EngineUnavailableError("The engine that served this request was taken out of service.")
        for engine in list(self._engines.values()):
            if engine.reader is not None:
                engine.reader.cancel()
            self._lose(engine, out_of_service)
            await self._close_client(engine.client)
        await asyncio.gather(*self._closing)

    def pick(self, prompt_token_ids: list[int], cache_salt: str | None, adapter: str | None = None) -> RoutedEngine:
        """The least loaded engine; among those about as free, the one that has seen most of the prompt's beginning."""
        self._check_ready()
        engines = self._engines
        if adapter is not None:
            able = self.adapters.engines_with(adapter)
            engines = {engine_id: engine for engine_id, engine in engines.items() if engine_id in able}
        best = min(engines.values(), key=lambda engine: engine.load)
        if len(engines) == 1:
            return best
        hashes = list(_prefix_hashes(prompt_token_ids, (cache_salt, adapter)))
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
        try:
            async for outputs in engine.client.outputs():
                engine.stats = outputs.stats
                if outputs.adapters is not None:
                    self.adapters.on_report(engine.client, outputs.adapters)
                if stops := self._deliver(outputs):
                    engine.client.stop(stops)
        except EngineDiedError as error:
            logger.warning("engine %s was lost: %s", engine.client.info.engine_id, error)
            lost.__cause__ = error  # clients get the neutral text above, logs and offline users the reason
        except Exception as error:
            logger.exception("engine %s: reading its outputs failed", engine.client.info.engine_id)
            lost.__cause__ = error
        self._lose(engine, lost)
        task = asyncio.create_task(self._close_client(engine.client))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _lose(self, engine: RoutedEngine, error: RayLMError) -> None:
        engine_id = engine.client.info.engine_id
        if self._engines.get(engine_id) is engine:
            del self._engines[engine_id]
            self.adapters.leave(engine_id)
        self._fail(list(engine.open_keys), error)

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
