"""HandleCalls: what Python callers ask of an ingress replica, by the fields and the checks of HTTP's bodies."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, TypeVar

from raylm.config import Config
from raylm.errors import InvalidRequestError, UnsupportedFieldError
from raylm.frontend import Lifecycle, Place, note_call, trace_of
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.chat import ChatCompletionRequest, ChatCompletions
from raylm.ingress.openai.completions import CompletionRequest, Completions
from raylm.ingress.openai.embeddings import EmbeddingRequest, Embeddings
from raylm.ingress.openai.fields import renamed
from raylm.ingress.openai.generation import RequestBody
from raylm.ingress.openai.outputs import Usage, gather
from raylm.ingress.openai.scores import Rerank, RerankRequest, Score, ScoreRequest
from raylm.params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM, RequestOutput
    from raylm.ingress.openai.outputs import Outputs

    Started = tuple[SamplingParams, Outputs]
    Start = Callable[[Place], Awaitable[Started]]

B = TypeVar("B", bound=RequestBody)

# Fields of bodies that only say how an answer over HTTP is written.
_OF_HTTP = frozenset({
    "stream", "stream_options", "echo", "encoding_format", "include_reasoning", "return_token_ids",
    "return_tokens_as_token_ids",
})  # fmt: skip
# Fields of bodies that say how to sample, beside those that SamplingParams has by the same names.
_OF_SAMPLING = frozenset({"best_of", "max_completion_tokens", "response_format", "top_logprobs"})


# The paths of calls in timelines.
_PATHS: dict[type[RequestBody], str] = {
    CompletionRequest: "handle/completions",
    ChatCompletionRequest: "handle/chat",
    EmbeddingRequest: "handle/embeddings",
    ScoreRequest: "handle/score",
    RerankRequest: "handle/rerank",
}


class HandleCalls:
    """Reads calls as the bodies of HTTP's routes and starts them as those do; ``params`` may say how to sample."""

    def __init__(self, llm: AsyncLLM, config: Config, lifecycle: Lifecycle) -> None:
        self._llm = llm
        self._config = config
        self._lifecycle = lifecycle
        self._completions = Completions(llm, config)
        self._conversations = ChatCompletions(llm, config)
        self._embeddings = Embeddings(llm, config)
        self._score = Score(llm, config)
        self._rerank = Rerank(llm, config)

    def completion(self, prompt: object, params: SamplingParams | None, fields: JSONObject) -> Start:
        async def start(place: Place) -> Started:
            _check_params(SamplingParams, params, fields)
            place.wait(len(str(prompt)))
            body = (await self._read(CompletionRequest, {"prompt": prompt} | fields)).at(place)
            _check_one(len(body.prompt))
            started = await self._completions.start(body, _name(body), time.time(), params)
            return started.params, started.outputs[0]

        return start

    def conversation(self, messages: object, params: SamplingParams | None, fields: JSONObject) -> Start:
        async def start(place: Place) -> Started:
            _check_params(SamplingParams, params, fields)
            place.wait(len(str(messages)))
            body = (await self._read(ChatCompletionRequest, {"messages": messages} | fields)).at(place)
            return await self._conversations.start(body, _name(body), time.time(), params)

        return start

    async def stream(self, start: Start) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a call. ``start`` comes from ``completion`` or ``conversation``.

        Raises:
            RayLMError: what a client of HTTP would get as an error; also where the engine gave the request up.
        """
        with self._open() as place:
            ongoing = place.ongoing
            with ongoing:
                _, outputs = await start(place)
            usage = Usage()
            async with aclosing(outputs):
                while usage.unfinished:
                    with ongoing:
                        output = await anext(outputs, None)
                    if output is None:
                        break
                    usage.count(output)
                    yield output
            usage.check_finished()

    async def whole(self, start: Start) -> RequestOutput:
        """As ``stream``, with everything in one output."""
        with self._open() as place, place.ongoing:
            params, outputs = await start(place)
            (output,) = await gather([outputs], params.n, Usage(), at_once=1)
        return output

    async def embedding(self, prompt: object, params: PoolingParams | None, fields: JSONObject) -> RequestOutput:
        _check_params(PoolingParams, params, fields)
        with self._admitted(prompt) as place, renamed({"input": "prompt"}):
            body = (await self._read(EmbeddingRequest, {"input": prompt} | fields)).at(place)
            _check_one(len(body.input))
            body.check(self._config)
            head = body.head(_name(body), time.time(), "input", self._llm)
            (outputs,) = await self._embeddings.streams(body, head, params)
            async with aclosing(outputs):
                return await anext(outputs)

    async def score(self, fields: JSONObject) -> JSONObject:
        with self._admitted(fields) as place:
            return await self._score.respond((await self._read(ScoreRequest, fields)).at(place), _uuid())

    async def rerank(self, fields: JSONObject) -> JSONObject:
        with self._admitted(fields) as place:
            return await self._rerank.respond((await self._read(RerankRequest, fields)).at(place), _uuid())

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._admitted(text):
            return await self._llm.tokenize(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: list[int]) -> str:
        with self._admitted(token_ids):
            return await self._llm.detokenize(token_ids)

    @contextmanager
    def _open(self) -> Iterator[Place]:
        """A place for one call. At the end of the block the call gives back everything that it has taken."""
        place = Place(self._llm.admission)
        with self._lifecycle.admit(place.ongoing):
            try:
                yield place
            finally:
                place.leave()

    @contextmanager
    def _admitted(self, asked: object) -> Iterator[Place]:
        """A place for a call with one answer. The length of ``asked`` as text estimates the prompt's size."""
        with self._open() as place, place.ongoing:
            place.wait(len(str(asked)))
            yield place

    async def _read(self, body: type[B], fields: JSONObject) -> B:
        given = {name: value for name, value in fields.items() if value is not None}
        parent, state = (_header(given, name) for name in ("traceparent", "tracestate"))
        note_call(_PATHS[body], trace_of(parent or None, state))
        for name in given:
            if name in _OF_HTTP:
                message = f"'{name}' says how an answer over HTTP is written; calls by handle do not have it."
                raise UnsupportedFieldError(message, param=name)
        return await body.read({"model": self._llm.model_name} | given)


def _header(given: JSONObject, name: str) -> str:
    """Take out what a client of HTTP would say in a header."""
    if not isinstance(value := given.pop(name, ""), str):
        raise InvalidRequestError(f"'{name}' must be a str.", param=name)
    return value


def _name(body: RequestBody) -> str:
    return f"handle-{body.request_id or _uuid()}"


def _uuid() -> str:
    return uuid.uuid4().hex


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
