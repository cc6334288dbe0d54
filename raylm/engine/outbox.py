"""Outbox: the outputs that one client has not read yet. ClientOutputs: the columns of one step for one client."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import accumulate, groupby

from raylm import logprob_columns
from raylm.engine.block_hashes import pack_keys
from raylm.engine.block_pool import note
from raylm.engine.sequence import Sequence
from raylm.errors import RayLMError
from raylm.messages import (
    BlockChanges,
    EngineCoreOutputs,
    EngineStats,
    FinishReason,
    Logprobs,
    ModelRunnerOutput,
    SequenceEvent,
)


class ClientOutputs:
    """Collects the outputs of one step for one client.

    ``sequences[i]`` drew the token at ``positions[i]`` of the step's result. Tokens of one sequence are adjacent.
    ``finished`` maps i to (finish reason, stop token) if that token is the last one of its sequence.
    """

    __slots__ = ("errors", "finished", "pooled", "positions", "prompt_logprobs", "sequences")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.positions: list[int] = []
        self.finished: dict[int, tuple[FinishReason, int | None]] = {}
        self.prompt_logprobs: list[tuple[int, Logprobs]] = []
        self.errors: list[tuple[int, RayLMError]] = []
        self.pooled: list[tuple[int, bytes]] = []

    def finish(self, reason: FinishReason, stop_reason: int | None) -> None:
        """Mark the newest token as the last one of its sequence."""
        self.finished[len(self.sequences) - 1] = (reason, stop_reason)

    def columns(self, result: ModelRunnerOutput, stats: EngineStats, created: float) -> EngineCoreOutputs:
        sequences, finished, drawn = self.sequences, self.finished, result.token_ids
        token_counts = [1] * len(sequences)
        if len(drawn) > len(result.seq_ids):  # several tokens of a sequence become one entry
            runs = [(seq, len(list(run))) for seq, run in groupby(sequences)]
            sequences, token_counts = [seq for seq, _ in runs], [count for _, count in runs]
            entry_of = {end - 1: entry for entry, end in enumerate(accumulate(token_counts))}
            finished = {entry_of[token]: reasons for token, reasons in finished.items()}
        finish_reasons: list[FinishReason | None] = [None] * len(sequences)
        stop_reasons: list[int | None] = [None] * len(sequences)
        for entry, (reason, stop_reason) in finished.items():
            finish_reasons[entry], stop_reasons[entry] = reason, stop_reason
        return EngineCoreOutputs(
            keys=[seq.key for seq in sequences],
            indexes=[seq.index for seq in sequences],
            token_counts=token_counts,
            token_ids=[drawn[position] for position in self.positions],
            finish_reasons=finish_reasons,
            stop_reasons=stop_reasons,
            cached_tokens=[seq.num_cached for seq in sequences],
            stats=stats,
            logprobs=logprob_columns.select(result.logprobs, self.positions) if result.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            errors=self.errors,
            pooled=self.pooled,
            created=created,
        )


_NOTHING = EngineCoreOutputs([], [], [], [], [], [], [], EngineStats())


class Outbox:
    """Merges the outputs that one client has not read yet into one message. ``put`` never waits for a slow client.

    Changes of the prefix cache and events are sent with the next message; they do not cause a message themselves.
    Changes are merged, so that a block which was stored and removed is not mentioned.
    """

    def __init__(self) -> None:
        self._held: EngineCoreOutputs | None = None
        self._newest = _NOTHING
        self._changes: dict[bytes, bool] = {}
        self._number: int | None = None  # of the next message about blocks; None while the client does not watch
        self._closed_by: RayLMError | None = None
        self._events: list[SequenceEvent] = []
        self._ready = asyncio.Event()

    def put(self, outputs: EngineCoreOutputs) -> None:
        """Append a message to the unread outputs. The outbox takes over the lists of ``outputs``."""
        self._held = outputs if self._held is None else merge(self._held, outputs)
        self._newest = outputs
        self._ready.set()

    def put_stats(self, outputs: EngineCoreOutputs) -> None:
        """Put a message that has only stats, if the load that they report has changed."""
        last, now = self._newest.stats, outputs.stats
        is_other = (last.running, last.waiting, last.kv_usage) != (now.running, now.waiting, now.kv_usage)
        if is_other or self._changes or last.others != now.others:
            self.put(outputs)

    @property
    def is_watching(self) -> bool:
        return self._number is not None

    @property
    def told_at(self) -> float:
        """When the newest message was created, in seconds since the epoch."""
        return self._newest.created

    def watch(self, hashes: list[bytes]) -> None:
        """Report these blocks as the whole prefix cache with the next message, and changes with later messages."""
        self._number, self._changes = 0, dict.fromkeys(hashes, True)

    def note_blocks(self, changes: dict[bytes, bool]) -> None:
        """Record blocks that were published (True) or withdrawn (False), for a client that watches."""
        for block_hash, found in changes.items():
            note(self._changes, block_hash, found)

    def note_event(self, event: SequenceEvent) -> None:
        self._events.append(event)

    def close(self, error: RayLMError) -> None:
        """Let ``get`` raise ``error`` after the unread outputs are read."""
        self._closed_by = error
        self._ready.set()

    async def get(self) -> EngineCoreOutputs:
        """Wait for outputs, and return everything since the last call. Raises the error given to ``close``."""
        await self._ready.wait()
        held, self._held = self._held, None
        if held is None:
            assert self._closed_by is not None
            raise self._closed_by
        if self._closed_by is None:
            self._ready.clear()
        if self._events:
            held, self._events = replace(held, events=self._events), []
        return held if self._number is None else self._with_blocks(held, self._number)

    def _with_blocks(self, held: EngineCoreOutputs, number: int) -> EngineCoreOutputs:
        changes = self._changes
        if number and not changes:
            return held
        self._number, self._changes = number + 1, {}
        stored = pack_keys(block_hash for block_hash, found in changes.items() if found)
        removed = pack_keys(block_hash for block_hash, found in changes.items() if not found)
        return replace(held, blocks=BlockChanges(number, stored, removed))


_LISTS = [name for name, kind in EngineCoreOutputs.__annotations__.items() if kind.startswith("list")]


def merge(held: EngineCoreOutputs, fresh: EngineCoreOutputs) -> EngineCoreOutputs:
    """Merge two consecutive messages into one. Extends the lists of ``held``."""
    logprobs = logprob_columns.append(held.logprobs, len(held.token_ids), fresh.logprobs, len(fresh.token_ids))
    for name in _LISTS:
        getattr(held, name).extend(getattr(fresh, name))
    adapters = held.adapters if fresh.adapters is None else fresh.adapters
    created = max(held.created, fresh.created)
    draining = held.draining or fresh.draining
    return replace(held, stats=fresh.stats, logprobs=logprobs, adapters=adapters, created=created, draining=draining)
