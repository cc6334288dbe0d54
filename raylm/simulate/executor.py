"""SimulatedExecutor: an EngineCore's executor that computes nothing, and takes the simulated time of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import compress

from raylm.engine import ModelExecutor
from raylm.errors import RayLMError
from raylm.messages import ModelRunnerOutput, NewSequence, SchedulerOutput, WorkerInfo

Answer = list[int]
Cost = Callable[[SchedulerOutput], float]


class SimulatedAnswers:
    """The tokens of an engine's sequences, from ``answer``. After the end of an answer, its last token repeats."""

    def __init__(self, answer: Callable[[NewSequence], Answer]) -> None:
        self._answer = answer
        self._answers: dict[int, tuple[int, Answer]] = {}  # by sequence, with the length of its prompt
        self._constant: dict[int, int] = {}  # the token of answers with one token

    def draw(self, plan: SchedulerOutput, step_s: float = 0.0) -> ModelRunnerOutput:
        """Draw the tokens of a plan. Plans must come in order of execution."""
        answers = self._answers
        for seq_id in plan.finished:
            del answers[seq_id]
            self._constant.pop(seq_id, None)
        for new in plan.new:
            _, answer = answers[new.seq_id] = new.num_prompt_tokens, self._answer(new)
            if len(answer) == 1:
                self._constant[new.seq_id] = answer[0]
        if len(self._constant) == len(answers):
            seq_ids = list(compress(plan.seq_ids, plan.samples))
            token_ids = list(map(self._constant.__getitem__, seq_ids))
        else:
            seq_ids, token_ids = self._draw_each(plan)
        return ModelRunnerOutput(plan.step, seq_ids, [1] * len(seq_ids), token_ids, step_s=step_s)

    def _draw_each(self, plan: SchedulerOutput) -> tuple[list[int], list[int]]:
        answers = self._answers
        seq_ids, token_ids = [], []
        rows = zip(plan.seq_ids, plan.num_computed, plan.num_scheduled, plan.samples, strict=True)
        for seq_id, computed, count, samples in rows:
            if samples:
                length, answer = answers[seq_id]
                place = computed + count - length
                seq_ids.append(seq_id)
                token_ids.append(answer[place] if place < len(answer) else answer[-1])
        return seq_ids, token_ids


class SimulatedExecutor(ModelExecutor):
    """Runs steps one after another, each for the seconds of ``cost``. ``busy_s`` is the sum so far."""

    def __init__(self, info: WorkerInfo, cost: Cost, answer: Callable[[NewSequence], Answer]) -> None:
        self.busy_s = 0.0
        self._info = info
        self._cost = cost
        self._answers = SimulatedAnswers(answer)
        self._free_at = 0.0

    async def start(self) -> WorkerInfo:
        return self._info

    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        loop, seconds = asyncio.get_running_loop(), self._cost(plan)
        self.busy_s += seconds
        self._free_at = max(loop.time(), self._free_at) + seconds
        result: asyncio.Future[ModelRunnerOutput] = loop.create_future()
        loop.call_at(self._free_at, _give, result, self._answers.draw(plan, seconds))
        return result

    async def prepare_grammar(self, grammar: str) -> None:
        raise RayLMError("Grammars are not simulated.")

    async def load_adapter(self, adapter: int, path: str) -> str:
        raise RayLMError("Adapters are not simulated.")

    async def unload_adapter(self, adapter: int) -> None:
        raise RayLMError("Adapters are not simulated.")

    async def shutdown(self) -> None:
        """Do nothing."""


def _give(result: asyncio.Future[ModelRunnerOutput], output: ModelRunnerOutput) -> None:
    if not result.done():
        result.set_result(output)
