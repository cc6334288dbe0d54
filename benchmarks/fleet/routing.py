"""RayLM's Router before a toy fleet under a virtual clock: TTFT of five loads, beside simpler policies.

    python -m benchmarks.fleet.routing --loads hot unique chat agents burst --ingresses 2 --stale 0.1

An engine batches continuously: a step takes 6 ms, 0.06 ms for each prompt token and 0.12 ms for each sequence that
decodes, and its prefix cache holds 4,000 blocks of 64 tokens, found by others as soon as they are scheduled. An ingress
knows its own requests at once, and blocks and the requests of others as they were ``--stale`` seconds ago. Orderings
count, not milliseconds. ``--slow 3`` makes the first engine three times as slow.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count

import numpy as np

from benchmarks.fleet.loads import Load, Turn
from benchmarks.rows import Report, parser
from raylm.engine.block_hashes import ChainedHasher, pack_keys
from raylm.errors import EngineDiedError
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.engines.router import Route, RoutedEngine, Router
from raylm.messages import (
    BlockChanges,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    EngineStats,
    LoRAAdapter,
    OtherClients,
    WorkerInfo,
)
from raylm.params import SamplingParams

BLOCK, CACHED_BLOCKS, STEP_TOKENS, SEATS = 64, 4000, 2048, 64
STEP_S, TOKEN_S, DECODE_S = 0.006, 0.00006, 0.00012


class ToyClient(EngineClient):
    """A line on which nothing is said: the simulation gives messages to the RoutedEngine itself."""

    def __init__(self, name: str) -> None:
        worker = WorkerInfo(CACHED_BLOCKS, BLOCK, 1 << 20, 1 << 31, "toy", "none", "none", 1, 0, 0)
        self.info = EngineInfo(name, 1 << 20, worker)

    def add(self, request: EngineCoreRequest) -> None:
        """The simulation knows."""

    def abort(self, keys: list[int]) -> None:
        """Nothing is given up."""

    def stop(self, sequences: list[tuple[int, int]]) -> None:
        """Nothing is given up."""

    def watch_blocks(self) -> None:
        """All are told from the beginning."""

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        """There are none."""

    async def unload_adapter(self, name: str) -> None:
        """There are none."""

    async def snapshot(self) -> EngineSnapshot:
        raise EngineDiedError("Nothing is held here.")

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        await asyncio.Event().wait()
        yield EngineCoreOutputs([], [], [], [], [], [], [], EngineStats())

    async def close(self) -> None:
        """There is nothing to leave."""


class ToyEngine:
    """Continuous batching with an LRU prefix cache; ``told`` is what there was to tell, with its time."""

    def __init__(self, slowness: float) -> None:
        self.slowness = slowness
        self.waiting: deque[Turn] = deque()
        self.running: list[Turn] = []
        self.busy = False
        self.changes: deque[tuple[float, bytes, bool]] = deque()
        self.loads: deque[tuple[float, list[OtherClients], EngineStats]] = deque()
        self._cache: OrderedDict[bytes, None] = OrderedDict()

    def step(self, now: float) -> tuple[float, list[Turn], list[Turn]]:
        """The end of the next step, who has its first token then, and who has ended."""
        decoding = [turn for turn in self.running if turn.to_compute == 0]
        budget, begun, stored = STEP_TOKENS - len(decoding), [], list[tuple[bytes, bool]]()
        for turn in [turn for turn in self.running if turn.to_compute]:
            budget -= self._compute(turn, budget, begun, stored)
        while self.waiting and len(self.running) < SEATS and budget > 0:
            turn = self.waiting.popleft()
            self.running.append(turn)
            cached = next((n for n, known in enumerate(turn.hashes) if known not in self._cache), len(turn.hashes))
            turn.to_compute = len(turn.blocks) * BLOCK - min(cached * BLOCK, len(turn.blocks) * BLOCK - 1)
            budget -= self._compute(turn, budget, begun, stored)
        computed = STEP_TOKENS - len(decoding) - budget
        end = now + (STEP_S + TOKEN_S * computed + DECODE_S * len(decoding)) * self.slowness
        self.changes.extend((end, block, found) for block, found in stored)
        for turn in decoding + begun:
            turn.to_draw -= 1
        ended = [turn for turn in self.running if turn.to_compute == 0 and turn.to_draw <= 0]
        self.running = [turn for turn in self.running if turn not in ended]
        return end, begun, ended

    def _compute(self, turn: Turn, budget: int, begun: list[Turn], stored: list[tuple[bytes, bool]]) -> int:
        tokens = min(budget, turn.to_compute)
        turn.to_compute -= tokens
        for block in turn.hashes[: (len(turn.blocks) * BLOCK - turn.to_compute) // BLOCK]:
            if block not in self._cache:
                stored.append((block, True))
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > CACHED_BLOCKS:
            stored.append((self._cache.popitem(last=False)[0], False))
        if turn.to_compute == 0:
            begun.append(turn)
        return tokens

    def others(self, ingress: int) -> OtherClients:
        """What it has to do for all ingresses but one."""
        waiting = [turn for turn in self.waiting if turn.ingress != ingress]
        running = [turn for turn in self.running if turn.ingress != ingress]
        return OtherClients(sum(turn.to_compute for turn in waiting + running), len(waiting) + len(running))


class Ingress:
    """RayLM's Router, and what it has been told of each engine."""

    def __init__(self, number: int, engines: int, clock: Callable[[], float]) -> None:
        self.number = number
        self.router = Router(lambda outputs: [], lambda keys, error: None, lambda key: None, clock=clock)
        self.engines = [self.router.add(ToyClient(str(name))) for name in range(engines)]
        self.numbers = [1] * engines
        self.told = [0] * engines
        self.turn = 0
        for engine in self.engines:
            engine.on_outputs(_message([], EngineStats(places=SEATS), blocks=BlockChanges(0, b"", b"")))


