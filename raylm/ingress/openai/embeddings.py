"""POST /v1/embeddings, and the base of all endpoints that return vectors or compute with them."""

from __future__ import annotations

import base64
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import Request, RequestHead
from raylm.ingress.http.answer import Pieces, json_answer
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.fields import Prompt, Prompts
from raylm.ingress.openai.generation import CutBody, RequestBody, check_target, tokenized
from raylm.ingress.openai.outputs import Usage, merge
from raylm.params import PoolingParams, PoolingType

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM
    from raylm.ingress.openai.outputs import Outputs

MAX_INPUTS = 2048  # OpenAI's limit


class PoolingBody(RequestBody, CutBody):
    pooling: PoolingType | None = None

    def longest(self, max_model_len: int) -> int | None:
        """As in CutBody. A limit above the context means the context."""
        limit = super().longest(max_model_len)
        return None if limit is None else min(limit, max_model_len)

    def pooling_params(self, default: PoolingType) -> PoolingParams:
        """The parameters of pooling.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        return PoolingParams(pooling=self.pooling or default)


B = TypeVar("B", bound=PoolingBody)
Vectors = NDArray[np.float32]
Text = tuple[Prompt, str]
"""A text to embed, and the field that it came from."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of one HTTP request's texts, float32 of [texts, width], and the number of the texts' tokens."""

    vectors: Vectors
    num_tokens: int

    @property
    def usage(self) -> JSONObject:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


class PoolingHandler(ABC, Generic[B]):
    """The handler of a route that embeds texts. Embeds all texts of a body concurrently, then answers.

    ``prefix`` is the prefix of answers' ids. ``listed`` is the field of an answer with an entry for each text.
    """

    prefix: ClassVar[str]
    listed: ClassVar[str] = "data"

    def __init__(self, llm: AsyncLLM, config: Config) -> None:
        self._llm = llm
        self._config = config

    @abstractmethod
    def texts(self, body: B) -> Sequence[Text]:
        """The texts to embed."""

    @abstractmethod
    def answer(self, body: B, head: RequestHead, embedded: Embedded) -> JSONObject:
        """The answer of the route."""

    def num_values(self, embedded: Embedded) -> int:
        """About how many values the answer has."""
        return len(embedded.vectors)

    async def __call__(self, body: B, request: Request) -> list[bytes]:
        head, embedded = await self._embed(body, request)

        def make() -> JSONObject:
            answer = self.answer(body, head, embedded)
            return answer | {self.listed: Pieces(answer[self.listed])}

        return await json_answer(make, self.num_values(embedded))

    async def respond(self, body: B, request: Request) -> JSONObject:
        """The answer of the route as an object."""
        return self.answer(body, *await self._embed(body, request))

    async def streams(
        self, body: B, request: Request, head: RequestHead, params: PoolingParams | None = None
    ) -> tuple[int, Iterator[Outputs]]:
        """The number of texts, and the single output of each, computed when iterated. ``params`` replaces the body's.

        Each stream is made when the iterator reaches it. Until then its text takes no memory beside the body's.
        """
        texts = self.texts(body)
        params = params or body.pooling_params(self._llm.pooling_defaults.pooling)
        request.expect(len(texts), 1)
        prompts = [await self.prompt(text, body) for text in texts]
        reserved = await self._llm.reserve(prompts, params, _heads(head, texts))
        streams = zip(reserved, _heads(head, texts), strict=True)
        return len(texts), (self._llm.embed(prompt, params, nth) for prompt, nth in streams)

    async def prompt(self, text: Text, body: B) -> Prompt:
        """The prompt of a text, truncated as the body says."""
        return await tokenized(text[0], body, self._llm)

    async def _embed(self, body: B, request: Request) -> tuple[RequestHead, Embedded]:
        """Embed all texts. If one fails, the others are cancelled."""
        body.check(self._config)
        check_target(request, self._config)
        name = f"{self.prefix}-{body.request_id or request.id}"
        head = body.head(request, name, time.time(), "input", self._llm)
        count, streams = await self.streams(body, request, head)
        vectors, usage = np.empty((0, 0), np.float32), Usage(count)
        async with aclosing(merge(streams, count, request.at_once(1))) as outputs:
            async for output in outputs:
                usage.count(output)
                assert output.vector is not None, "a pooled request was answered without a vector"
                vector = np.frombuffer(output.vector, np.float32)
                if not len(vectors):
                    vectors = np.empty((count, len(vector)), np.float32)
                vectors[output.place] = vector
        usage.check_finished()
        return head, Embedded(vectors, usage.prompt_tokens)


def _heads(head: RequestHead, texts: Sequence[Text]) -> Iterator[RequestHead]:
    return (head.nth(place, param) for place, (_, param) in enumerate(texts))


class EmbeddingRequest(PoolingBody):
    unserved: ClassVar[frozenset[str]] = frozenset({"messages", "embed_dtype", "endianness", "additional_data"})

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None

    def check(self, config: Config) -> None:
        super().check(config)
        if len(self.input) > MAX_INPUTS:
            raise InvalidRequestError(f"'input' may hold at most {MAX_INPUTS} inputs.", param="input")

    def pooling_params(self, default: PoolingType) -> PoolingParams:
        normalize = self.normalize is not False
        return PoolingParams(pooling=self.pooling or default, normalize=normalize, dimensions=self.dimensions)


class Embeddings(PoolingHandler[EmbeddingRequest]):
    prefix = "embd"

    def texts(self, body: EmbeddingRequest) -> Sequence[Text]:
        return [(prompt, "input") for prompt in body.input]

    def num_values(self, embedded: Embedded) -> int:
        return embedded.vectors.size

    def answer(self, body: EmbeddingRequest, head: RequestHead, embedded: Embedded) -> JSONObject:
        """The answer, whose ``data`` is an iterator: 2048 vectors take megabytes as objects."""
        return {
            "id": head.request_id,
            "object": "list",
            "created": int(head.arrival_time),
            "model": body.model,
            "data": (
                {"object": "embedding", "index": index, "embedding": _shown(vector, body.encoding_format)}
                for index, vector in enumerate(embedded.vectors)
            ),
            "usage": embedded.usage,
        }


def _shown(vector: Vectors, encoding_format: str | None) -> Vectors | str:
    """A vector as it is put into JSON.

    orjson writes the shortest decimals that convert back to the same float32; base64 is of little-endian float32.
    """
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding_format == "base64" else vector
