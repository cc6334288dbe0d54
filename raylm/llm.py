"""LLM: the engine offline, in one process; owns an event-loop thread on which front end, core and executor live."""

from __future__ import annotations

import asyncio
import threading
import uuid
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm

from raylm.config import Config
from raylm.engine import EngineCore, LocalExecutor
from raylm.errors import ConfigError, EngineDiedError, InvalidRequestError, RayLMError
from raylm.frontend import AsyncLLM, ChatRequest, CompletionDelta, LocalEngineClient, RequestHead, TokenLogprob
from raylm.messages import EngineInfo, FinishReason, LoRAAdapter, WorkerInfo
from raylm.params import PoolingParams, SamplingParams

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
        """The first completion's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's tokens."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.completions[0].finish_reason


class LLM:
    """A model in this process, for scripts and notebooks.

    Args:
        model: 'embedded', a checkpoint directory, or a hub id.
        config: the other keys of ``Config``; ``engine.executor`` is always ``local`` here.

    Raises:
        ConfigError: the model cannot be served as configured.
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

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing of the call is returned then.
            EngineDiedError: the engine failed.
        """
        listed = _as_prompts(prompts)
        jobs = _jobs(listed, self._params(params, len(listed)), adapters)
        return self._call(self._engine.run(jobs, progress))

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
        """Answer one conversation or many, by the checkpoint's chat template.

        Raises:
            InvalidRequestError: the template refuses the messages, or a parameter is wrong.
            EngineDiedError: the engine failed.
        """
        conversations: list[Conversation] = (
            [messages] if messages and isinstance(messages[0], dict) else list(messages)  # type: ignore[list-item,arg-type]
        )
        requests = [
            ChatRequest(
                messages=conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )
            for conversation in conversations
        ]
        prompts = self._call(self._engine.render(requests))
        jobs = _jobs(prompts, self._params(params, len(prompts)), adapters)
        return self._call(self._engine.run(jobs, progress))

    def embed(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None = None, *, progress: bool = True
    ) -> list[memoryview[float]]:
        """The vector of each prompt, float32; by default pooled as the checkpoint wishes, with length 1.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong.
            EngineDiedError: the engine failed.
        """
        chosen = params or PoolingParams(pooling=self._engine.async_llm.pooling_defaults.pooling)
        return self._call(self._engine.embed(_as_prompts(prompts), chosen, progress))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        return self._call(self._engine.async_llm.tokenize(text, add_special_tokens=add_special_tokens))

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter in PEFT's format from a directory below ``lora.root``; ``adapters`` may then name it.

        Raises:
            InvalidRequestError: it cannot be served, or the name is taken.
        """
        self._call(self._engine.async_llm.adapters.load(LoRAAdapter(name, path)))

    def unload_adapter(self, name: str) -> None:
        """Let go of a LoRA adapter; what still generates with it fails.

        Raises:
            NotFoundError: it is not loaded.
        """
        self._call(self._engine.async_llm.adapters.unload(name))

    def close(self) -> None:
        """End the engine and its threads; safe to call twice, and done at the latest when the interpreter ends."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams(**self._engine.async_llm.sampling_defaults)
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, Sequence) or any(not isinstance(each, SamplingParams) for each in params):
            raise InvalidRequestError("params must be SamplingParams, or a list of them.", param="params")
        if len(params) != count:
            raise InvalidRequestError(f"params holds {len(params)} entries for {count} prompts.", param="params")
        return list(params)

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
        """Load tokenizer and model, and begin to step."""
        self.async_llm = AsyncLLM(self._config)
        self._started = True
        info = await self._core.start()
        self._running = asyncio.create_task(self._core.run(), name="engine core")
        self._running.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.async_llm.add_engine(LocalEngineClient(self._core, EngineInfo("local", info.max_model_len, info)))
        return info

    async def render(self, requests: list[ChatRequest]) -> list[Prompt]:
        """Token ids of each conversation."""
        return [await self.async_llm.render_chat(request) for request in requests]

    async def run(self, jobs: list[_Job], progress: bool) -> list[GenerationResult]:
        """All prompts at once, as many open as keeps the batch full; the first error ends them all."""
        gate = self._gate()
        with tqdm(total=len(jobs), disable=not progress, unit="prompt", dynamic_ncols=True) as bar:
            meter = _Meter(bar)
            return await _all(self._one(gate, meter, *job) for job in jobs)

    async def embed(self, prompts: list[Prompt], params: PoolingParams, progress: bool) -> list[memoryview[float]]:
        """As ``run``, for vectors."""
        gate = self._gate()
        with tqdm(total=len(prompts), disable=not progress, unit="prompt", dynamic_ncols=True) as bar:
            return await _all(self._vector(gate, bar, prompt, params) for prompt in prompts)

    async def stop(self) -> None:
        """End what runs, then the core and its worker; safe after a failed start."""
        if self._started:
            await self.async_llm.stop()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._core.shutdown()

    def _gate(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(_MOST_OPEN_FACTOR * self._config.scheduler.max_num_seqs)

    async def _vector(
        self, gate: asyncio.Semaphore, bar: tqdm[Any], prompt: Prompt, params: PoolingParams
    ) -> memoryview[float]:
        async with gate, aclosing(self.async_llm.embed(prompt, params, _head(param="input"))) as outputs:
            output = await anext(outputs)
        bar.update()
        return memoryview(output.vector or b"").cast("f")

    async def _one(
        self, gate: asyncio.Semaphore, meter: _Meter, prompt: Prompt, params: SamplingParams, adapter: str | None
    ) -> GenerationResult:
        wholes = [CompletionDelta(index) for index in range(params.n)]
        async with gate, aclosing(self.async_llm.generate(prompt, params, _head(adapter=adapter))) as outputs:
            async for output in outputs:
                for delta in output.deltas:
                    wholes[delta.index].add(delta)
                    meter.count(len(delta.token_ids))
        meter.finish()
        return GenerationResult(
            output.prompt_token_ids, [*map(_completion, wholes)], output.num_cached_tokens, output.prompt_logprobs
        )


class _Meter:
    """Drives the progress bar: prompts done, and generated tokens per second."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar
        self._tokens = 0

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def finish(self) -> None:
        elapsed = self._bar.format_dict["elapsed"] if not self._bar.disable else 0.0
        if elapsed:
            self._bar.set_postfix_str(f"{self._tokens / elapsed:.0f} tokens/s", refresh=False)
        self._bar.update()


