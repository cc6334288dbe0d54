"""NotingExecutor: any executor, with a note of when each result came; what benchmarks of the engine's steps read."""

from __future__ import annotations

import time
from collections.abc import Awaitable

from raylm.engine import ModelExecutor
from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo


class NotingExecutor(ModelExecutor):
    """Notes when each result came, what the worker says of it, and how many sequences drew."""

    def __init__(self, inner: ModelExecutor) -> None:
        self._inner = inner
        self.noted: list[tuple[float, float, ModelRunnerOutput]] = []

    async def start(self) -> WorkerInfo:
        """As the inner one."""
        return await self._inner.start()

    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        """As the inner one; the step is handed over before this returns."""
        return self._noted(self._inner.execute(plan))

    async def _noted(self, result: Awaitable[ModelRunnerOutput]) -> ModelRunnerOutput:
        output = await result
        self.noted.append((time.perf_counter(), time.process_time(), output))
        return output

    async def load_adapter(self, adapter: int, path: str) -> None:
        """As the inner one."""
        await self._inner.load_adapter(adapter, path)

    async def unload_adapter(self, adapter: int) -> None:
        """As the inner one."""
        await self._inner.unload_adapter(adapter)

    async def shutdown(self) -> None:
        """As the inner one."""
        await self._inner.shutdown()
