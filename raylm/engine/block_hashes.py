"""Hashes of KV blocks. Every engine and every ingress replica computes the same hashes for the same prompt."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256
from struct import unpack

from raylm.messages import CacheScope, TokenIds

_HASH_BYTES, _KEY_BYTES, _TOKEN_BYTES = 32, 8, 4


class ChainedHasher:
    """Hashes each block with SHA-256 over the hash of the block before it and its own token ids.

    Equal hashes mean equal prefixes; a client cannot construct a collision. The first block is hashed with a root: the
    digest of the LoRA adapter ("" for the base model) and the cache scope of the request. Token ids are below 2**32.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def root(self, adapter_digest: str, cache_scope: CacheScope) -> bytes:
        return sha256(repr((adapter_digest, cache_scope)).encode()).digest()

    def extend(self, hashes: list[bytes], root: bytes, token_ids: TokenIds, num_blocks: int) -> None:
        """Append to ``hashes`` until it covers the first ``num_blocks`` blocks of ``token_ids``."""
        size, first = self._block_size, len(hashes)
        if num_blocks <= first:
            return
        parent = hashes[-1] if hashes else root
        packed = array("I", token_ids[first * size : num_blocks * size]).tobytes()
        for start in range(0, len(packed), _TOKEN_BYTES * size):
            parent = sha256(parent + packed[start : start + _TOKEN_BYTES * size]).digest()
            hashes.append(parent)


class NoHasher(ChainedHasher):
    """Used when prefix caching is off: blocks get no hash, so a lookup never finds one."""

    def extend(self, hashes: list[bytes], root: bytes, token_ids: TokenIds, num_blocks: int) -> None:
        pass


def pack_keys(hashes: Iterable[bytes]) -> bytes:
    """Concatenate the first 64 bits of each hash.

    64 bits are enough to predict cache hits. The engine itself shares KV blocks by the full hash.
    """
    return b"".join([block_hash[:_KEY_BYTES] for block_hash in hashes])


def keys_of(hashes: list[bytes]) -> list[int]:
    """The same keys as ``unpack_keys(pack_keys(hashes))``, as a list; each hash has 256 bits."""
    words = array("Q", b"".join(hashes))[:: _HASH_BYTES // _KEY_BYTES]
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """The keys packed by ``pack_keys``: one integer of 64 bits for each hash."""
    return unpack(f"<{len(packed) // _KEY_BYTES}Q", packed)