def _completion(whole: CompletionDelta) -> Completion:
    if whole.finish_reason not in ("stop", "length"):
        raise EngineDiedError("The engine ended this request before it was finished.")
    return Completion(whole.index, whole.text, whole.token_ids, whole.finish_reason, whole.stop_reason, whole.logprobs)


def _head(*, param: str = "prompt", adapter: str | None = None) -> RequestHead:
    """Of a request whose turn has come: it arrives now."""
    return RequestHead(request_id=uuid.uuid4().hex, param=param, adapter=adapter)


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, engine: _LocalEngine) -> None:
    # At the interpreter's end the worker's thread has been joined already and can take no farewell.
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


def _jobs(
    prompts: list[Prompt], params: list[SamplingParams], adapters: str | Sequence[str | None] | None
) -> list[_Job]:
    """Each prompt with its parameters and adapter."""
    named = [adapters] * len(prompts) if adapters is None or isinstance(adapters, str) else list(adapters)
    if len(named) != len(prompts):
        raise InvalidRequestError(f"adapters holds {len(named)} entries for {len(prompts)} prompts.", param="adapters")
    return list(zip(prompts, params, named, strict=True))


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"prompts must be a list, not {type(prompts).__name__}.", param="prompts")
    listed = [prompts] if prompts and isinstance(prompts[0], int) else prompts
    for place, prompt in enumerate(listed):
        if isinstance(prompt, str) or (
            isinstance(prompt, list | tuple) and all(type(token) is int for token in prompt)
        ):
            continue
        raise InvalidRequestError(f"prompts[{place}] must be a str or a list of int.", param="prompts")
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in listed]  # type: ignore[arg-type]
