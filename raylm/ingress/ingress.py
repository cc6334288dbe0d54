"""Ingress: the Serve deployment whose replicas each hold one HTTP app and one AsyncLLM with clients of all engines."""

from __future__ import annotations

import asyncio
import gc
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from raylm.config import Config
from raylm.engine import engine_core_prefix
from raylm.errors import ConfigError, InvalidRequestError
from raylm.frontend import ChatRequest, Lifecycle, RequestHead
from raylm.ingress.openai.generation import check_priority
from raylm.lazy import Family
from raylm.params import PoolingParams, SamplingParams
from raylm.ray_private import stop_flag
from raylm.stages import report

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM, RequestOutput

_POLL_S = 0.1

# Actors that all replicas share where there are several, by the name under which the app knows them.
SHARED_ACTORS: Family[type] = Family({
    "response_store": "raylm.ingress.responses.store:ResponseStore",
})  # fmt: skip

# The types of handle calls' arguments, in words and for pydantic: HTTP's bodies are checked elsewhere.
_KINDS: dict[str, tuple[str, Any]] = {
    "prompt": ("a str or a list of int", str | list[int]),
    "messages": ("a list of dict", list[dict[Any, Any]]),
    "tools": ("a list of dict", list[dict[Any, Any]] | None),
    "template_kwargs": ("a dict", dict[Any, Any] | None),
    "sampling": ("SamplingParams", InstanceOf[SamplingParams] | None),
    "pooling": ("PoolingParams", InstanceOf[PoolingParams] | None),
    "cache_salt": ("a str", str | None),
    "priority": ("an int of 32 bits", Annotated[int, Field(ge=-(2**31), lt=2**31)] | None),
}
_ADAPTERS = {name: TypeAdapter[Any](kind, config=ConfigDict(strict=True)) for name, (_, kind) in _KINDS.items()}


class Ingress:
    """One replica. Python callers reach the public methods by handle, HTTP clients the app.

    ``engine`` is bound only so that Serve deploys the engines with the ingress; ``shared_actors`` are SHARED_ACTORS,
    none where there is a single replica.
    """

    _llm: AsyncLLM
    _lifecycle: Lifecycle
    _tasks: tuple[object, ...]

    def __init__(self, config: Config, engine: DeploymentHandle, **shared_actors: DeploymentHandle) -> None:
        self._config = config
        self._shared_actors = shared_actors

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Serve calls this once, at boot: here start all tasks that must outlive every request."""
        from raylm.frontend import Admission, AsyncLLM, Discovery  # here: building the application need not wait
        from raylm.ingress.routes import build_asgi_app

        bounds, app_name = self._config.ingress, serve.get_replica_context().app_name
        admission = Admission(bounds.max_queued_requests, bounds.max_queued_tokens)
        try:
            self._llm = AsyncLLM(self._config, admission, bounds.recovery_timeout_s)
        except ConfigError as error:
            report("error", "chat", f"{app_name}: {error.message}")
            raise
        report("stage", "chat", f"{app_name}: {self._llm.chat_description}")
        app = build_asgi_app(self._llm, self._config, self._shared_actors)
        self._lifecycle = app.state.lifecycle
        gc.collect()
        gc.freeze()  # libraries and tokenizer: walking through them would stop the loop for tens of milliseconds
        prefix = engine_core_prefix(app_name, self._config)
        self._tasks = Discovery(prefix, self._llm.add_engine), asyncio.create_task(self._drain_when_stopped())
        return app

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        prompt_param: str = "prompt",
        adapter: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt (text or token ids); call it with ``handle.options(stream=True)``.

        Without ``params`` the checkpoint's own defaults hold. Outputs are deltas; the last one is ``finished``.
        ``adapter`` names a LoRA adapter that was loaded.

        Raises:
            RayLMError: what HTTP clients would get as an error.
        """
        _check(prompt=prompt, sampling=params, cache_salt=cache_salt, priority=priority)
        check_priority(priority, self._config)
        head = _head(priority=priority or 0, cache_salt=cache_salt, param=prompt_param, adapter=adapter)
        outputs = self._llm.generate(prompt, params or SamplingParams(**self._llm.sampling_defaults), head)
        finished = False
        with self._lifecycle.admit() as ongoing:
            async with aclosing(outputs):
                while not finished:
                    with ongoing:
                        output = await anext(outputs)
                    finished = output.finished
                    yield output

    async def chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the next turn of a conversation; as ``generate``, over the checkpoint's chat template."""
        _check(messages=messages, tools=tools, template_kwargs=template_kwargs)
        _check(sampling=params, cache_salt=cache_salt, priority=priority)
        check_priority(priority, self._config)
        self._llm.admission.check(sum(len(str(message)) for message in messages))
        request = ChatRequest(messages=messages, tools=tools, template_kwargs=template_kwargs)
        prompt = await self._llm.render_chat(request)
        outputs = self.generate(prompt, params, priority=priority, cache_salt=cache_salt, prompt_param="messages")
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def embed(
        self, prompt: str | list[int], params: PoolingParams | None = None, *, cache_salt: str | None = None
    ) -> RequestOutput:
        """The vector of one prompt (text or token ids), as float32 bytes in ``vector`` of the output."""
        _check(prompt=prompt, pooling=params, cache_salt=cache_salt)
        chosen = params or PoolingParams(pooling=self._llm.pooling_defaults.pooling)
        outputs = self._llm.embed(prompt, chosen, _head(cache_salt=cache_salt, param="input"))
        with self._lifecycle.admit() as ongoing:
            async with aclosing(outputs):
                with ongoing:
                    return await anext(outputs)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self._llm.tokenize(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: list[int]) -> str:
        return await self._llm.detokenize(token_ids)

    async def _drain_when_stopped(self) -> None:
        """End running streams in order when Serve stops this replica.

        Serve tells user code of a stop only when no request is left; its replica, in this process, knows at once.
        """
        is_stopping = stop_flag()
        while not is_stopping():  # noqa: ASYNC110 - Serve's own flag, which nothing announces
            await asyncio.sleep(_POLL_S)
        await self._lifecycle.drain(self._config.ingress.shutdown_grace_s)


def _head(**fields: Any) -> RequestHead:
    return RequestHead(request_id=f"handle-{uuid.uuid4()}", **fields)


def _check(**arguments: object) -> None:
    """Check the arguments of a handle call by their names; ``sampling`` and ``pooling`` are two kinds of ``params``."""
    for name, value in arguments.items():
        try:
            _ADAPTERS[name].validate_python(value)
        except ValidationError:
            param = "params" if name in ("sampling", "pooling") else name
            message = f"{param} must be {_KINDS[name][0]}, not {type(value).__name__}."
            raise InvalidRequestError(message, param=param) from None
