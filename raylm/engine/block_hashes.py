"""What the blocks of a prompt are known by: the same on every engine and every ingress, so that they can be told."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256
from struct import unpack

from raylm.messages import CacheScope, TokenIds

_HASH_BYTES, _KEY_BYTES, _TOKEN_BYTES = 32, 8, 4


class ChainedHasher:
    """SHA-256 over (parent's hash, tokens): equal hashes mean equal prefixes, and none can be forged.

    The chain begins with what else the content depends on: the digest of the LoRA adapter ("" for the base model) and
    the request's cache scope. Token ids are below 2**32.
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
    """Prefix caching off: no block has a hash, so none is ever found."""

    def extend(self, hashes: list[bytes], root: bytes, token_ids: TokenIds, num_blocks: int) -> None:
        pass


def pack_keys(hashes: Iterable[bytes]) -> bytes:
    """The first 64 bits of each hash, one behind the other: enough to predict by, while KV is shared by whole ones."""
    return b"".join([block_hash[:_KEY_BYTES] for block_hash in hashes])


def keys_of(hashes: list[bytes]) -> list[int]:
    """What ``unpack_keys`` makes of the packed keys of ``hashes``, which have 256 bits each."""
    words = array("Q", b"".join(hashes))[:: _HASH_BYTES // _KEY_BYTES]
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """The keys that ``pack_keys`` made, one for each hash."""
    return unpack(f"<{len(packed) // _KEY_BYTES}Q", packed)
