"""What must hold of the KV blocks at any time: no block is lost, free twice, or held by no sequence."""

from __future__ import annotations

from collections import Counter

from raylm.engine.block_pool import BlockPool
from raylm.engine.kv_cache_manager import KVCacheManager


def check_pool(pool: BlockPool) -> None:
    """Compare the free list with the reference counts, and the published hashes with one another."""
    free, unheld = set(pool._free), {block for block, refs in enumerate(pool.refs) if refs == 0}
    assert free == unheld, f"blocks neither free nor held, or both: {sorted(free ^ unheld)}"
    published = {block_hash: block for block, block_hash in enumerate(pool._hash_of) if block_hash is not None}
    assert published == pool._by_hash, "a published hash does not lead to its block"
    assert pool.num_cached == len(free & set(published.values())), "free published blocks are counted wrongly"


def check_kv(kv: KVCacheManager) -> None:
    """Free and held blocks make up the pool, and every reference is one of a block table."""
    check_pool(kv.pool)
    held = Counter(block for table in kv._tables.values() for block in table.block_ids)
    refs = {block: count for block, count in enumerate(kv.pool.refs) if count}
    assert refs == held, f"references {refs} are not those of the block tables {dict(held)}"
