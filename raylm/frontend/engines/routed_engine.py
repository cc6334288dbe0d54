"""RoutedEngine: what an ingress knows of one engine, and the seconds that a request would cost there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raylm.engine import unpack_keys
from raylm.frontend.engines.engine_client import EngineClient
from raylm.messages import BlockChanges, EngineCoreOutputs, EngineStats

_DELAY_WEIGHT = 1 / 16  # of a second by which a sequence there is delayed, against one of this request's own
_NEXT_WEIGHT = 1.0  # of a second by which whoever comes next is delayed: what is cached elsewhere is not computed again
_DECODE_TOKENS = 8  # prompt tokens that cost a step about as much as a sequence there will, until the first token
_SERVICE_WEIGHT = 1 / 8  # of the newest request in the mean of what requests take


class KnownBlocks:
    """Which blocks an engine's prefix cache holds: those it told of, and those that open requests store unseen.

    ``told`` is None while nothing is known. A block is known by its key (``raylm.engine.block_hashes``).
    """

    def __init__(self) -> None:
        self.told: set[int] | None = None
        self._number = 0
        self._expected: dict[int, int] = {}  # by block the newest request that will store it

    def apply(self, changes: BlockChanges) -> bool:
        """Take in what the engine tells; False if something before it is missing, so that all must be told anew."""
        if changes.number == 0:
            self.told = set()
        elif self.told is None:
            return True  # all has been asked for
        elif changes.number != self._number:
            self.told = None
            return False
        self._number = changes.number + 1
        stored = unpack_keys(changes.stored)
        self.told.update(stored)
        if self._expected:
            for block in stored:
                self._expected.pop(block, None)
        self.told.difference_update(unpack_keys(changes.removed))
        return True

    def expect(self, key: int, blocks: Sequence[int]) -> None:
        """A request was sent that will store these, and holds them until its end; they count until they are told."""
        told = self.told or ()
        self._expected.update([(block, key) for block in blocks if block not in told])

    def settle(self, key: int, blocks: Iterable[int]) -> None:
        """A request is over: what it stored and is not told by now may be gone."""
        for block in blocks:
            if self._expected.get(block) == key:
                del self._expected[block]

    def num_matched(self, blocks: Sequence[int], guess: int = 0) -> int:
        """How many blocks at the beginning of a prompt are held; engines give up the last ones of a prompt first.

        A right ``guess``, such as what another engine has, spares the search.
        """
        told, expected = self.told, self._expected
        if told is None:
            return 0
        low, high, middle = 0, len(blocks), min(guess, len(blocks) - 1)
        while low < high:
            if (block := blocks[middle]) in told or block in expected:
                low = middle + 1
            else:
                high = middle
                if middle and low < middle and ((block := blocks[middle - 1]) in told or block in expected):
                    return middle
            middle = (low + high) // 2
        return low


@dataclass(slots=True)
class OpenRequest:
    """A request of this process on its engine; ``uncached_tokens`` count until its first token."""

    sequences: int
    uncached_tokens: int
    blocks: Sequence[int]
    since: float


@dataclass(slots=True, eq=False)
class RoutedEngine:
    """One ready engine: its client, this process's open requests on it, and what it told of the rest.

    ``starting`` are the open requests without a first token, with ``queued_tokens`` to compute. The ``stats`` were
    so ``told_at``, in seconds since the epoch. A request takes about ``service_s``.
    """

    client: EngineClient
    open: dict[int, OpenRequest] = field(default_factory=dict)
    starting: dict[int, OpenRequest] = field(default_factory=dict)
    blocks: KnownBlocks = field(default_factory=KnownBlocks)
    stats: EngineStats = field(default_factory=EngineStats)
    told_at: float = 0.0
    service_s: float = 1.0
    sequences: int = 0
    queued_tokens: int = 0
    is_watched: bool = False
    reader: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Ask for the engine's blocks, once."""
        if not self.is_watched:
            self.is_watched = True
            self.client.watch_blocks()

    def begin(self, key: int, request: OpenRequest) -> None:
        self.open[key] = self.starting[key] = request
        self.sequences += request.sequences
        self.queued_tokens += request.uncached_tokens
        self.blocks.expect(key, request.blocks)

    def end(self, key: int, now: float | None) -> None:
        """A request is over, at ``now`` if it was served to its end."""
        self._start(key)
        request = self.open.pop(key)
        self.blocks.settle(key, request.blocks)
        self.sequences -= request.sequences
        if now is not None:
            self.service_s += _SERVICE_WEIGHT * (now - request.since - self.service_s)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take in what a message tells of the engine."""
        self.stats, self.told_at = outputs.stats, outputs.created
        if outputs.blocks is not None and not self.blocks.apply(outputs.blocks):
            self.client.watch_blocks()
        if self.starting:
            for key in self.starting.keys() & outputs.keys:
                self._start(key)

    def predicted_s(self, uncached_tokens: int, step_s: float, token_s: float, now: float) -> float:
        """Seconds to the first token of a request with so many tokens to compute, and what it takes from the others.

        A step of one token takes ``step_s`` here, and a prompt ``token_s`` for each token.

        What other clients have queued is taken as served since it was told; so nothing is left of it after the time
        that it takes to serve, nor of their sequences after that of a request.
        """
        there: float = self.sequences
        stats, wait_s = self.stats, step_s + self.queued_tokens * token_s
        others = stats.others
        if others.sequences:
            age = max(0.0, now - self.told_at)
            wait_s += max(0.0, others.queued_tokens * token_s - age)
            there += others.sequences * (max(0.0, 1.0 - age / self.service_s) if self.service_s > 0 else 0.0)
        most = stats.running + stats.places
        if 0 < most < there:
            wait_s += (there - most) * self.service_s / most
            there = most
        own_s = uncached_tokens * token_s
        delay_s = own_s * (_NEXT_WEIGHT + _DELAY_WEIGHT * there)
        return wait_s + own_s + delay_s + _DECODE_TOKENS * token_s * there

    def _start(self, key: int) -> None:
        if (request := self.starting.pop(key, None)) is not None:
            self.queued_tokens -= request.uncached_tokens
