"""Lookahead: how many tokens the block tables of decoding sequences must hold, without and with draft tokens."""

from __future__ import annotations

from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.sequence import Sequence


class Lookahead:
    """A step draws one token, so a sequence needs a block whenever it has computed ``reserve_every`` tokens more."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.reserve_every = kv.block_size

    def tokens_to_reserve(self, seq: Sequence, num_running: int) -> int:
        """Tokens that the block table of ``seq`` should hold in the next step."""
        return seq.num_tokens


class DraftLookahead(Lookahead):
    """A step draws up to ``drafts`` tokens more than one; how many is known when its result is.

    Until then blocks are reserved for the most, or for one token more than there are blocks for, as the worker drafts
    no token that it has no block for; where blocks abound, also for the drafts of the next step.
    """

    def __init__(self, kv: KVCacheManager, drafts: int) -> None:
        self.reserve_every = 1
        self._kv = kv
        self._drafts = drafts

    def tokens_to_reserve(self, seq: Sequence, num_running: int) -> int:
        """As above; the token at the limit of a sequence is never computed."""
        drafts, kv = self._drafts, self._kv
        abundant = kv.pool.num_free > num_running + drafts // kv.block_size + 1
        longest = min(self._longest(seq), kv.capacity(seq) + 1)
        return min(longest + drafts * abundant, seq.limit - 1)

    def _longest(self, seq: Sequence) -> int:
        """The most tokens that ``seq`` may have in the worker when the steps in flight have run."""
        return seq.num_tokens + self._drafts * (seq.num_tokens - len(seq.token_ids))


def create_lookahead(kv: KVCacheManager, drafts: int) -> Lookahead:
    return DraftLookahead(kv, drafts) if drafts else Lookahead(kv)
