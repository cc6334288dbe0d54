"""BlockPool: owns the reference counts of the KV blocks, the free list in eviction order, and the index by hash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice


class BlockPool:
    """A fixed number of KV blocks, each free (no reference) or held (one reference per sequence that uses it).

    A block is *published* while it can be found by its hash. A free block stays published until it is allocated again.
    Blocks are evicted from the head of the free list. Sharing a free published block removes it from the list in O(1).

    After ``watch``, the pool records which hashes were published or withdrawn since the last ``take_changes``.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self.num_cached = 0  # blocks that are free and published
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._changes: dict[bytes, bool] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` (at most ``num_free``) blocks from the free list, least recently used first.

        Each block gets one reference.
        """
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block. Free blocks leave the free list."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._free[block]
                self.num_cached -= self._hash_of[block] is not None
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block. Blocks without a reference become free, to be evicted in the given order.

        An unpublished block goes to the head of the free list, because evicting it loses no cached token.
        """
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self.num_cached += 1

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make a held block findable by its hash. If the hash is published already, the earlier block keeps it."""
        if self._hash_of[block] is None and block_hash not in self._by_hash:
            self._hash_of[block] = block_hash
            self._by_hash[block_hash] = block
            if self._changes is not None:
                note(self._changes, block_hash, True)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Unpublish the blocks. Sequences that hold them keep them."""
        for block in blocks:
            self._forget(block)

    def find(self, block_hash: bytes) -> int | None:
        return self._by_hash.get(block_hash)

    def cached(self, most: int) -> list[int]:
        """The free blocks that are published, in eviction order. Looks only at the ``most`` that are evicted last."""
        found = [block for block in islice(reversed(self._free), most) if self._hash_of[block] is not None]
        found.reverse()
        return found

    def watch(self) -> list[bytes]:
        """Record changes from now on. Returns all hashes that are published now."""
        if self._changes is None:
            self._changes = {}
        return list(self._by_hash)

    def unwatch(self) -> None:
        self._changes = None

    def take_changes(self) -> dict[bytes, bool]:
        """The changes since the last call: True for each hash that was published, False for each withdrawn hash.

        A hash that was published and withdrawn in between is not among them.
        """
        if not self._changes:
            return {}
        changes, self._changes = self._changes, {}
        return changes

    def reset(self) -> None:
        if self._changes is not None:
            for block_hash in self._by_hash:
                note(self._changes, block_hash, False)
        self._by_hash.clear()
        self.num_cached = 0
        self._hash_of = [None] * self.num_blocks

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._by_hash[block_hash]
            self.num_cached -= self.refs[block] == 0
            if self._changes is not None:
                note(self._changes, block_hash, False)


def note(changes: dict[bytes, bool], block_hash: bytes, found: bool) -> None:
    """Record in ``changes`` that a hash was published (True) or withdrawn (False).

    The two alternate for a hash, so a second change cancels the one recorded before it.
    """
    if changes.pop(block_hash, None) is None:
        changes[block_hash] = found
