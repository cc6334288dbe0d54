"""A real scheduler and a real worker without an engine core: two steps in flight until everything has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from raylm.engine.scheduler import Scheduler
from raylm.messages import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from raylm.worker import Worker
from tests.engine.integrity import check_kv


def play(core: Scheduler, worker: Worker) -> Iterator[EngineCoreOutputs]:
    """Yield what the clients get, step by step; the KV blocks are checked after each."""
    in_flight: deque[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = deque()
    while core.has_work:
        plan = core.schedule() if len(in_flight) < 2 else None
        if plan is not None:
            in_flight.append((plan, worker.launch(plan)))
            continue
        plan, output = in_flight.popleft()
        yield from core.update(plan, output()).values()
        check_kv(core.kv)
