"""LocalEngine: the part of LLM that runs on its event-loop thread, and the results of LLM."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from raylm.config import Config
from raylm.engine import EngineCore, LocalExecutor
from raylm.errors import EngineDiedError
from raylm.frontend import AsyncLLM, ChatRequest, CompletionDelta, LocalEngineClient, RequestHead, TokenLogprob
from raylm.llm_arguments import Prompt
from raylm.messages import EngineInfo, FinishReason, WorkerInfo
from raylm.params import PoolingParams, SamplingParams

J = TypeVar("J")
T = TypeVar("T")
_Job = tuple[Prompt, str, SamplingParams, str | None]  # prompt, its name in errors, parameters, name of the adapter
_MOST_OPEN_FACTOR = 4  # open requests per sequence of a step: enough to keep the batch full at little cost


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence. ``logprobs`` has an entry for each of ``token_ids``, or is None if not requested."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The result of one prompt: its ``params.n`` completions, in order."""

    prompt_token_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason


class LocalEngine:
    """A front end, an EngineCore and a worker in one process. All calls come from one event loop."""

    async_llm: AsyncLLM

    def __init__(self, config: Config) -> None:
        self._config = config
        self._core = EngineCore(config, LocalExecutor(config))
        self._running: asyncio.Task[None] | None = None
        self._started = False

    async def start(self) -> WorkerInfo:
        self.async_llm = AsyncLLM(self._config)
        self._started = True
        info = await self._core.start()
        self._running = asyncio.create_task(self._core.run(), name="engine core")
        self._running.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.async_llm.add_engine(LocalEngineClient(self._core, EngineInfo("local", info.max_model_len, info)))
        return info

    async def render(self, requests: list[ChatRequest]) -> list[Prompt]:
        return [await self.async_llm.render_chat(request) for request in requests]

    async def each(self, work: Callable[[J, _Meter], Awaitable[T]], jobs: list[J], progress: bool) -> list[T]:
        """Run ``work`` on all jobs, with enough of them open to keep the batch full. The first error cancels all."""
        gate = asyncio.Semaphore(_MOST_OPEN_FACTOR * self._config.scheduler.max_num_seqs)

        async def one(job: J) -> T:
            async with gate:
                result = await work(job, meter)
            meter.finish()
            return result

        shown = progress and len(jobs) > 1
        with _Meter(total=len(jobs), disable=not shown, unit="prompt", dynamic_ncols=True) as meter:
            tasks = [asyncio.create_task(one(job)) for job in jobs]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def generate(self, job: _Job, meter: _Meter) -> GenerationResult:
        prompt, name, params, adapter = job
        wholes = [CompletionDelta(index) for index in range(params.n)]
        continues = not name.startswith("messages")
        head = RequestHead(request_id=uuid.uuid4().hex, param=name, adapter=adapter, continues=continues)
        async with aclosing(self.async_llm.generate(prompt, params, head)) as outputs:
            async for output in outputs:
                for delta in output.deltas:
                    wholes[delta.index].add(delta)
                    meter.tokens += len(delta.token_ids)
        return GenerationResult(
            output.prompt_token_ids, [*map(_completion, wholes)], output.num_cached_tokens, output.prompt_logprobs
        )

    async def embed(self, params: PoolingParams, job: tuple[Prompt, str], _: _Meter) -> NDArray[np.float32]:
        prompt, name = job
        head = RequestHead(request_id=uuid.uuid4().hex, param=name)
        async with aclosing(self.async_llm.embed(prompt, params, head)) as outputs:
            output = await anext(outputs)
        return np.frombuffer(output.vector or b"", np.float32).copy()  # a copy is writable

    async def stop(self) -> None:
        """Stop the running requests, then the core and its worker. Safe after a failed start."""
        if self._started:
            await self.async_llm.stop()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._core.shutdown()


class _Meter(tqdm):  # type: ignore[misc]  # it has no types
    """The progress bar: prompts done, and generated tokens per second."""

    tokens = 0

    def finish(self) -> None:
        elapsed = self.format_dict["elapsed"] if self.tokens and not self.disable else 0.0
        if elapsed:
            self.set_postfix_str(f"{self.tokens / elapsed:.0f} tokens/s", refresh=False)
        self.update()


def _completion(whole: CompletionDelta) -> Completion:
    if whole.finish_reason not in ("stop", "length"):
        raise EngineDiedError("The engine ended this request before it was finished.")
    return Completion(whole.index, whole.text, whole.token_ids, whole.finish_reason, whole.stop_reason, whole.logprobs)
