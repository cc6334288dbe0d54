"""HandleCalls: what Python callers ask of an ingress replica, by the fields and the checks of HTTP's bodies."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from raylm.config import Config
from raylm.errors import InvalidRequestError, UnsupportedFieldError
from raylm.frontend import Arrival, Request, Requests, trace_of
from raylm.ingress.callers import Callers
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.middleware import REQUEST_ID
from raylm.ingress.openai.chat import ChatCompletionRequest, ChatCompletions
from raylm.ingress.openai.completions import CompletionRequest, Completions
from raylm.ingress.openai.embeddings import EmbeddingRequest, Embeddings
from raylm.ingress.openai.fields import renamed
from raylm.ingress.openai.generation import RequestBody
from raylm.ingress.openai.outputs import Usage, gather
from raylm.ingress.openai.scores import Rerank, RerankRequest, Score, ScoreRequest
from raylm.params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from ray import ObjectRef

    from raylm.frontend import AsyncLLM, RequestOutput
    from raylm.ingress.openai.outputs import Outputs

    Started = tuple[SamplingParams, Outputs]
    Start = Callable[[Request], Awaitable[Started]]


B = TypeVar("B", bound=RequestBody)

# Fields of bodies that only say how an answer over HTTP is written.
_OF_HTTP = frozenset({
    "stream", "stream_options", "echo", "encoding_format", "include_reasoning", "return_token_ids",
    "return_tokens_as_token_ids",
})  # fmt: skip
# Fields of bodies that set sampling and that SamplingParams has by other names.
_OF_SAMPLING = frozenset({"best_of", "max_completion_tokens", "response_format", "top_logprobs"})
# The fields for the span of the caller, which clients of HTTP send as headers of the same names.
_SPAN = ("traceparent", "tracestate")


class HandleCalls:
    """Reads calls as the bodies of HTTP's routes and starts them as those do; ``params`` may say how to sample.

    ``caller`` is an object that the calling process owns. When that process is gone its calls end. None in calls that
    no raylm.Handle made.

    Raises:
        RayLMError: what a client of HTTP would get as an error; also where the engine gave the request up.
    """

    def __init__(self, llm: AsyncLLM, config: Config, requests: Requests, callers: Callers | None = None) -> None:
        self._llm = llm
        self._config = config
        self._requests = requests
        self._callers = callers or Callers()
        self._completions = Completions(llm, config)
        self._conversations = ChatCompletions(llm, config)
        self._embeddings = Embeddings(llm, config)
        self._score = Score(llm, config)
        self._rerank = Rerank(llm, config)

    def generate(
        self, caller: ObjectRef | None, prompt: object, params: SamplingParams | None = None, /, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        return self._stream(caller, "completions", prompt, fields, self._completion(prompt, params, fields))

    def chat(
        self, caller: ObjectRef | None, messages: object, params: SamplingParams | None = None, /, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        return self._stream(caller, "chat", messages, fields, self._conversation(messages, params, fields))

    async def complete(
        self, caller: ObjectRef | None, prompt: object, params: SamplingParams | None = None, /, **fields: Any
    ) -> RequestOutput:
        """As ``generate``, with everything in one output."""
        return await self._whole(caller, "completions", prompt, fields, self._completion(prompt, params, fields))

    async def reply(
        self, caller: ObjectRef | None, messages: object, params: SamplingParams | None = None, /, **fields: Any
    ) -> RequestOutput:
        """As ``chat``, with everything in one output."""
        return await self._whole(caller, "chat", messages, fields, self._conversation(messages, params, fields))

    async def embed(
        self, caller: ObjectRef | None, prompt: object, params: PoolingParams | None = None, /, **fields: Any
    ) -> RequestOutput:
        async with self._open(caller, "embeddings", prompt, fields) as request:
            with request.working(), renamed({"input": "prompt"}):
                _check_params(PoolingParams, params, fields)
                body = await self._read(EmbeddingRequest, {"input": prompt} | fields)
                _check_one(len(body.input))
                body.check(self._config)
                head = body.head(request, request.id, time.time(), "input", self._llm)
                _, (outputs,) = await self._embeddings.streams(body, request, head, params)
                async with aclosing(outputs):
                    return await anext(outputs)

    async def score(self, caller: ObjectRef | None, text_1: object, text_2: object, /, **fields: Any) -> JSONObject:
        fields = {"text_1": text_1, "text_2": text_2} | fields
        async with self._open(caller, "score", fields, fields) as request:
            with request.working():
                return await self._score.respond(await self._read(ScoreRequest, fields), request)

    async def rerank(self, caller: ObjectRef | None, query: object, documents: object, /, **fields: Any) -> JSONObject:
        fields = {"query": query, "documents": documents} | fields
        async with self._open(caller, "rerank", fields, fields) as request:
            with request.working():
                return await self._rerank.respond(await self._read(RerankRequest, fields), request)

    async def tokenize(self, caller: ObjectRef | None, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        async with self._open(caller, "tokenize", text, {}) as request:
            with request.working():
                return await self._llm.tokenize(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, caller: ObjectRef | None, token_ids: list[int], /) -> str:
        async with self._open(caller, "detokenize", token_ids, {}) as request:
            with request.working():
                return await self._llm.detokenize(token_ids)

    def _completion(self, prompt: object, params: SamplingParams | None, fields: JSONObject) -> Start:
        async def start(request: Request) -> Started:
            _check_params(SamplingParams, params, fields)
            body = await self._read(CompletionRequest, {"prompt": prompt} | fields)
            _check_one(len(body.prompt))
            started = await self._completions.start(body, request, request.id, time.time(), params)
            return started.params, started.outputs[0]

        return start

    def _conversation(self, messages: object, params: SamplingParams | None, fields: JSONObject) -> Start:
        async def start(request: Request) -> Started:
            _check_params(SamplingParams, params, fields)
            body = await self._read(ChatCompletionRequest, {"messages": messages} | fields)
            return await self._conversations.start(body, request, request.id, time.time(), params)

        return start

    async def _stream(
        self, caller: ObjectRef | None, path: str, asked: object, fields: JSONObject, start: Start
    ) -> AsyncGenerator[RequestOutput, None]:
        async with self._open(caller, path, asked, fields) as request:
            with request.working():
                _, outputs = await start(request)
            usage = Usage()
            async with aclosing(outputs):
                while usage.unfinished:
                    with request.working():
                        output = await anext(outputs, None)
                    if output is None:
                        break
                    usage.count(output)
                    yield output
            usage.check_finished()

    async def _whole(
        self, caller: ObjectRef | None, path: str, asked: object, fields: JSONObject, start: Start
    ) -> RequestOutput:
        async with self._open(caller, path, asked, fields) as request:
            with request.working():
                params, outputs = await start(request)
                (output,) = await gather([outputs], params.n, Usage(), at_once=1)
        return output

    @asynccontextmanager
    async def _open(
        self, caller: ObjectRef | None, path: str, asked: object, fields: JSONObject
    ) -> AsyncIterator[Request]:
        """The request of one call. The length of ``asked`` as text estimates the size of its prompts."""
        traceparent, tracestate = (given if isinstance(given := fields.get(name), str) else "" for name in _SPAN)
        arrival = Arrival(
            _name(fields.get("request_id")), f"handle/{path}", None, trace_of(traceparent or None, tracestate)
        )
        async with self._requests.open(arrival, self._llm.admission) as request:
            if caller is not None:
                request.take(self._callers.waiting(caller, request))
            request.wait(len(str(asked)))
            yield request

    async def _read(self, body: type[B], fields: JSONObject) -> B:
        given = {name: value for name, value in fields.items() if value is not None}
        for name in _SPAN:
            if not isinstance(given.pop(name, ""), str):
                raise InvalidRequestError(f"'{name}' must be a str.", param=name)
        for name in given:
            if name in _OF_HTTP:
                message = f"'{name}' says how an answer over HTTP is written; calls by handle do not have it."
                raise UnsupportedFieldError(message, param=name)
        return await body.read({"model": self._llm.model_name} | given)


def _name(given: object) -> str:
    """The id of a call that has ``given`` one, or a new id."""
    return f"handle-{given if isinstance(given, str) and REQUEST_ID.match(given) else uuid.uuid4().hex}"


def _check_one(count: int) -> None:
    if count != 1:
        message = "'prompt' must be one prompt, a str or a list of token ids; call once for each."
        raise InvalidRequestError(message, param="prompt")


def _check_params(kind: type[SamplingParams | PoolingParams], params: object, fields: JSONObject) -> None:
    if params is None:
        return
    if not isinstance(params, kind):
        message = f"params must be {kind.__name__}, not {type(params).__name__}."
        raise InvalidRequestError(message, param="params")
    said = {field.name for field in dataclasses.fields(kind)} | _OF_SAMPLING
    for name, value in fields.items():
        if name in said and value is not None:
            raise InvalidRequestError(f"'{name}' cannot be combined with 'params', which say it already.", param=name)
