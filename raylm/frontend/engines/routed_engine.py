"""RoutedEngine: the state of one engine in an ingress, and the predicted cost of a request on it in seconds."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from raylm.engine import unpack_keys
from raylm.errors import RayLMError
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.engines.others_load import OthersLoad
from raylm.frontend.timelines.record import Score
from raylm.messages import BlockChanges, EngineCoreOutputs, EngineCoreRequest, EngineStats

_NEXT_WEIGHT = 1.0  # of a second that delays later requests; cached prefixes elsewhere are not computed again
_DECODE_TOKENS = 8  # prompt tokens that cost about as much as one sequence there until the first token
_LEAN = 0.5  # of its own seconds, for the most distant engine; doubled if requests have no engine to share
_RISK = 2.0  # for each second that an engine may be busy unheard, while a report is new: some requests wait long
_GUESS_STEP_S, _GUESS_TOKEN_S = 0.01, 1e-4  # until an engine has reported its speed
_SERVICE_WEIGHT = 1 / 8  # weight of the newest request in the mean duration


class KnownBlocks:
    """The blocks in an engine's prefix cache: reported blocks, and blocks that open requests are expected to store.

    ``told`` is None before the first report. A block is identified by its key (``raylm.engine.block_hashes``).
    """

    def __init__(self) -> None:
        self.told: set[int] | None = None
        self._number = 0
        self._expected: dict[int, int] = {}  # newest request that will store a block

    def apply(self, changes: BlockChanges) -> bool:
        """Apply a report of changes.

        Returns False if an earlier report is missing and all blocks must be reported again.
        """
        if changes.number == 0:
            self.told = set()
        elif self.told is None:
            return True  # a full report was requested
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
        """Record that a sent request will store ``blocks`` and hold them to its end.

        They count until they are reported.
        """
        told = self.told or ()
        self._expected.update([(block, key) for block in blocks if block not in told])

    def settle(self, key: int, blocks: Iterable[int]) -> None:
        """Forget the expected blocks of a request that ended before the latest report: they may be evicted."""
        for block in blocks:
            if self._expected.get(block) == key:
                del self._expected[block]

    def num_matched(self, blocks: Sequence[int], guess: int = 0) -> int:
        """The number of first blocks of a prompt that the engine has. Engines evict the last blocks of a prompt first.

        The search is shorter if ``guess``, for example another engine's number, is right.
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


@dataclass(slots=True, eq=False)
class Route:
    """A request on its engine, from the choice of the engine to the end of the request there.

    ``uncached_tokens`` are the prompt tokens to compute there; they count until its first token. ``blocks`` are the
    blocks that the engine will then have. ``scores`` are the scores of all compared engines; empty if there was no
    choice. ``since`` is the time at which the request was sent. It ``continues`` if it was sent with drawn tokens.
    """

    engine: RoutedEngine
    sequences: int
    uncached_tokens: int
    blocks: Sequence[int] = ()
    scores: tuple[Score, ...] = ()
    since: float = 0.0
    continues: bool = False


@dataclass(slots=True, eq=False)
class RoutedPrompt(ABC):
    """What Router and Recovery know of one prompt.

    The Router writes ``route``, the choice of the engine that serves the prompt, None while it waits for one. Recovery
    writes ``crashes``, the engines in a row that crashed while they ran the prompt, and for a waiting prompt
    ``fingerprint``, of the engines that can continue it ("" means all), and ``timer``. A prompt is ``finished`` when
    all its sequences have ended, or with an error.
    """

    request: EngineCoreRequest
    route: Route | None = field(default=None, init=False)
    crashes: int = field(default=0, init=False)
    fingerprint: str = field(default="", init=False)
    timer: asyncio.TimerHandle | None = field(default=None, init=False)
    finished: bool = field(default=False, init=False)

    @abstractmethod
    def on_sent(self, route: Route) -> None:
        """Note that the prompt was sent to an engine, the first time or after an engine was lost."""

    @abstractmethod
    def resumed(self) -> EngineCoreRequest:
        """The request in the form in which another engine continues it."""

    @abstractmethod
    def fail(self, error: RayLMError) -> None:
        """End the prompt with an error. Does nothing if it is finished."""