Policy = Callable[[Ingress, EngineCoreRequest], int]


def predicted(ingress: Ingress, request: EngineCoreRequest) -> int:
    """RayLM's."""
    return ingress.engines.index(ingress.router.pick(request).engine)


def round_robin(ingress: Ingress, request: EngineCoreRequest) -> int:
    ingress.turn += 1
    return ingress.turn % len(ingress.engines)


def least_open(ingress: Ingress, request: EngineCoreRequest) -> int:
    """Least own requests, and among those least of others."""
    return min(range(len(ingress.engines)), key=lambda n: _open(ingress.engines[n]))


def _open(engine: RoutedEngine) -> tuple[int, int]:
    return engine.sequences, engine.stats.others.sequences


POLICIES: dict[str, Policy] = {"round robin": round_robin, "least open": least_open, "RayLM": predicted}


def _message(
    keys: list[int], stats: EngineStats, blocks: BlockChanges | None = None, at: float = 0.0
) -> EngineCoreOutputs:
    empty = [0] * len(keys)
    return EngineCoreOutputs(keys, empty, empty, [], [], [], empty, stats, blocks=blocks, created=at)


class Simulation:
    """One policy before one load."""

    def __init__(self, policy: str, load: Load, args: argparse.Namespace, seed: int) -> None:
        self._policy, self._load, self._stale = POLICIES[policy], load, args.stale
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Turn | int, tuple[list[Turn], list[Turn]] | None]] = []
        self._order = count()
        self._keys: dict[int, int] = {}
        self._key = count()
        self._now = 0.0
        self._hasher = ChainedHasher(BLOCK)
        self._engines = [ToyEngine(args.slow if n == 0 else 1.0) for n in range(args.engines)]
        self._logs = [list[tuple[float, bytes, bool]]() for _ in self._engines]
        self._ingresses = [Ingress(n, args.engines, lambda: self._now) for n in range(args.ingresses)]
        self.done: list[Turn] = []

    def run(self) -> None:
        for turn in self._load.arrivals():
            self._push(turn.at, turn)
        while self._events:
            self._now, _, what, result = heapq.heappop(self._events)
            if isinstance(what, Turn):
                self._arrive(what)
            else:
                if result is not None:
                    self._end_step(what, *result)
                self._begin_step(what)

    def _push(self, at: float, what: Turn | int, result: tuple[list[Turn], list[Turn]] | None = None) -> None:
        heapq.heappush(self._events, (at, next(self._order), what, result))

    def _arrive(self, turn: Turn) -> None:
        turn.ingress = self._rng.randrange(len(self._ingresses))
        turn.to_draw, turn.to_compute = turn.output, len(turn.blocks) * BLOCK
        tokens = [token for block in turn.blocks for token in (block, *[0] * (BLOCK - 1))]
        self._hasher.extend(turn.hashes, self._hasher.root("", None), tokens, len(turn.blocks))
        ingress, key = self._ingresses[turn.ingress], next(self._key)
        request = EngineCoreRequest(key, "", tokens, SamplingParams())
        turn.engine = self._policy(ingress, request)
        self._keys[id(turn)] = key
        routed = ingress.engines[turn.engine]
        blocks = next(iter(ingress.router.routes(request, [routed])))
        ingress.router.send(request, Route(routed, blocks.uncached_tokens, blocks.blocks))
        engine = self._engines[turn.engine]
        engine.waiting.append(turn)
        if not engine.busy:
            engine.busy = True
            self._push(self._now, turn.engine)

    def _begin_step(self, number: int) -> None:
        engine = self._engines[number]
        engine.busy = bool(engine.waiting or engine.running)
        if engine.busy:
            end, begun, ended = engine.step(self._now)
            self._logs[number].extend(engine.changes)
            engine.changes.clear()
            self._push(end, number, (begun, ended))

    def _end_step(self, number: int, begun: list[Turn], ended: list[Turn]) -> None:
        engine = self._engines[number]
        running = len(engine.running)
        stats = EngineStats(
            running=running,
            waiting=len(engine.waiting),
            places=SEATS - running,
            step_s=STEP_S * engine.slowness,
            token_s=(TOKEN_S + STEP_S / STEP_TOKENS) * engine.slowness,
        )
        engine.loads.append((self._now, [engine.others(n) for n in range(len(self._ingresses))], stats))
        while len(engine.loads) > 1 and engine.loads[1][0] <= self._now - self._stale:
            engine.loads.popleft()
        at, others, old = engine.loads[0]
        for turn in begun:
            turn.first_token = self._now
        for ingress in self._ingresses:
            keys = [self._keys[id(turn)] for turn in begun if turn.ingress == ingress.number]
            blocks = self._blocks(ingress, number)
            ingress.engines[number].on_outputs(_message(keys, replace(old, others=others[ingress.number]), blocks, at))
        for turn in ended:
            self._ingresses[turn.ingress].router.leave(self._keys.pop(id(turn)), abort=False)
            self.done.append(turn)
            if turn.later:
                later = self._load.next_turn(turn, self._now)
                self._push(later.at, later)

    def _blocks(self, ingress: Ingress, number: int) -> BlockChanges | None:
        """What is told to an ingress by now."""
        log, first = self._logs[number], ingress.told[number]
        end = first
        while end < len(log) and log[end][0] <= self._now - self._stale:
            end += 1
        if end == first:
            return None
        ingress.told[number] = end
        newest = {block: found for _, block, found in log[first:end]}
        ingress.numbers[number] += 1
        stored = pack_keys(block for block, found in newest.items() if found)
        removed = pack_keys(block for block, found in newest.items() if not found)
        return BlockChanges(ingress.numbers[number] - 1, stored, removed)

    async def close(self) -> None:
        for ingress in self._ingresses:
            await ingress.router.close()


