"""handle: a served model as Python sees it on the same Ray; what its caller lets go of is ended in the engine."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from raylm.errors import EngineDiedError, RayLMError
from raylm.params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import RequestOutput

T = TypeVar("T")


def handle(app: str | DeploymentHandle = "default") -> Handle:
    """The model of a Serve application, by its name, or by the DeploymentHandle that ``build_app`` was bound to."""
    return Handle(serve.get_app_handle(app) if isinstance(app, str) else app)


class Handle:
    """Calls of a served model. They begin at once, and end when what they return is closed or let go of, or when this
    process ends.

    ``fields`` are those of the HTTP route of the same purpose, with its defaults; sampling may be said by ``params``
    instead. ``model`` names a LoRA adapter.

    Raises:
        RayLMError: from reading what a call returns: what a client of HTTP would get as an error.
    """

    def __init__(self, ingress: DeploymentHandle) -> None:
        self._ingress = ingress
        self._presence = ray.put(None)  # replicas ask its owner, this process, whether it is alive

    def __reduce__(self) -> tuple[object, ...]:
        return Handle, (self._ingress,)

    def generate(self, prompt: str | list[int], params: SamplingParams | None = None, **fields: Any) -> Outputs:
        """Continue one prompt, text or token ids; ``fields`` of POST /v1/completions."""
        return self._stream("generate", prompt, params, **fields)

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None, **fields: Any) -> Outputs:
        """The next turn of a conversation; ``fields`` of POST /v1/chat/completions."""
        return self._stream("chat", messages, params, **fields)

    def complete(
        self, prompt: str | list[int], params: SamplingParams | None = None, **fields: Any
    ) -> Result[RequestOutput]:
        """As ``generate``, whole."""
        return self._result("complete", prompt, params, **fields)

    def reply(
        self, messages: list[dict[str, Any]], params: SamplingParams | None = None, **fields: Any
    ) -> Result[RequestOutput]:
        """As ``chat``, whole."""
        return self._result("reply", messages, params, **fields)

    def embed(
        self, prompt: str | list[int], params: PoolingParams | None = None, **fields: Any
    ) -> Result[RequestOutput]:
        """The vector of one prompt, float32 bytes in ``vector``; ``fields`` of POST /v1/embeddings."""
        return self._result("embed", prompt, params, **fields)

    def score(self, text_1: str | list[str], text_2: str | list[str], **fields: Any) -> Result[dict[str, Any]]:
        """What POST /score answers."""
        return self._result("score", text_1, text_2, **fields)

    def rerank(self, query: str, documents: list[str], **fields: Any) -> Result[dict[str, Any]]:
        """What POST /rerank answers."""
        return self._result("rerank", query, documents, **fields)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> Result[list[int]]:
        return self._result("tokenize", text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: list[int]) -> Result[str]:
        return self._result("detokenize", token_ids)

    def _stream(self, method: str, *args: object, **fields: Any) -> Outputs:
        return Outputs(self._ingress.options(stream=True).stream_to.remote([self._presence], method, *args, **fields))

    def _result(self, method: str, *args: object, **fields: Any) -> Result[Any]:
        return Result(self._ingress.answer_to.remote([self._presence], method, *args, **fields))


class _Call:
    """A call that is cancelled, unless it has ended, when ``close`` is called or nobody refers to it any more."""

    def __init__(self, response: DeploymentResponse | DeploymentResponseGenerator) -> None:
        self._cancel = weakref.finalize(self, response.cancel)
        self._cancel.atexit = False  # Ray may be gone by then, and the replica sees the end of this process

    def close(self) -> None:
        """Give the call up; safe to repeat, and after its end."""
        self._cancel()

    async def aclose(self) -> None:
        self.close()

    def _failed(self, error: BaseException) -> BaseException:
        """What to raise for ``error``, which ended the call."""
        self.close()
        if isinstance(error, RayActorError):
            return EngineDiedError("The ingress replica was lost while it served this call; sending it again is safe.")
        cause = error.cause if isinstance(error, RayTaskError) else None
        return cause if isinstance(cause, RayLMError) else error


class Outputs(_Call):
    """The outputs of one call, as deltas, for ``for`` or (on an event loop) ``async for``; the last is ``finished``."""

    def __init__(self, response: DeploymentResponseGenerator) -> None:
        super().__init__(response)
        self._response = response

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if not self._cancel.alive:
            raise StopIteration
        try:
            return self._response.__next__()  # type: ignore[no-any-return]
        except StopIteration:
            self._cancel.detach()
            raise
        except BaseException as error:
            raise self._failed(error) from None

    async def __anext__(self) -> RequestOutput:
        if not self._cancel.alive:
            raise StopAsyncIteration
        try:
            return await self._response.__anext__()  # type: ignore[no-any-return]
        except StopAsyncIteration:
            self._cancel.detach()
            raise
        except BaseException as error:
            raise self._failed(error) from None


class Result(_Call, Generic[T]):
    """The answer of one call, by ``await`` or, outside of event loops, by ``result``."""

    def __init__(self, response: DeploymentResponse) -> None:
        super().__init__(response)
        self._response = response

    def __await__(self) -> Generator[Any, None, T]:
        try:
            found: T = yield from self._response.__await__()
        except BaseException as error:
            raise self._failed(error) from None
        self._cancel.detach()
        return found

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for it; TimeoutError gives the call up."""
        try:
            found: T = self._response.result(timeout_s=timeout_s)
        except BaseException as error:
            raise self._failed(error) from None
        self._cancel.detach()
        return found
