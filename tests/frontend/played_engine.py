"""PlayedEngine: an EngineClient whose engine is played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from raylm.errors import EngineDiedError
from raylm.frontend.engines.engine_client import EngineClient
from raylm.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    EngineStats,
    FinishReason,
    LoRAAdapter,
    ParkedTokens,
    WorkerInfo,
)

Entry = tuple[int, int, list[int], FinishReason | None]


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def batch(*entries: Entry, stats: EngineStats | None = None, **columns: Any) -> EngineCoreOutputs:
    """A message with the entries (key, index, tokens, finish reason)."""
    given = {
        "stop_reasons": [None] * len(entries),
        "cached_tokens": [0] * len(entries),
        "stats": stats or EngineStats(),
        **columns,
    }
    return EngineCoreOutputs(
        keys=[key for key, *_ in entries],
        indexes=[index for _, index, *_ in entries],
        token_counts=[len(tokens) for *_, tokens, _ in entries],
        token_ids=[token for *_, tokens, _ in entries for token in tokens],
        finish_reasons=[reason for *_, reason in entries],
        **given,
    )


class PlayedEngine(EngineClient):
    """Records its calls, and sends the messages that the test provides."""

    def __init__(
        self, engine_id: str, *, max_model_len: int = 128, vocab_size: int = 330, fingerprint: str = "fp_1"
    ) -> None:
        worker = WorkerInfo(
            64, 16, max_model_len, vocab_size, "cpu", "float32", "cpu", 1, 0, 0, fingerprint=fingerprint
        )
        self.info = EngineInfo(engine_id, max_model_len, worker)
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[int] = []
        self.stopped: list[tuple[int, int]] = []
        self.watched = 0
        self.parked: dict[str, ParkedTokens] = {}
        self.closed = False
        self.loaded: list[LoRAAdapter] = []
        self.refusal: Exception | None = None
        self._said: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()

    def add(self, request: EngineCoreRequest) -> None:
        self.added.append(request)

    def abort(self, keys: list[int]) -> None:
        self.aborted.extend(keys)

    def stop(self, sequences: list[tuple[int, int]]) -> None:
        self.stopped.extend(sequences)

    def watch_blocks(self) -> None:
        self.watched += 1

    async def take_parked(self, request: EngineCoreRequest) -> ParkedTokens | None:
        return self.parked.pop(request.resumable_as, None)

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.loaded.append(adapter)

    async def unload_adapter(self, name: str) -> None:
        self.loaded = [adapter for adapter in self.loaded if adapter.name != name]

    async def snapshot(self) -> EngineSnapshot:
        raise EngineDiedError("Nothing is held here.")

    def say(self, *entries: Entry, **columns: Any) -> None:
        """Send one message."""
        self._said.put_nowait(batch(*entries, **columns))

    def die(self, error: Exception | None = None) -> None:
        """Raise an error in the stream of outputs, as if the engine were lost."""
        self._said.put_nowait(error or EngineDiedError("The engine is gone."))

    async def heard(self) -> None:
        """Wait until the client has processed all messages, including a loss."""
        async with asyncio.timeout(300):
            await self._said.join()

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        while True:
            said = await self._said.get()
            try:
                if isinstance(said, Exception):
                    raise said
                yield said
            finally:
                self._said.task_done()

    async def close(self) -> None:
        self.closed = True
