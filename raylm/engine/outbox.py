"""Outbox: owns what one client has not taken yet; and ClientOutputs, the columns of one step for one client."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from raylm import logprob_columns
from raylm.engine.sequence import Sequence
from raylm.errors import RayLMError
from raylm.messages import EngineCoreOutputs, EngineStats, FinishReason, Logprobs, ModelRunnerOutput


class ClientOutputs:
    """What one step means for one client, while the Scheduler finds it out.

    ``sequences[i]`` got the next ``counts[i]`` of ``positions``, which are tokens of the step's result; without
    ``counts`` it is one each. ``finished`` maps such an entry to its reasons.
    """

    __slots__ = ("counts", "errors", "finished", "pooled", "positions", "prompt_logprobs", "sequences")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.positions: list[int] = []
        self.counts: list[int] = []
        self.finished: dict[int, tuple[FinishReason, int | None]] = {}
        self.prompt_logprobs: list[tuple[int, Logprobs]] = []
        self.errors: list[tuple[int, RayLMError]] = []
        self.pooled: list[tuple[int, bytes]] = []

    def finish(self, reason: FinishReason, stop_reason: int | None) -> None:
        """The newest entry is the last one of its sequence."""
        self.finished[len(self.sequences) - 1] = (reason, stop_reason)

    def columns(self, result: ModelRunnerOutput, stats: EngineStats, created: float) -> EngineCoreOutputs:
        """The news as the client gets them."""
        count, drawn = len(self.sequences), result.token_ids
        finish_reasons: list[FinishReason | None] = [None] * count
        stop_reasons: list[int | None] = [None] * count
        for entry, (reason, stop_reason) in self.finished.items():
            finish_reasons[entry], stop_reasons[entry] = reason, stop_reason
        return EngineCoreOutputs(
            keys=[seq.key for seq in self.sequences],
            indexes=[seq.index for seq in self.sequences],
            token_counts=self.counts or [1] * count,
            token_ids=[drawn[position] for position in self.positions],
            finish_reasons=finish_reasons,
            stop_reasons=stop_reasons,
            cached_tokens=[seq.num_cached for seq in self.sequences],
            stats=stats,
            logprobs=logprob_columns.select(result.logprobs, self.positions) if result.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            errors=self.errors,
            pooled=self.pooled,
            created=created,
        )


class Outbox:
    """One client's mail: everything that it has not taken yet, merged into one message.

    ``put`` never waits, so that a client who is slow, or gone, does not stall the engine.
    """

    def __init__(self) -> None:
        self._held: EngineCoreOutputs | None = None
        self._stats = EngineStats()
        self._closed_by: RayLMError | None = None
        self._news = asyncio.Event()

    def put(self, outputs: EngineCoreOutputs) -> None:
        """Add to what is held; its lists become the outbox's own."""
        self._held = outputs if self._held is None else merge(self._held, outputs)
        self._stats = outputs.stats
        self._news.set()

    def tell(self, outputs: EngineCoreOutputs) -> None:
        """Put a message that is about the stats alone, if those that say how busy the engine is have changed."""
        told, now = self._stats, outputs.stats
        if (told.running, told.waiting, told.kv_usage) != (now.running, now.waiting, now.kv_usage):
            self.put(outputs)

    def close(self, error: RayLMError) -> None:
        """Nothing will come any more; ``get`` raises ``error`` once the rest is taken."""
        self._closed_by = error
        self._news.set()

    async def get(self) -> EngineCoreOutputs:
        """Everything since the last call; waits until there is something.

        Raises:
            RayLMError: what the outbox was closed by, EngineDiedError when the engine died.
        """
        await self._news.wait()
        held, self._held = self._held, None
        if held is None:
            assert self._closed_by is not None
            raise self._closed_by
        if self._closed_by is None:
            self._news.clear()
        return held


def merge(held: EngineCoreOutputs, fresh: EngineCoreOutputs) -> EngineCoreOutputs:
    """One message that says what the two say one after the other; takes over the lists of ``held``."""
    logprobs = logprob_columns.append(held.logprobs, len(held.token_ids), fresh.logprobs, len(fresh.token_ids))
    for name in ("keys", "indexes", "token_counts", "token_ids", "finish_reasons", "stop_reasons", "cached_tokens"):
        getattr(held, name).extend(getattr(fresh, name))
    held.prompt_logprobs.extend(fresh.prompt_logprobs)
    held.errors.extend(fresh.errors)
    held.pooled.extend(fresh.pooled)
    adapters = held.adapters if fresh.adapters is None else fresh.adapters
    created = max(held.created, fresh.created)
    return replace(held, stats=fresh.stats, logprobs=logprobs, adapters=adapters, created=created)
