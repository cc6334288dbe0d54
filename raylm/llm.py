"""LLM: offline inference in one process. Owns the event-loop thread of the front end, the core and the executor."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raylm.errors import InvalidRequestError, RayLMError
from raylm.frontend import ChatRequest
from raylm.llm_arguments import (
    Conversation,
    Prompt,
    adapters_each,
    as_conversations,
    as_prompts,
    check_template_fields,
    local_config,
    names_of,
    params_of,
    sampling_each,
)
from raylm.llm_engine import GenerationResult, LocalEngine
from raylm.messages import LoRAAdapter, WorkerInfo
from raylm.params import PoolingParams, SamplingParams

T = TypeVar("T")


class LLM:
    """Runs a model in this process, for scripts and notebooks.

    Args:
        model: 'embedded', 'smollm2', a checkpoint directory, a GGUF file, or a hub id.
        config: knobs by the last part of their names (``max_num_seqs=4``), or by the sections of ``Config``
            (``scheduler={"max_num_seqs": 4}``). ``engine.executor`` is always ``local``.

    Raises:
        ConfigError: at construction, the model cannot be served with this configuration.
        InvalidRequestError: a prompt, parameter or adapter of a call is invalid. The call then returns no result.
        EngineDiedError: the engine failed.
    """

    def __init__(self, model: str | PathLike[str] = "embedded", **config: Any) -> None:
        self.config = local_config(model, config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="raylm-loop", daemon=True)
        self._thread.start()
        self._engine = LocalEngine(self.config)
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
        **sampling: Any,
    ) -> list[GenerationResult]:
        """Generate for one or several prompts, given as texts or token ids. Results are in the order of the prompts.

        ``params`` holds for all prompts, or is a list with one for each. Without it, ``sampling`` has fields of
        SamplingParams (``max_tokens=5``); other fields take the defaults of the checkpoint. ``adapters`` are names of
        loaded LoRA adapters, one for all or a list with one for each. ``progress`` shows a bar for several prompts.
        """
        params = self._sampling(params, sampling)
        listed = as_prompts(prompts)
        return self._generate(listed, names_of(listed, "prompt", "prompts"), params, adapters, progress)

    def chat(
        self,
        messages: str | Conversation | Sequence[str | Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        adapters: str | Sequence[str | None] | None = None,
        progress: bool = True,
        **sampling: Any,
    ) -> list[GenerationResult]:
        """Answer one or several conversations by the checkpoint's chat template. Otherwise like ``generate``.

        A str is a conversation with one message of the user.
        """
        params = self._sampling(params, sampling)
        check_template_fields(tools, template_kwargs)
        request = partial(
            ChatRequest,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        requests = [request(messages=conversation) for conversation in as_conversations(messages)]
        prompts = self._call(self._engine.render(requests))
        return self._generate(prompts, names_of(prompts, "messages", "messages"), params, adapters, progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        *,
        progress: bool = True,
        **pooling: Any,
    ) -> list[NDArray[np.float32]]:
        """Embed one or several prompts: one float32 vector for each, in their order.

        Without ``params``, ``pooling`` has fields of PoolingParams (``dimensions=64``). By default the pooling is that
        of the checkpoint, and vectors are normalized to length 1.
        """
        defaults = {"pooling": self._engine.async_llm.pooling_defaults.pooling}
        params = params_of(PoolingParams, params, pooling, defaults)
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError("params must be PoolingParams.", param="params")
        listed = as_prompts(prompts)
        jobs = [*zip(listed, names_of(listed, "prompt", "prompts"), strict=True)]
        return self._call(self._engine.each(partial(self._engine.embed, params), jobs, progress))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._call(self._engine.async_llm.tokenize(text, add_special_tokens=add_special_tokens))

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter in PEFT's format from a directory below ``lora.root``, for use in ``adapters``."""
        self._call(self._engine.async_llm.adapters.load(LoRAAdapter(name, path)))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Requests that still use it fail.

        Raises:
            NotFoundError: no adapter has this name.
        """
        self._call(self._engine.async_llm.adapters.unload(name))

    def close(self) -> None:
        """Stop the engine and its threads. Safe to call twice; called at the latest when the interpreter ends."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _sampling(self, params: SamplingParams | Sequence[SamplingParams] | None, keywords: dict[str, Any]) -> Any:
        return params_of(SamplingParams, params, keywords, self._engine.async_llm.sampling_defaults)

    def _generate(
        self,
        prompts: list[Prompt],
        names: list[str],
        params: SamplingParams | Sequence[SamplingParams],
        adapters: str | Sequence[str | None] | None,
        progress: bool,
    ) -> list[GenerationResult]:
        chosen = sampling_each(params, len(prompts)), adapters_each(adapters, len(prompts))
        jobs = list(zip(prompts, names, *chosen, strict=True))
        return self._call(self._engine.each(self._engine.generate, jobs, progress))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop's thread. An interrupt (Ctrl-C) aborts the work and is raised when it has ended."""
        if self._loop.is_closed():
            work.close()
            raise RayLMError("This LLM is closed.")
        tasks: list[asyncio.Task[T]] = []
        ended = threading.Event()

        def end(task: asyncio.Task[T]) -> None:
            task.cancelled() or task.exception()  # marks the exception as retrieved: after an interrupt it is not read
            ended.set()

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(end)

        self._loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            raise
        return tasks[0].result()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, engine: LocalEngine) -> None:
    # At interpreter exit the worker's thread is joined already and accepts no calls.
    with suppress(RuntimeError):
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
