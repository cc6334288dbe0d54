"""SimulatedExecutor: an EngineCore's worker that computes nothing, and takes the time that it would."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from raylm.engine import ModelExecutor
from raylm.messages import ModelRunnerOutput, NewSequence, SchedulerOutput, WorkerInfo

STOP = 2**32 - 1  # the token that ends an answer before its longest

Answer = list[int]
Cost = Callable[[SchedulerOutput], float]


class SimulatedExecutor(ModelExecutor):
    """Runs steps one after the other, each for the seconds that ``cost`` has for it.

    ``answer`` gives the tokens that a sequence draws; behind the end of them the last one is drawn again and again.
    ``busy_s`` are all seconds so far.
    """

    def __init__(self, info: WorkerInfo, cost: Cost, answer: Callable[[NewSequence], Answer]) -> None:
        self.busy_s = 0.0
        self._info = info
        self._cost = cost
        self._answer = answer
        self._answers: dict[int, tuple[int, Answer]] = {}  # by sequence, with the length of its prompt
        self._free_at = 0.0

    async def start(self) -> WorkerInfo:
        return self._info

    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        loop, seconds = asyncio.get_running_loop(), self._cost(plan)
        self.busy_s += seconds
        self._free_at = max(loop.time(), self._free_at) + seconds
        result: asyncio.Future[ModelRunnerOutput] = loop.create_future()
        loop.call_at(self._free_at, _give, result, self._draw(plan, seconds))
        return result

    def _draw(self, plan: SchedulerOutput, seconds: float) -> ModelRunnerOutput:
        answers = self._answers
        for seq_id in plan.finished:
            del answers[seq_id]
        for new in plan.new:
            answers[new.seq_id] = new.num_prompt_tokens, self._answer(new)
        seq_ids, token_ids = [], []
        for seq_id, computed, count, samples in zip(
            plan.seq_ids, plan.num_computed, plan.num_scheduled, plan.samples, strict=True
        ):
            if samples:
                length, answer = answers[seq_id]
                place = computed + count - length
                seq_ids.append(seq_id)
                token_ids.append(answer[place] if place < len(answer) else answer[-1])
        return ModelRunnerOutput(plan.step, seq_ids, [1] * len(seq_ids), token_ids, step_s=seconds, forward_s=seconds)

    async def prepare_grammar(self, grammar: str) -> None:
        raise NotImplementedError("grammars are not simulated")

    async def load_adapter(self, adapter: int, path: str) -> str:
        raise NotImplementedError("adapters are not simulated")

    async def unload_adapter(self, adapter: int) -> None:
        raise NotImplementedError("adapters are not simulated")

    async def shutdown(self) -> None:
        """There is nothing to end."""


def _give(result: asyncio.Future[ModelRunnerOutput], output: ModelRunnerOutput) -> None:
    if not result.done():
        result.set_result(output)
