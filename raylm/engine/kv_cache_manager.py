"""KVCacheManager: owns the block table and the block hashes of every sequence; Lookahead: how far tables reach."""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, field

from raylm.engine.block_hashes import ChainedHasher, NoHasher
from raylm.engine.block_pool import BlockPool
from raylm.engine.sequence import Sequence


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, the hashes of its full ones as far as known, with their ``root``.

    The first ``num_published`` blocks need not be published, or must not be.
    """

    root: bytes
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0


class KVCacheManager:
    """Gives sequences their KV blocks, and lets equal prompt beginnings share them.

    Workers run steps strictly in order, and in a step each layer writes the keys and values of all rows before it
    attends. Therefore a block may be shared as soon as it is scheduled, even in the step that computes it, and a block
    given up while a step in flight still writes to it may be handed out at once: its next owner writes later than that
    step, and reads only what it wrote itself. What turns out not to be finite is withdrawn; who shares it by then
    attends to the same numbers, and fails with it unless they are beyond what it reads.
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
        """Not to be changed."""
        return self._tables[seq.id].block_ids

    def held_blocks(self, seq: Sequence) -> list[int]:
        """A copy; empty where it has none."""
        return list(self._tables[seq.id].block_ids) if seq.id in self._tables else []

    def capacity(self, seq: Sequence) -> int:
        """In tokens."""
        return len(self._tables[seq.id].block_ids) * self.block_size

    def admit(self, seq: Sequence, spare: int, *, use_cache: bool = True) -> int | None:
        """Give a sequence blocks for all of its known tokens, cached ones for the longest published beginning.

        At least one token is left to compute. ``spare`` blocks must stay free. Returns the number of tokens whose KV
        is there already; None, without side effects, if the pool cannot give that much.
        """
        table, needed = self._table(seq), self._blocks_for(len(seq.token_ids))
        # Cached blocks that others hold are had for nothing. They are the first ones of a prefix, so that one look
        # tells whether there can be enough of them; else a long prompt would be walked through in every step.
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
        """Whether there would be blocks for all known tokens of a sequence, and ``spare``, without a victim's own."""
        freed = len(self.block_ids(victim)) - self.num_shared_tokens(victim) // self.block_size
        return self._blocks_for(len(seq.token_ids)) + spare <= self.pool.num_free + freed

    def extend(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Let a block table hold ``num_tokens`` tokens; returns the blocks appended, None if the pool has too few."""
        table = self._tables[seq.id]
        self.publish(seq, seq.num_computed)  # the sequence is not in the step yet
        missing = self._blocks_for(num_tokens) - len(table.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        blocks = self.pool.allocate(missing)
        table.block_ids += blocks
        return blocks

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Let the full blocks among the first ``num_computed`` tokens be found, as far as those tokens are known.

        They are computed, or scheduled.
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
        """Give the blocks of a sequence up, its last ones to be evicted first; what it computed stays findable."""
        self.publish(seq, seq.num_computed)
        self.pool.release(reversed(self._tables.pop(seq.id).block_ids))

    def forget(self, seq: Sequence) -> None:
        """Of a sequence that holds no blocks."""
        self._tables.pop(seq.id, None)

    def unpublish(self, seq: Sequence) -> None:
        """Of a sequence that gave its blocks up."""
        hashes: list[bytes] = []
        self._hasher.extend(hashes, self._root(seq), seq.token_ids, len(seq.token_ids) // self.block_size)
        self.pool.withdraw(block for block in map(self.pool.find, hashes) if block is not None)

    def num_shared_tokens(self, seq: Sequence) -> int:
        """Tokens at the beginning of a sequence that would stay in the pool if it gave its blocks up."""
        refs = self.pool.refs
        # A prefix is shared from its beginning on: bisection finds the end of the shared blocks.
        shared = bisect_left(self.block_ids(seq), True, key=lambda block: refs[block] == 1)
        return shared * self.block_size

    def reset(self) -> None:
        """Forget all cached content; sequences that run keep their blocks, and are not found by later ones."""
        self.pool.reset()
        self._tables = {seq_id: table for seq_id, table in self._tables.items() if table.block_ids}
        for table in self._tables.values():
            table.num_published = sys.maxsize

    def check_idle(self) -> None:
        """Assert that with no sequence in the engine nothing is held; costs nothing."""
        assert not self._tables, f"sequences {sorted(self._tables)} are gone and left block tables behind"
        lost = self.pool.num_blocks - self.pool.num_free
        assert lost == 0, f"{lost} KV blocks are held by no sequence"

    def num_cached_blocks(self, seq: Sequence) -> int:
        """About how many blocks of a sequence that waits are cached: right if those found are its first ones."""
        table, find = self._table(seq), self.pool.find
        found, end = 0, 1
        while (known := self._hash_prefix(seq, table, end)) > found and find(table.hashes[known - 1]) is not None:
            found, end = known, 2 * known  # of a prompt of which little is cached little is hashed
        return bisect_left(table.hashes, True, found, known, key=lambda block_hash: find(block_hash) is None)

    def _table(self, seq: Sequence) -> BlockTable:
        if seq.id not in self._tables:
            self._tables[seq.id] = BlockTable(self._root(seq))
        return self._tables[seq.id]

    def _hash_prefix(self, seq: Sequence, table: BlockTable, most: int = sys.maxsize) -> int:
        """Work the hashes out of the blocks that may be cached, at most so many; returns their number."""
        most = min(most, (len(seq.token_ids) - 1) // self.block_size)
        self._hasher.extend(table.hashes, table.root, seq.token_ids, most)
        return min(most, len(table.hashes))

    def _is_held(self, seq: Sequence, table: BlockTable, count: int) -> bool:
        """Whether the block number ``count`` of a sequence is cached, and held by another one."""
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
    """How many tokens the block tables of decoding sequences must hold.

    A step draws one token, so a sequence needs a block whenever it has computed ``reserve_every`` tokens more. With
    drafts it draws up to ``drafts`` more than one, and how many is known when its result is. Until then blocks are
    reserved for the most, or for one token more than there are blocks for, as the worker drafts no token that it has
    no block for; where blocks abound, also for the drafts of the next step.
    """

    def __init__(self, kv: KVCacheManager, drafts: int) -> None:
        self.reserve_every = 1 if drafts else kv.block_size
        self._kv = kv
        self._drafts = drafts

    def tokens_to_reserve(self, seq: Sequence, num_running: int) -> int:
        """Tokens that the block table of ``seq`` should hold in the next step; the one at its limit is not computed."""
        drafts, kv = self._drafts, self._kv
        if drafts == 0:
            return seq.num_tokens
        abundant = kv.pool.num_free > num_running + drafts // kv.block_size + 1
        longest = min(self._longest(seq), kv.capacity(seq) + 1)
        return min(longest + drafts * abundant, seq.limit - 1)

    def _longest(self, seq: Sequence) -> int:
        """The most tokens that ``seq`` may have in the worker when the steps in flight have run."""
        return seq.num_tokens + self._drafts * (seq.num_tokens - len(seq.token_ids))
