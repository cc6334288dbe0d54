"""handle: calls a served model from Python on the same Ray cluster. A dropped call is aborted in the engine."""

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
    """A handle to the model of a Serve application.

    ``app`` is the name of the application, or the DeploymentHandle of an application made by ``build_app``.
    """
    return Handle(serve.get_app_handle(app) if isinstance(app, str) else app)


class Handle:
    """Calls a served model. A call begins at once. It is aborted when its returned object is closed or garbage
    collected, or when this process ends.

    ``fields`` are the fields of the HTTP route for the same purpose, with the same defaults. Sampling may be given by
    ``params`` instead. The field ``model`` names a LoRA adapter.

    Raises:
        RayLMError: reading a result raises the error that an HTTP client would get.
    """

    def __init__(self, ingress: DeploymentHandle) -> None:
        self._ingress = ingress
        self._presence = ray.put(None)  # replicas ask Ray whether the owner of this object, this process, is alive

    def __reduce__(self) -> tuple[object, ...]:
        return Handle, (self._ingress,)

    def generate(self, prompt: str | list[int], params: SamplingParams | None = None, **fields: Any) -> Outputs:
        """Continue one prompt, given as text or token ids; ``fields`` as in POST /v1/completions."""
        return self._stream("generate", prompt, params, **fields)

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None, **fields: Any) -> Outputs:
        """Generate the next turn of a conversation; ``fields`` as in POST /v1/chat/completions."""
        return self._stream("chat", messages, params, **fields)

    def complete(
        self, prompt: str | list[int], params: SamplingParams | None = None, **fields: Any
    ) -> Result[RequestOutput]:
        """Like ``generate``, but returns the whole output at once."""
        return self._result("complete", prompt, params, **fields)

    def reply(
        self, messages: list[dict[str, Any]], params: SamplingParams | None = None, **fields: Any
    ) -> Result[RequestOutput]:
        """Like ``chat``, but returns the whole output at once."""
        return self._result("reply", messages, params, **fields)

    def embed(
        self, prompt: str | list[int], params: PoolingParams | None = None, **fields: Any
    ) -> Result[RequestOutput]:
        """Embed one prompt: float32 bytes in ``vector`` of the output; ``fields`` as in POST /v1/embeddings."""
        return self._result("embed", prompt, params, **fields)

    def score(self, text_1: str | list[str], text_2: str | list[str], **fields: Any) -> Result[dict[str, Any]]:
        """Score pairs of texts. Returns the answer of POST /score."""
        return self._result("score", text_1, text_2, **fields)

    def rerank(self, query: str, documents: list[str], **fields: Any) -> Result[dict[str, Any]]:
        """Rank documents for a query. Returns the answer of POST /rerank."""
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
    """A call that is cancelled by ``close``, or when it is garbage collected before its end."""

    def __init__(self, response: DeploymentResponse | DeploymentResponseGenerator) -> None:
        self._cancel = weakref.finalize(self, response.cancel)
        self._cancel.atexit = False  # Ray may be shut down by then; the replica notices the end of this process

    def close(self) -> None:
        """Cancel the call. Safe to repeat, and after the end of the call."""
        self._cancel()

    async def aclose(self) -> None:
        self.close()

    def _failed(self, error: BaseException) -> BaseException:
        """Close the call, and convert the error that ended it to the exception to raise."""
        self.close()
        if isinstance(error, RayActorError):
            return EngineDiedError("The ingress replica was lost while it served this call; sending it again is safe.")
        cause = error.cause if isinstance(error, RayTaskError) else None
        return cause if isinstance(cause, RayLMError) else error


class Outputs(_Call):
    """Iterates over the outputs of one call, as deltas, by ``for`` or ``async for``. The last one is ``finished``."""

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
    """The answer of one call. Use ``await`` on an event loop, and ``result`` elsewhere."""

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
        """Wait for the answer, at most ``timeout_s`` seconds. A TimeoutError cancels the call."""
        try:
            found: T = self._response.result(timeout_s=timeout_s)
        except BaseException as error:
            raise self._failed(error) from None
        self._cancel.detach()
        return found
