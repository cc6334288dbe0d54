"""``take_snapshot``: what an engine holds now, for operators."""

from __future__ import annotations

from collections.abc import Iterable

from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.sequence import Sequence
from raylm.messages import EngineSnapshot, EngineStats

MOST_LISTED = 2**16  # blocks, which take a few milliseconds


def take_snapshot(stats: EngineStats, sequences: Iterable[Sequence], kv: KVCacheManager) -> EngineSnapshot:
    """The open sequences and the blocks held now. Lists at most MOST_LISTED blocks: meanwhile no step begins."""
    listed, room, left_out = list(sequences), MOST_LISTED, 0
    block_ids: list[list[int]] = []
    for seq in listed:
        shown, count = kv.held_blocks(seq, room)
        block_ids.append(shown)
        room, left_out = room - len(shown), left_out + count - len(shown)
    cached = kv.pool.cached(room)
    return EngineSnapshot(
        stats=stats,
        num_blocks=kv.pool.num_blocks,
        block_size=kv.block_size,
        request_ids=[seq.state.request.request_id for seq in listed],
        indexes=[seq.index for seq in listed],
        statuses=[seq.status.value for seq in listed],
        num_tokens=[len(seq.token_ids) for seq in listed],
        num_computed=[seq.num_computed for seq in listed],
        block_ids=block_ids,
        cached=cached,
        left_out=left_out + kv.pool.num_cached - len(cached),
    )
