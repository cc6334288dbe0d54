"""BlockPool: owns the KV blocks' reference counts, their free list in eviction order, and what they are found by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """A fixed number of KV blocks, each free (no reference) or held (one reference per sequence that uses it).

    A free block may still be *published*: found by its hash until it is handed out again. The free list is evicted
    from its head, and a published block is taken out of its middle, in O(1), when it is shared again.

    While it is ``watched`` the pool notes which hashes can be found, or no more, since ``take_changes`` was called.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._changes: dict[bytes, bool] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count <= num_free`` blocks, the longest unused first, with one reference each."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, taking free ones out of the free list."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._free[block]
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; those without any become free, to be evicted in the order given.

        A block that cannot be found again goes to the head of the free list: handing it out costs no cached token.
        """
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let a held block be found by its hash; the first block published under a hash stays."""
        if self._hash_of[block] is None and block_hash not in self._by_hash:
            self._hash_of[block] = block_hash
            self._by_hash[block_hash] = block
            if self._changes is not None:
                note(self._changes, block_hash, True)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Let the blocks not be found any more; sequences keep them."""
        for block in blocks:
            self._forget(block)

    def find(self, block_hash: bytes) -> int | None:
        return self._by_hash.get(block_hash)

    def cached(self) -> list[int]:
        """The free blocks that can be found, in the order in which they would be evicted."""
        return [block for block in self._free if self._hash_of[block] is not None]

    def watch(self) -> list[bytes]:
        """Note changes from now on; returns the hashes that can be found now, with those noted before."""
        if self._changes is None:
            self._changes = {}
        return list(self._by_hash)

    def unwatch(self) -> None:
        self._changes = None

    def take_changes(self) -> dict[bytes, bool]:
        """By hash whether it can be found now, of those that could not be the last time, or the other way round."""
        if not self._changes:
            return {}
        changes, self._changes = self._changes, {}
        return changes

    def reset(self) -> None:
        if self._changes is not None:
            for block_hash in self._by_hash:
                note(self._changes, block_hash, False)
        self._by_hash.clear()
        self._hash_of = [None] * self.num_blocks

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._by_hash[block_hash]
            if self._changes is not None:
                note(self._changes, block_hash, False)


def note(changes: dict[bytes, bool], block_hash: bytes, found: bool) -> None:
    """A hash can be found from now on, or no more: as these take turns, the second of two undoes the first."""
    if changes.pop(block_hash, None) is None:
        changes[block_hash] = found
