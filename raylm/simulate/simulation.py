"""Simulates a fleet with a load in virtual time, with the same Router, Admission, EngineCore and Scheduler."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from raylm.engine import LOAD_PERIOD_S, EngineCore, EngineLoad, Forecast, Pace, WaitingQueue, wanted_engines
from raylm.frontend import LocalEngineClient, Router
from raylm.messages import EngineInfo, NewSequence, SchedulerOutput, WorkerInfo
from raylm.simulate.autoscaler import Autoscaler, Policy
from raylm.simulate.executor import Answer, SimulatedExecutor
from raylm.simulate.fleet import EngineGroup, Fleet
from raylm.simulate.ingress import Served, SimulatedIngress, SimulatedPrompt, StaleClient
from raylm.simulate.loads import Load
from raylm.simulate.trace import SimulatedRequest
from raylm.simulate.virtual_time import run

Queue = Callable[[Forecast], WaitingQueue]


@dataclass(frozen=True)
class Outcome:
    """All requests in the order of their ends, and statistics of the engines.

    ``intervals`` are as in SimulatedIngress. ``busy_s`` and ``held_s``, from the decision to start an engine to its
    end, are by engine.
    """

    served: list[Served]
    intervals: Counter[int]
    busy_s: dict[str, float]
    held_s: dict[str, float]
    preemptions: int
    end_s: float


def simulate(
    fleet: Fleet,
    load: Load,
    seed: int = 1,
    router: Callable[..., Router[SimulatedPrompt]] = Router,
    queue: Queue | None = None,
    scaling: Policy = wanted_engines,
) -> Outcome:
    """Serve a whole load. Virtual seconds do not take real time.

    ``router``, ``queue`` and ``scaling`` replace the configured ones in experiments.
    """
    return run(_Simulation(fleet, load, seed, queue, scaling).run(router))


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine of a group. ``since`` and ``until`` it is held; it is ``draining`` when it is about to end."""

    name: str
    group: EngineGroup
    core: EngineCore
    executor: SimulatedExecutor
    since: float
    until: float | None = None
    draining: bool = False
    running: asyncio.Task[None] | None = None
    pace: Pace = field(default_factory=Pace)

    @property
    def is_ready(self) -> bool:
        return self.running is not None and not self.draining


