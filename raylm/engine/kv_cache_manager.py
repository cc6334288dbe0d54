"""KVCacheManager: owns the block table and the block hashes of every sequence. Lookahead: how far to reserve blocks."""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, field

from raylm.engine.block_hashes import ChainedHasher, NoHasher
from raylm.engine.block_pool import BlockPool
from raylm.engine.sequence import Sequence


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence and the hashes of its full blocks, as far as they are computed, with their ``root``.

    ``publish`` skips the first ``num_published`` blocks: they are published already or must not be.
    """

    root: bytes
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0


class KVCacheManager:
    """Allocates KV blocks to sequences and shares the blocks of equal prefixes.

    Workers run steps strictly in order. Within a step, each layer writes the keys and values of all rows before it
    computes attention. Two consequences:

    - A block can be shared as soon as it is scheduled, even in the step that computes it.
    - A freed block can be reused at once, even while a step in flight still writes to it: its next owner writes after
      that step and reads only what it wrote itself.

    Blocks whose content turns out not to be finite are withdrawn. A sequence that shares such a block by then reads
    the same values and fails too, unless the values lie beyond the tokens that it reads.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._hasher = ChainedHasher(block_size) if prefix_caching else NoHasher(block_size)
        self._tables: dict[int, BlockTable] = {}

    @property
    def usage(self) -> float:
        return 1 - self.pool.num_free / self.pool.num_blocks

    def block_ids(self, seq: Sequence) -> list[int]:
        """The block table of a sequence; callers must not change it."""
        return self._tables[seq.id].block_ids

    def held_blocks(self, seq: Sequence, most: int) -> tuple[list[int], int]:
        """(a copy of the first ``most`` entries of the block table, how many entries the table has)."""
        held = self._tables[seq.id].block_ids if seq.id in self._tables else []
        return held[:most], len(held)

    def capacity(self, seq: Sequence) -> int:
        """Number of tokens that the blocks of a sequence can hold."""
        return len(self._tables[seq.id].block_ids) * self.block_size

    def admit(self, seq: Sequence, spare: int, *, use_cache: bool = True) -> int | None:
        """Allocate blocks for all known tokens of a sequence, and reuse the cached blocks of its longest prefix.

        At least one token is left to compute. ``spare`` blocks must stay free. Returns the number of tokens whose KV
        is cached, or None, without side effects, if the pool has too few blocks.
        """
        table, needed = self._table(seq), self._blocks_for(len(seq.token_ids))
        # Sharing a cached block that another sequence holds takes no free block. Held blocks are a prefix of the
        # cached blocks, so looking up one block says whether enough of them are held. Without this check every step
        # would look up all blocks of a long prompt.
        if (held := needed + spare - self.pool.num_free) > 0 and not (use_cache and self._is_held(seq, table, held)):
            return None
        cached = self._find_prefix(seq, table) if use_cache else []
        num_new = needed - len(cached)
        num_idle = sum(self.pool.refs[block] == 0 for block in cached)
        if num_new + num_idle + spare > self.pool.num_free:
            return None
        self.pool.share(cached)
        table.block_ids = cached + self.pool.allocate(num_new)
        table.num_published = len(cached)
        return len(cached) * self.block_size

    def fits(self, seq: Sequence, victim: Sequence, spare: int) -> bool:
        """Whether preempting ``victim`` frees enough blocks for all known tokens of ``seq`` and ``spare`` more."""
        freed = len(self.block_ids(victim)) - self.num_shared_tokens(victim) // self.block_size
        return self._blocks_for(len(seq.token_ids)) + spare <= self.pool.num_free + freed

    def extend(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Extend a block table to hold ``num_tokens`` tokens.

        Returns the appended blocks, or None if the pool has too few.
        """
        table = self._tables[seq.id]
        self.publish(seq, seq.num_computed)  # before the step under construction adds to num_computed
        missing = self._blocks_for(num_tokens) - len(table.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        blocks = self.pool.allocate(missing)
        table.block_ids += blocks
        return blocks

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Publish the full blocks among the first ``num_computed`` tokens, as far as the token ids are known.

        These tokens are computed or scheduled.
        """
        table = self._tables[seq.id]
        num_full = min(num_computed, len(seq.token_ids)) // self.block_size
        if num_full <= table.num_published:
            return
        self._hasher.extend(table.hashes, table.root, seq.token_ids, num_full)
        first, table.num_published = table.num_published, num_full
        for block, block_hash in zip(table.block_ids[first:num_full], table.hashes[first:num_full], strict=False):
            self.pool.publish(block, block_hash)

    def free(self, seq: Sequence) -> None:
        """Release the blocks of a sequence. Computed blocks stay cached; the last blocks are evicted first."""
        self.publish(seq, seq.num_computed)
        self.pool.release(reversed(self._tables.pop(seq.id).block_ids))

    def forget(self, seq: Sequence) -> None:
        """Drop the block table of a sequence that holds no blocks."""
        self._tables.pop(seq.id, None)

    def unpublish(self, seq: Sequence) -> None:
        """Withdraw all blocks with the content of a sequence from the cache. The sequence must hold no blocks."""
        hashes: list[bytes] = []
        self._hasher.extend(hashes, self._root(seq), seq.token_ids, len(seq.token_ids) // self.block_size)
        self.pool.withdraw(block for block in map(self.pool.find, hashes) if block is not None)

    def num_shared_tokens(self, seq: Sequence) -> int:
        """Number of leading tokens whose blocks other sequences hold too."""
        refs = self.pool.refs
        # Shared blocks are a prefix of the table, so bisection finds their end.
        shared = bisect_left(self.block_ids(seq), True, key=lambda block: refs[block] == 1)
        return shared * self.block_size

    def reset(self) -> None:
        """Clear the prefix cache. Running sequences keep their blocks, and these are not published again."""
        self.pool.reset()
        self._tables = {seq_id: table for seq_id, table in self._tables.items() if table.block_ids}
        for table in self._tables.values():
            table.num_published = sys.maxsize

    def check_idle(self) -> None:
        """Assert that no block is held while the engine has no sequence. Takes constant time."""
        assert not self._tables, f"sequences {sorted(self._tables)} are gone and left block tables behind"
        lost = self.pool.num_blocks - self.pool.num_free
        assert lost == 0, f"{lost} KV blocks are held by no sequence"

    def num_cached_blocks(self, seq: Sequence) -> int:
        """Estimate how many blocks of a waiting sequence are cached. Exact if the cached blocks are a prefix."""
        table, find = self._table(seq), self.pool.find
        found, end = 0, 1
        while (known := self._hash_prefix(seq, table, end)) > found and find(table.hashes[known - 1]) is not None:
            found, end = known, 2 * known  # doubling: a short cached prefix costs few hashes
        return bisect_left(table.hashes, True, found, known, key=lambda block_hash: find(block_hash) is None)

    def _table(self, seq: Sequence) -> BlockTable:
        if seq.id not in self._tables:
            self._tables[seq.id] = BlockTable(self._root(seq))
        return self._tables[seq.id]

    def _hash_prefix(self, seq: Sequence, table: BlockTable, most: int = sys.maxsize) -> int:
        """Hash the blocks that may be cached, at most ``most``. Returns the number of these blocks with a hash."""
        most = min(most, (len(seq.token_ids) - 1) // self.block_size)
        self._hasher.extend(table.hashes, table.root, seq.token_ids, most)
        return min(most, len(table.hashes))

    def _is_held(self, seq: Sequence, table: BlockTable, count: int) -> bool:
        """Whether block number ``count`` (from 1) of a sequence is cached and held by another sequence."""
        if count > self._hash_prefix(seq, table):
            return False
        block = self.pool.find(table.hashes[count - 1])
        return block is not None and self.pool.refs[block] > 0

    def _find_prefix(self, seq: Sequence, table: BlockTable) -> list[int]:
        most = self._hash_prefix(seq, table)
        blocks = []
        for block_hash in table.hashes[:most]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _root(self, seq: Sequence) -> bytes:
        return self._hasher.root(seq.state.adapter_digest, seq.state.request.cache_scope)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class Lookahead:
    """Computes how many tokens the block tables of decoding sequences must hold.

    Without drafts a step draws one token, so a sequence needs a new block after every ``reserve_every`` computed
    tokens. With drafts a step draws up to ``drafts`` additional tokens, and their number is known only with the
    result. Until then, blocks are reserved for the longest possible outcome, or for one token more than the table can
    hold if that is fewer: the worker drafts no token without a block for it. If the pool has many free blocks, blocks
    for the drafts of the next step are reserved too.
    """

    def __init__(self, kv: KVCacheManager, drafts: int) -> None:
        self.reserve_every = 1 if drafts else kv.block_size
        self._kv = kv
        self._drafts = drafts

    def tokens_to_reserve(self, seq: Sequence, num_running: int) -> int:
        """Tokens that the block table of ``seq`` should hold in the next step.

        The token at the limit of the sequence is never computed, so it needs no block.
        """
        drafts, kv = self._drafts, self._kv
        if drafts == 0:
            return seq.num_tokens
        abundant = kv.pool.num_free > num_running + drafts // kv.block_size + 1
        longest = min(self._longest(seq), kv.capacity(seq) + 1)
        return min(longest + drafts * abundant, seq.limit - 1)

    def _longest(self, seq: Sequence) -> int:
        """Most tokens that ``seq`` can have in the worker after the steps in flight."""
        return seq.num_tokens + self._drafts * (seq.num_tokens - len(seq.token_ids))
