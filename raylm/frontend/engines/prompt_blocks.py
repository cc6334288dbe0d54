"""PromptBlocks: the keys of a prompt's KV blocks. KeptRuns: keys of earlier prompts, for the prompts that go on."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import sha256

from raylm.engine import ChainedHasher, keys_of
from raylm.messages import EngineCoreRequest, TokenIds

RUN = 64
"""Blocks of a run."""
MAX_RUNS = 8_192
"""Limit of the kept runs: 8 million tokens in blocks of 16, and about 8 MiB."""


class KeptRuns:
    """Keeps the keys of runs of RUN blocks, which are found by one digest over all tokens from the first.

    A block's key needs a call of SHA-256 for each block; a run that was kept needs one. Runs are kept for one tenant.
    The runs used longest ago are dropped first.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[array[int], bytes]] = OrderedDict()

    def keys(self, token_ids: TokenIds, block_size: int, root: bytes, tenant: str) -> list[int]:
        """The keys of all whole blocks of a prompt whose first block is hashed with ``root``."""
        hasher, keys, parent = ChainedHasher(block_size), list[int](), root
        tokens, size = array("I", token_ids), block_size * RUN
        place = sha256(repr((tenant, block_size, root)).encode()).digest()
        for start in range(0, len(tokens) - size + 1, size):
            run = tokens[start : start + size]
            place = sha256(place + run.tobytes()).digest()
            found = self._kept.get(place)
            if found is None:
                hashes: list[bytes] = []
                hasher.extend(hashes, parent, run, RUN)
                found = array("Q", keys_of(hashes)), hashes[-1]
            self._keep(place, found)
            keys += found[0]
            parent = found[1]
        rest: list[bytes] = []
        last = tokens[len(keys) * block_size :]
        hasher.extend(rest, parent, last, len(last) // block_size)
        return keys + keys_of(rest)

    def _keep(self, place: bytes, run: tuple[array[int], bytes]) -> None:
        self._kept[place] = run
        self._kept.move_to_end(place)
        if len(self._kept) > MAX_RUNS:
            self._kept.popitem(last=False)


class PromptBlocks:
    """The keys of a prompt's whole blocks, computed once for all engines with the same block size and adapter."""

    def __init__(self, request: EngineCoreRequest, kept: KeptRuns) -> None:
        self.length, self.adapter = len(request.prompt_token_ids), request.adapter
        self.request = request
        self._kept = kept
        self._known: dict[tuple[int, str], list[int]] = {}

    def of(self, block_size: int, adapter_digest: str) -> list[int]:
        found = self._known.get((block_size, adapter_digest))
        if found is None:
            request = self.request
            root = ChainedHasher(block_size).root(adapter_digest, request.cache_scope)
            found = self._kept.keys(request.prompt_token_ids, block_size, root, request.service.tenant)
            self._known[block_size, adapter_digest] = found
        return found
