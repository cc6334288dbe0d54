"""Simulates a fleet with a load in virtual time, with the same Router, Admission, EngineCore and Scheduler."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from raylm.engine import EngineCore, Forecast, WaitingQueue
from raylm.frontend import LocalEngineClient, Router
from raylm.messages import EngineInfo, NewSequence, SchedulerOutput, WorkerInfo
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

    ``intervals`` are as in SimulatedIngress, ``busy_s`` is by engine.
    """

    served: list[Served]
    intervals: Counter[int]
    busy_s: dict[str, float]
    preemptions: int
    end_s: float


def simulate(
    fleet: Fleet,
    load: Load,
    seed: int = 1,
    router: Callable[..., Router[SimulatedPrompt]] = Router,
    queue: Queue | None = None,
) -> Outcome:
    """Serve a whole load. Virtual seconds do not take real time.

    ``router`` and ``queue`` replace the configured ones in experiments.
    """
    return run(_Simulation(fleet, load, seed).run(router, queue))


class _Simulation:
    def __init__(self, fleet: Fleet, load: Load, seed: int) -> None:
        self._fleet, self._load = fleet, load
        self._rng = random.Random(seed)
        self._answers: dict[int, Answer] = {}
        self._numbers = count(1)
        self._order = count()
        self._later: list[tuple[float, int, SimulatedRequest]] = []  # later turns of sessions, by time
        self._open = 0
        self._served: list[Served] = []
        self._changed = asyncio.Event()

    async def run(self, router: Callable[..., Router[SimulatedPrompt]], queue: Queue | None) -> Outcome:
        engines = [self._engine(group) for group in self._fleet.engines for _ in range(group.count)]
        infos = [await core.start() for core, _ in engines]
        for core, _ in engines:
            if queue is not None:
                core.scheduler.waiting = queue(core.scheduler)
        config = self._fleet.config.ingress
        ingresses = [
            SimulatedIngress(config, self._end, random.Random(self._rng.random()), router, rank)
            for rank in range(self._fleet.ingresses)
        ]
        for ingress in ingresses:
            for number, ((core, _), info) in enumerate(zip(engines, infos, strict=True)):
                ingress.add(self._client(core, EngineInfo(f"engine-{number}", info.max_model_len, info)))
        running = [asyncio.create_task(core.run()) for core, _ in engines]
        await asyncio.sleep(0)
        await self._feed(ingresses, running)
        end_s = asyncio.get_running_loop().time()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for ingress in ingresses:
            await ingress.router.close()
        return Outcome(
            self._served,
            sum((ingress.intervals for ingress in ingresses), Counter()),
            {f"engine-{number}": executor.busy_s for number, (_, executor) in enumerate(engines)},
            sum(core.scheduler.counters.preemptions for core, _ in engines),
            end_s,
        )

    def _engine(self, group: EngineGroup) -> tuple[EngineCore, SimulatedExecutor]:
        fleet, costs = self._fleet, group.costs or self._fleet.costs
        info = WorkerInfo(
            num_blocks=group.num_blocks, block_size=fleet.block_size, max_model_len=fleet.max_model_len,
            vocab_size=2**32, device="simulated", dtype="none", attention_backend="none", threads=1, weights_bytes=0,
            kv_cache_bytes=0,
        )  # fmt: skip

        def cost(plan: SchedulerOutput) -> float:
            return group.slowness * costs.seconds(plan)

        executor = SimulatedExecutor(info, cost, self._answer)
        return EngineCore(fleet.config, executor, asyncio.get_running_loop().time), executor

    def _client(self, core: EngineCore, info: EngineInfo) -> LocalEngineClient:
        if self._fleet.staleness_s:
            return StaleClient(core, info, self._fleet.staleness_s)
        return LocalEngineClient(core, info)

    def _answer(self, new: NewSequence) -> Answer:
        return self._answers.get(new.seed) or [new.token_ids[new.num_prompt_tokens - 1]]

    async def _feed(self, ingresses: list[SimulatedIngress], running: list[asyncio.Task[None]]) -> None:
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
                self._arrive(request, self._rng.choice(ingresses))
                continue
            self._changed.clear()
            timer = loop.call_at(at, self._changed.set) if at < float("inf") else None
            await self._changed.wait()
            if timer is not None:
                timer.cancel()
            if ended := next((task for task in running if task.done()), None):
                ended.result()

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
