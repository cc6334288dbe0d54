"""POST /v1/embeddings, and the base of all endpoints that return vectors or compute with them."""

from __future__ import annotations

import base64
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
Vector = NDArray[np.float32]
Text = tuple[Prompt, str]
"""A text to embed, and the field that it came from."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of one HTTP request's texts, in order, and the number of their tokens."""

    vectors: list[Vector]
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
        """The answer of the route. Vectors in it may be arrays."""

    async def __call__(self, body: B, request: Request) -> list[bytes]:
        answer = await self.respond(body, request)
        entries = answer[self.listed]
        numbers = sum(1 + len(entry.get("embedding", ())) for entry in entries)
        return await json_answer(lambda: answer | {self.listed: Pieces(entries)}, numbers)

    async def respond(self, body: B, request: Request) -> JSONObject:
        """The answer of the route, with vectors as arrays."""
        body.check(self._config)
        check_target(request, self._config)
        name = f"{self.prefix}-{body.request_id or request.id}"
        head = body.head(request, name, time.time(), "input", self._llm)
        return self.answer(body, head, await self._embed(await self.streams(body, request, head), request.at_once(1)))

    async def streams(
        self, body: B, request: Request, head: RequestHead, params: PoolingParams | None = None
    ) -> list[Outputs]:
        """The single output of each text, computed when iterated. ``params`` replaces the body's parameters."""
        texts = self.texts(body)
        params = params or body.pooling_params(self._llm.pooling_defaults.pooling)
        request.expect(len(texts), 1)
        heads = [head.nth(place, param) for place, (_, param) in enumerate(texts)]
        prompts = [await self.prompt(text, body) for text in texts]
        reserved = await self._llm.reserve(prompts, params, heads)
        return [self._llm.embed(prompt, params, nth) for prompt, nth in zip(reserved, heads, strict=True)]

    async def prompt(self, text: Text, body: B) -> Prompt:
        """The prompt of a text, truncated as the body says."""
        return await tokenized(text[0], body, self._llm)

    async def _embed(self, streams: Sequence[Outputs], at_once: float) -> Embedded:
        """Embed all texts. If one fails, the others are cancelled."""
        vectors, usage = [np.empty(0, np.float32)] * len(streams), Usage(len(streams))
        async with aclosing(merge(streams, at_once)) as outputs:
            async for output in outputs:
                usage.count(output)
                assert output.vector is not None, "a pooled request was answered without a vector"
                vectors[output.place] = np.frombuffer(output.vector, np.float32)
        usage.check_finished()
        return Embedded(vectors, usage.prompt_tokens)


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

    def answer(self, body: EmbeddingRequest, head: RequestHead, embedded: Embedded) -> JSONObject:
        # orjson writes the shortest decimals that convert back to the same float32; base64 is of little-endian float32.
        shown: list[Vector | str] = list(embedded.vectors)
        if body.encoding_format == "base64":
            shown = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in embedded.vectors]
        return {
            "id": head.request_id,
            "object": "list",
            "created": int(head.arrival_time),
            "model": body.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": embedding} for index, embedding in enumerate(shown)
            ],
            "usage": embedded.usage,
        }