class _Simulation:
    def __init__(self, fleet: Fleet, load: Load, seed: int, queue: Queue | None, scaling: Policy) -> None:
        self._fleet, self._load = fleet, load
        self._queue, self._scaling = queue, scaling
        self._rng = random.Random(seed)
        self._answers: dict[int, Answer] = {}
        self._numbers = count(1)
        self._order = count()
        self._later: list[tuple[float, int, SimulatedRequest]] = []  # later turns of sessions, by time
        self._open = 0
        self._served: list[Served] = []
        self._changed = asyncio.Event()
        self._engines: list[_Engine] = []
        self._ingresses: list[SimulatedIngress] = []

    async def run(self, router: Callable[..., Router[SimulatedPrompt]]) -> Outcome:
        config, groups = self._fleet.config.ingress, self._fleet.engines
        scales = any(group.replicas is not None for group in groups)
        self._ingresses = [
            SimulatedIngress(config, self._end, random.Random(self._rng.random()), router, rank, scales=scales)
            for rank in range(self._fleet.ingresses)
        ]
        for group in groups:
            for _ in range(group.count):
                await self._begin(self._create(group))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(self._scale(group)) for group in groups if group.replicas is not None]
        await self._feed(tasks)
        end_s = asyncio.get_running_loop().time()
        tasks += [engine.running for engine in self._engines if engine.running is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for ingress in self._ingresses:
            await ingress.router.close()
        return Outcome(
            self._served,
            sum((ingress.intervals for ingress in self._ingresses), Counter()),
            {engine.name: engine.executor.busy_s for engine in self._engines},
            {engine.name: (end_s if engine.until is None else engine.until) - engine.since for engine in self._engines},
            sum(engine.core.scheduler.counters.preemptions for engine in self._engines if engine.running is not None),
            end_s,
        )

    # ---------------------------------------------------------------- engines

    def _create(self, group: EngineGroup) -> _Engine:
        fleet, costs = self._fleet, group.costs or self._fleet.costs
        info = WorkerInfo(
            num_blocks=group.num_blocks, block_size=fleet.block_size, max_model_len=fleet.max_model_len,
            vocab_size=2**32, device="simulated", dtype="none", attention_backend="none", threads=1, weights_bytes=0,
            kv_cache_bytes=0,
        )  # fmt: skip

        def cost(plan: SchedulerOutput) -> float:
            return group.slowness * costs.seconds(plan)

        loop = asyncio.get_running_loop()
        executor = SimulatedExecutor(info, cost, self._answer)
        core = EngineCore(fleet.config, executor, loop.time)
        engine = _Engine(f"engine-{len(self._engines)}", group, core, executor, loop.time())
        self._engines.append(engine)
        return engine

    async def _begin(self, engine: _Engine) -> None:
        """Make an engine ready, and known to all ingresses."""
        core = engine.core
        info = await core.start()
        if self._queue is not None:
            core.scheduler.waiting = self._queue(core.scheduler)
        for ingress in self._ingresses:
            ingress.add(self._client(core, EngineInfo(engine.name, info.max_model_len, info)))
        engine.running = asyncio.create_task(core.run())

    async def _begin_later(self, engine: _Engine) -> None:
        await asyncio.sleep(engine.group.start_s)
        if not engine.draining:
            await self._begin(engine)

    async def _scale(self, group: EngineGroup) -> None:
        """Start and end the engines of a group with the load. The newest engines end first."""
        assert group.replicas is not None
        loop = asyncio.get_running_loop()
        scaler = Autoscaler(group.count, group.replicas, self._scaling)
        starting: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(LOAD_PERIOD_S)
            now = loop.time()
            mine = [engine for engine in self._engines if engine.group is group and engine.until is None]
            there = [engine for engine in mine if not engine.draining]
            number = scaler.decide([self._report(engine, now) for engine in there if engine.is_ready], now)
            for engine in there[number:]:
                engine.draining = True
                if engine.running is not None:
                    engine.core.drain()
            for engine in mine:
                if engine.draining and (engine.running is None or not engine.core.has_clients):
                    engine.until = now
            for _ in range(number - len(there)):
                starting.add(task := asyncio.create_task(self._begin_later(self._create(group))))
                task.add_done_callback(starting.discard)

    def _report(self, engine: _Engine, now: float) -> EngineLoad:
        scheduler = engine.core.scheduler
        return engine.pace.load(replace(scheduler.stats(), others=scheduler.loads.others("")), now)

    def _client(self, core: EngineCore, info: EngineInfo) -> LocalEngineClient:
        if self._fleet.staleness_s:
            return StaleClient(core, info, self._fleet.staleness_s)
        return LocalEngineClient(core, info)

    def _answer(self, new: NewSequence) -> Answer:
        return self._answers.get(new.seed) or [new.token_ids[new.num_prompt_tokens - 1]]

    # ---------------------------------------------------------------- requests

    async def _feed(self, scaling: list[asyncio.Task[None]]) -> None:
        """Let requests arrive at their times, until all have ended."""
        loop, arrivals = asyncio.get_running_loop(), self._load.arrivals()
        coming = next(arrivals, None)
        while coming is not None or self._later or self._open:
            at = min(coming.at if coming else float("inf"), self._later[0][0] if self._later else float("inf"))
            if at <= loop.time():
                if coming is not None and coming.at <= at:
                    request, coming = coming, next(arrivals, None)
                else:
                    _, _, request = heapq.heappop(self._later)
                self._arrive(request, self._rng.choice(self._ingresses))
                continue
            self._changed.clear()
            timer = loop.call_at(at, self._changed.set) if at < float("inf") else None
            await self._changed.wait()
            if timer is not None:
                timer.cancel()
            for task in scaling + [engine.running for engine in self._engines if engine.running is not None]:
                if task.done():
                    task.result()

    def _arrive(self, request: SimulatedRequest, ingress: SimulatedIngress) -> None:
        self._open += 1
        seed = 0
        if request.answer != request.prompt[-1:]:
            seed = next(self._numbers)
            self._answers[seed] = request.answer
        ingress.arrive(request, seed)

    def _end(self, served: Served, request: SimulatedRequest) -> None:
        self._open -= 1
        self._served.append(served)
        now = asyncio.get_running_loop().time()
        later = None if served.error else request.next_turn(now)
        if later is not None:
            heapq.heappush(self._later, (later.at, next(self._order), later))
        if later is not None or not self._open:
            self._changed.set()
