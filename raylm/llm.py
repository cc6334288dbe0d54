"""LLM: the engine offline, in one process; owns an event-loop thread on which front end, core and executor live."""

from __future__ import annotations

import asyncio
import threading
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tqdm import tqdm

from raylm.config import Config
from raylm.engine import EngineCore, LocalExecutor
from raylm.errors import ConfigError, EngineDiedError, InvalidRequestError, RayLMError
from raylm.frontend import AsyncLLM, ChatRequest, CompletionDelta, LocalEngineClient, RequestHead, TokenLogprob
from raylm.messages import EngineInfo, FinishReason, LoRAAdapter, WorkerInfo
from raylm.params import PoolingParams, SamplingParams

J = TypeVar("J")
T = TypeVar("T")
Prompt = str | list[int]
Conversation = list[dict[str, Any]]
_Job = tuple[Prompt, SamplingParams, str | None]

_MOST_OPEN_FACTOR = 4  # requests open per sequence of a step: enough to keep the batch full, few enough to stay cheap


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence; ``logprobs`` is aligned with ``token_ids``, or None if not asked for."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What one prompt came to: its ``params.n`` completions, in order."""

    prompt_token_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason


class LLM:
    """A model in this process, for scripts and notebooks.

    Args:
        model: 'embedded', a checkpoint directory, or a hub id.
        config: the other keys of ``Config``; ``engine.executor`` is always ``local`` here.

    Raises:
        ConfigError: at the start, the model cannot be served as configured.
        InvalidRequestError: a prompt, parameter or adapter is wrong; nothing of the call is returned then.
        EngineDiedError: the engine failed.
    """

    def __init__(self, model: str = "embedded", **config: Any) -> None:
        self.config = _local_config(model, config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="raylm-loop", daemon=True)
        self._thread.start()
        self._engine = _LocalEngine(self.config)
        self._finalizer = weakref.finalize(self, _end, self._loop, self._thread, self._engine)
        try:
            self.info: WorkerInfo = self._call(self._engine.start())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapters: str | Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[GenerationResult]:
        """Generate for one prompt or many, texts or token ids; results are in the prompts' order.

        ``params`` is one for all or one each, by default the checkpoint's own wishes; so are ``adapters``, the names of
        LoRA adapters that were loaded, by default none. ``progress`` shows a bar.
        """
        return self._generate(_as_prompts(prompts), params, adapters, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        adapters: str | Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[GenerationResult]:
        """Answer one conversation or many, by the checkpoint's chat template; otherwise as ``generate``."""
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        request = partial(
            ChatRequest,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        requests = [request(messages=conversation) for conversation in conversations]
        return self._generate(self._call(self._engine.render(requests)), params, adapters, progress)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None = None, *, progress: bool = True
    ) -> list[memoryview[float]]:
        """The vector of each prompt, float32; by default pooled as the checkpoint wishes, with length 1."""
        chosen = params or PoolingParams(pooling=self._engine.async_llm.pooling_defaults.pooling)
        work = partial(self._engine.embed, chosen)
        return self._call(self._engine.each(work, _as_prompts(prompts), progress))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._call(self._engine.async_llm.tokenize(text, add_special_tokens=add_special_tokens))

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter in PEFT's format from a directory below ``lora.root``; ``adapters`` may then name it."""
        self._call(self._engine.async_llm.adapters.load(LoRAAdapter(name, path)))

    def unload_adapter(self, name: str) -> None:
        """Let go of a LoRA adapter, NotFoundError if there is none; what still generates with it fails."""
        self._call(self._engine.async_llm.adapters.unload(name))

    def close(self) -> None:
        """End the engine and its threads; safe to call twice, and done at the latest when the interpreter ends."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _generate(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapters: str | Sequence[str | None] | None,
        progress: bool,
    ) -> list[GenerationResult]:
        params = SamplingParams(**self._engine.async_llm.sampling_defaults) if params is None else params
        one = isinstance(params, SamplingParams)
        if not one and not (isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params)):
            raise InvalidRequestError("params must be SamplingParams, or a list of them.", param="params")
        each_params = _one_each("params", params, len(prompts), shared=one)
        each_adapter = _one_each("adapters", adapters, len(prompts), shared=isinstance(adapters, str | None))
        jobs: list[_Job] = list(zip(prompts, each_params, each_adapter, strict=True))
        return self._call(self._engine.each(self._engine.generate, jobs, progress))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop's thread; an interrupt of the caller (Ctrl-C) aborts what it waited for."""
        if self._loop.is_closed():
            work.close()
            raise RayLMError("This LLM is closed.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class _LocalEngine:
    """Everything that lives on the loop's thread."""

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
        """``work`` on all jobs, as many open as keeps the batch full; the first error ends them all."""
        gate = asyncio.Semaphore(_MOST_OPEN_FACTOR * self._config.scheduler.max_num_seqs)

        async def one(job: J) -> T:
            async with gate:
                result = await work(job, meter)
            meter.finish()
            return result

        with _Meter(total=len(jobs), disable=not progress, unit="prompt", dynamic_ncols=True) as meter:
            tasks = [asyncio.create_task(one(job)) for job in jobs]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def generate(self, job: _Job, meter: _Meter) -> GenerationResult:
        prompt, params, adapter = job
        wholes = [CompletionDelta(index) for index in range(params.n)]
        head = RequestHead(request_id=uuid.uuid4().hex, adapter=adapter)
        async with aclosing(self.async_llm.generate(prompt, params, head)) as outputs:
            async for output in outputs:
                for delta in output.deltas:
                    wholes[delta.index].add(delta)
                    meter.tokens += len(delta.token_ids)
        return GenerationResult(
            output.prompt_token_ids, [*map(_completion, wholes)], output.num_cached_tokens, output.prompt_logprobs
        )

    async def embed(self, params: PoolingParams, prompt: Prompt, _: _Meter) -> memoryview[float]:
        head = RequestHead(request_id=uuid.uuid4().hex, param="input")
        async with aclosing(self.async_llm.embed(prompt, params, head)) as outputs:
            output = await anext(outputs)
        return memoryview(output.vector or b"").cast("f")

    async def stop(self) -> None:
        """End what runs, then the core and its worker; safe after a failed start."""
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


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, engine: _LocalEngine) -> None:
    # At the interpreter's end the worker's thread has been joined already and takes no more calls.
    with suppress(RuntimeError):
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _local_config(model: str, given: dict[str, Any]) -> Config:
    engine = dict(given.pop("engine", {}))
    if engine.setdefault("executor", "local") != "local":
        raise ConfigError("engine.executor: LLM runs in one process; only 'local' is possible here.")
    if engine.get("tensor_parallel_size", 1) != 1:
        raise ConfigError("engine.tensor_parallel_size: LLM runs in one process, and each rank needs its own.")
    return Config(model=model, engine=engine, **given)


def _one_each(name: str, given: Any, count: int, *, shared: bool) -> list[Any]:
    listed = [given] * count if shared else list(given)
    if len(listed) != count:
        raise InvalidRequestError(f"{name} holds {len(listed)} entries for {count} prompts.", param=name)
    return listed


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"prompts must be a list, not {type(prompts).__name__}.", param="prompts")
    listed = [prompts] if prompts and isinstance(prompts[0], int) else prompts
    for place, prompt in enumerate(listed):
        is_ids = isinstance(prompt, list | tuple) and all(type(token) is int for token in prompt)
        if not (is_ids or isinstance(prompt, str)):
            raise InvalidRequestError(f"prompts[{place}] must be a str or a list of int.", param="prompts")
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in listed]  # type: ignore[arg-type]