@dataclass(slots=True, eq=False)
class RoutedEngine:
    """One ready engine: its client, this process's open requests on it, and reports about other load.

    ``starting`` are the open requests without a token, with ``queued_tokens`` to compute. ``service_s`` is the mean
    duration of a request. ``ended`` has (time, key, blocks) of served requests; their blocks count until a later report
    arrives. ``distance``, 0 to 1, makes ingresses prefer different engines where they share them, because even new
    reports do not include requests that others are sending now.
    """

    client: EngineClient
    open: dict[int, Route] = field(default_factory=dict)
    starting: dict[int, Route] = field(default_factory=dict)
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
        """Request the engine's reports about blocks, once."""
        if not self.is_watched:
            self.is_watched = True
            self.client.watch_blocks()

    def begin(self, key: int, route: Route) -> None:
        self.open[key] = self.starting[key] = route
        self.sequences += route.sequences
        self.queued_tokens += route.uncached_tokens
        self.blocks.expect(key, route.blocks)

    def end(self, key: int, now: float | None) -> None:
        """Remove a request. ``now`` is its end if it was served completely, else None."""
        self._start(key)
        route = self.open.pop(key)
        self.sequences -= route.sequences
        if now is None:
            self.blocks.settle(key, route.blocks)
        else:
            if route.blocks:
                self.ended.append((now, key, route.blocks))
            self.service_s += _SERVICE_WEIGHT * (now - route.since - self.service_s)

    def on_outputs(self, outputs: EngineCoreOutputs, now: float) -> None:
        """Update the state from a message of the engine."""
        if outputs.keys:
            stats, is_heard = self.stats, len(self.open) > len(self.starting)  # a request of this process is decoded
            self.others.hear(now, is_heard, stats.step_s + stats.token_s * stats.running)
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
        self, tokens: int, step_s: float, token_s: float, now: float, meeting: float = 0.0, is_named: bool = False
    ) -> float:
        """Predict the cost of a request: seconds to its first token, and seconds that it delays other requests.

        ``tokens`` is the number of prompt tokens to compute. A step of one token takes ``step_s``, each prompt token
        ``token_s``. If reports are old, the share ``meeting`` of requests is likely to be on the engine
        that ``is_named`` by RendezvousHash, and the preference for different engines is reduced by as much.
        """
        there: float = self.sequences
        stats, wait_s = self.stats, step_s + self.queued_tokens * token_s
        own_s, others = tokens * token_s, self.others
        doubt = others.doubt(now, self.service_s)
        apart = 1.0 - meeting * doubt
        if others.exist:
            wait_s += others.told_s(now, token_s) + _LEAN * (1.0 + apart) * self.distance * own_s
            if self.open and not self.starting:
                wait_s += others.heard_s(now, step_s + token_s * stats.running)
            else:
                wait_s += (1.0 + _RISK * apart * (1.0 - doubt)) * others.unheard_s(doubt, token_s)
            there += others.sequences(now, self.service_s)
        if not is_named:
            wait_s += (1.0 - apart) * own_s
        return wait_s + (1.0 + _NEXT_WEIGHT) * own_s + _DECODE_TOKENS * token_s * there

    def _start(self, key: int) -> None:
        if (route := self.starting.pop(key, None)) is not None:
            self.queued_tokens -= route.uncached_tokens


def speeds(engines: list[RoutedEngine]) -> list[tuple[float, float]]:
    """(step_s, token_s) of each engine as measured in its steps. Unknown values are the low median of the known."""
    found = [(engine.stats.step_s, engine.stats.token_s) for engine in engines]
    if all(step_s and token_s for step_s, token_s in found):
        return found
    usual_step_s = median_low([step_s for step_s, _ in found if step_s] or [_GUESS_STEP_S])
    usual_token_s = median_low([token_s for _, token_s in found if token_s] or [_GUESS_TOKEN_S])
    return [(step_s or usual_step_s, token_s or usual_token_s) for step_s, token_s in found]
