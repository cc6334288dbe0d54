"""Invariants of the KV blocks: no block is lost, free twice, or has a reference without a block table."""

from __future__ import annotations

from collections import Counter

from raylm.engine.block_pool import BlockPool
from raylm.engine.kv_cache_manager import KVCacheManager


def check_pool(pool: BlockPool) -> None:
    """Compare the free list with the reference counts, and the published hashes with their index."""
    free, unheld = set(pool._free), {block for block, refs in enumerate(pool.refs) if refs == 0}
    assert free == unheld, f"blocks neither free nor held, or both: {sorted(free ^ unheld)}"
    published = {block_hash: block for block, block_hash in enumerate(pool._hash_of) if block_hash is not None}
    assert published == pool._by_hash, "the index and the published hashes differ"
    assert pool.num_cached == len(free & set(published.values())), "the number of free published blocks is wrong"


def check_kv(kv: KVCacheManager) -> None:
    """Check the pool, and that every reference belongs to a block table."""
    check_pool(kv.pool)
    held = Counter(block for table in kv._tables.values() for block in table.block_ids)
    refs = {block: count for block, count in enumerate(kv.pool.refs) if count}
    assert refs == held, f"references {refs} are not those of the block tables {dict(held)}"