async def measure(policy: str, kind: str, args: argparse.Namespace, seed: int) -> np.ndarray:
    """TTFT of every request, in ms."""
    random.seed(seed)
    simulation = Simulation(policy, Load(kind, args.requests, args.rate, seed + 7), args, seed)
    simulation.run()
    await simulation.close()
    return np.array([turn.first_token - turn.at for turn in simulation.done]) * 1000


def main() -> None:
    options = parser(__doc__)
    kinds = ["hot", "unique", "chat", "agents", "burst"]
    options.add_argument("--loads", nargs="+", choices=kinds, default=kinds)
    options.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    options.add_argument("--engines", type=int, default=8)
    options.add_argument("--ingresses", type=int, default=2)
    options.add_argument("--stale", type=float, default=0.1, help="age of what an ingress knows of others, in s")
    options.add_argument("--slow", type=float, default=1.0, help="how much slower the first engine is")
    options.add_argument("--requests", type=int, default=4000)
    options.add_argument("--rate", type=float, default=24.0, help="requests a second")
    options.add_argument("--seeds", type=int, default=1)
    args = options.parse_args()
    report = Report("routing", {"mean": "ms", "p50": "ms", "p99": "ms"}, args.out)
    for kind in args.loads:
        for policy in args.policies:
            runs = [asyncio.run(measure(policy, kind, args, seed)) for seed in range(1, args.seeds + 1)]
            found = [(run.mean(), np.quantile(run, 0.5), np.quantile(run, 0.99)) for run in runs]
            mean, p50, p99 = np.mean(found, axis=0).tolist()
            case = f"{kind}, {policy}, {args.ingresses} ingresses, {args.stale:g} s"
            report.add(case, {"mean": mean, "p50": p50, "p99": p99}, "")


if __name__ == "__main__":
    main()
