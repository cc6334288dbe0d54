"""A real scheduler and worker without an EngineCore, with steps in flight until all requests have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from raylm.engine.scheduler import Scheduler
from raylm.messages import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from tests.engine.integrity import check_kv


class Launches(Protocol):
    """A worker, or several workers with the interface of one."""

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start a step. The returned function waits for its output."""


def play(core: Scheduler, worker: Launches, most: int = 2) -> Iterator[EngineCoreOutputs]:
    """Yield the outputs for clients, with up to ``most`` steps in flight. Checks the KV blocks after each step."""
    in_flight: deque[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = deque()
    while core.has_work:
        plan = core.schedule() if len(in_flight) < most else None
        if plan is not None:
            in_flight.append((plan, worker.launch(plan)))
            continue
        plan, output = in_flight.popleft()
        yield from core.update(plan, output()).values()
        check_kv(core.kv)
