"""RoutedEngine: what an ingress knows of one engine, and the seconds that a request would cost there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from raylm.engine import ChainedHasher, keys_of, unpack_keys
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.engines.others_load import OthersLoad
from raylm.messages import BlockChanges, EngineCoreOutputs, EngineCoreRequest, EngineStats

_DELAY_WEIGHT = 1 / 16  # of a second by which a sequence there is delayed, against one of this request's own
_NEXT_WEIGHT = 1.0  # of a second by which whoever comes next is delayed: what is cached elsewhere is not computed again
_DECODE_TOKENS = 8  # prompt tokens that cost a step about as much as a sequence there will, until the first token
_LEAN = 0.5  # of its own seconds, for the engine that this ingress prefers least; twice that where none are to meet
_RISK = 2.0  # seconds for each that an engine is expected to be busy unheard: some wait not at all, others for long
_GUESS_STEP_S, _GUESS_TOKEN_S = 0.01, 1e-4  # before any engine knows its speed
_SERVICE_WEIGHT = 1 / 8  # of the newest request in the mean of what requests take


class PromptBlocks:
    """The keys of a prompt's whole blocks, hashed once for all engines that know them by the same."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.length, self.adapter = len(request.prompt_token_ids), request.adapter
        self.request = request
        self._known: dict[tuple[int, str], list[int]] = {}

    def of(self, block_size: int, adapter_digest: str) -> list[int]:
        found = self._known.get((block_size, adapter_digest))
        if found is None:
            request, hasher = self.request, ChainedHasher(block_size)
            hashes: list[bytes] = []
            num_blocks = len(request.prompt_token_ids) // block_size
            root = hasher.root(adapter_digest, request.cache_scope)
            hasher.extend(hashes, root, request.prompt_token_ids, num_blocks)
            found = self._known[block_size, adapter_digest] = keys_of(hashes)
        return found


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
        """A request was over when what is told was so: what it stored and is not told of may be gone."""
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

    ``starting`` are the open requests without a first token, with ``queued_tokens`` to compute. A request takes about
    ``service_s``. What served requests stored, with the time at which they ``ended``, counts until it must have been
    told. The farther (0 to 1) the engine is from this process, the less it is preferred where others use it: even fresh
    news say nothing of what they send to it at this moment.
    """

    client: EngineClient
    open: dict[int, OpenRequest] = field(default_factory=dict)
    starting: dict[int, OpenRequest] = field(default_factory=dict)
    blocks: KnownBlocks = field(default_factory=KnownBlocks)
    stats: EngineStats = field(default_factory=EngineStats)
    others: OthersLoad = field(default_factory=OthersLoad)
    distance: float = 0.0
    service_s: float = 1.0
    sequences: int = 0
    queued_tokens: int = 0
    ended: deque[tuple[float, int, Sequence[int]]] = field(default_factory=deque)
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
        self.sequences -= request.sequences
        if now is None:
            self.blocks.settle(key, request.blocks)
        else:
            self.ended.append((now, key, request.blocks))
            self.service_s += _SERVICE_WEIGHT * (now - request.since - self.service_s)

    def on_outputs(self, outputs: EngineCoreOutputs, now: float) -> None:
        """Take in what a message tells of the engine."""
        if outputs.keys:
            self.others.hear(now, self._is_heard, self._decode_s(self.stats.step_s, self.stats.token_s))
        self.stats = outputs.stats
        self.others.tell(outputs.stats.others, outputs.created)
        if outputs.blocks is not None and not self.blocks.apply(outputs.blocks):
            self.client.watch_blocks()
        while self.ended and self.ended[0][0] <= outputs.created:
            self.blocks.settle(*self.ended.popleft()[1:])
        if self.starting:
            for key in self.starting.keys() & outputs.keys:
                self._start(key)

    def predicted_s(
        self, tokens: float, step_s: float, token_s: float, now: float, meeting: float = 0.0, is_named: bool = False
    ) -> float:
        """Seconds to the first token of a request that pays for so many tokens, and what it takes from the others.

        A step of one token takes ``step_s``, a prompt ``token_s`` a token. Where news are old, the share ``meeting`` of
        them is likely to be on the engine ``is_named`` for all (Rendezvous), and as much less do ingresses keep apart.
        """
        there: float = self.sequences
        stats, wait_s = self.stats, step_s + self.queued_tokens * token_s
        own_s, others = tokens * token_s, self.others
        doubt = others.doubt(now, self.service_s)
        apart = 1.0 - meeting * doubt
        if others.exist:
            wait_s += others.told_s(now, token_s) + _LEAN * (1.0 + apart) * self.distance * own_s
            if self._is_heard and not self.starting:
                wait_s += others.heard_s(now, self._decode_s(step_s, token_s))
            else:
                wait_s += (1.0 + _RISK * apart) * others.unheard_s(doubt, token_s)
            there += others.sequences(now, self.service_s)
        if not is_named:
            wait_s += (1.0 - apart) * own_s
        most = stats.running + stats.places
        if 0 < most < there:
            wait_s += (there - most) * self.service_s / most
            there = most
        delay_s = own_s * (_NEXT_WEIGHT + _DELAY_WEIGHT * there)
        return wait_s + own_s + delay_s + _DECODE_TOKENS * token_s * there

    def doubt(self, now: float) -> float:
        """0 to 1: how little news of the engine say of what others do there; 0 where there are none."""
        return self.others.doubt(now, self.service_s) if self.others.exist else 0.0

    @property
    def _is_heard(self) -> bool:
        """Whether a request of this process draws tokens there."""
        return len(self.open) > len(self.starting)

    def _decode_s(self, step_s: float, token_s: float) -> float:
        return step_s + token_s * self.stats.running

    def _start(self, key: int) -> None:
        if (request := self.starting.pop(key, None)) is not None:
            self.queued_tokens -= request.uncached_tokens


def speeds(engines: list[RoutedEngine]) -> list[tuple[float, float]]:
    """(step_s, token_s) of each engine as learned from its steps; where it is not known, what is usual elsewhere."""
    found = [(engine.stats.step_s, engine.stats.token_s) for engine in engines]
    if all(step_s and token_s for step_s, token_s in found):
        return found
    usual_step_s = median_low([step_s for step_s, _ in found if step_s] or [_GUESS_STEP_S])
    usual_token_s = median_low([token_s for _, token_s in found if token_s] or [_GUESS_TOKEN_S])
    return [(step_s or usual_step_s, token_s or usual_token_s) for step_s, token_s in found]
