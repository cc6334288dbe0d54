"""POST /v1/embeddings, and Embedder, by which all endpoints come from texts to vectors."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from raylm.config import Config
from raylm.frontend import RequestHead, aside
from raylm.ingress.generation import interleave
from raylm.ingress.json_body import JSONObject
from raylm.ingress.models import check_model
from raylm.ingress.prompts import Prompt, count_items
from raylm.ingress.protocol_embeddings import EmbeddingRequest, PoolingBody

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of one HTTP request's texts, in order, and how many tokens the texts have."""

    vectors: list[Vector]
    num_tokens: int

    @property
    def usage(self) -> JSONObject:
        """OpenAI's usage object."""
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


class Embedder:
    """Sends the texts of one HTTP request to the engine at once, and gathers their vectors."""

    def __init__(self, llm: AsyncLLM, config: Config) -> None:
        self._llm = llm
        self._config = config

    def head(self, body: PoolingBody, name: str) -> RequestHead:
        """Check ``body``, and make the head of its requests.

        Raises:
            InvalidRequestError: fields contradict each other, or this server does not serve what they ask for.
        """
        body.check(self._config)
        return body.head(name, time.time(), "input", check_model(body.model, self._llm))

    async def __call__(self, inputs: Sequence[tuple[Prompt, str]], body: PoolingBody, head: RequestHead) -> Embedded:
        """Embed ``inputs``, each with the field it came from.

        Raises:
            RayLMError: one of them is refused or failed; the others are given up.
        """
        params = body.pooling_params(self._llm.pooling_defaults.pooling)
        self._llm.admission.expect(len(inputs))
        streams = [
            self._llm.embed(await self._truncate(prompt, body.truncate_prompt_tokens), params, head.nth(place, param))
            for place, (prompt, param) in enumerate(inputs)
        ]
        vectors, num_tokens = [np.empty(0, np.float32)] * len(streams), 0
        async with aclosing(interleave(streams)) as outputs:
            async for place, output in outputs:
                assert output.vector is not None, "a pooled request was answered without a vector"
                vectors[place] = np.frombuffer(output.vector, np.float32)
                num_tokens += len(output.prompt_token_ids)
        return Embedded(vectors, num_tokens)

    async def _truncate(self, prompt: Prompt, limit: int | None) -> Prompt:
        if limit is None:
            return prompt
        token_ids = await self._llm.tokenize(prompt) if isinstance(prompt, str) else prompt
        return token_ids[-limit:]


class Embeddings:
    """The handler of the route."""

    body = EmbeddingRequest

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def __call__(self, data: JSONObject, request_id: str) -> bytes:
        """Answer one request.

        Raises:
            RayLMError: the request is refused or failed.
        """
        body = self.body.parse(data)
        head = self._embedder.head(body, f"embd-{body.request_id or request_id}")
        inputs = [(prompt, "input") for prompt in await aside(body.inputs, count_items(body.input))]
        embedded = await self._embedder(inputs, body, head)
        encode = _as_base64 if body.encoding_format == "base64" else _as_is
        answer = {
            "id": head.request_id,
            "object": "list",
            "created": int(head.arrival_time),
            "model": body.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": encode(vector)}
                for index, vector in enumerate(embedded.vectors)
            ],
            "usage": embedded.usage,
        }
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _as_base64(vector: Vector) -> Any:
    """float32, little-endian, as OpenAI's clients ask for and unpack by themselves."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _as_is(vector: Vector) -> Any:
    """orjson writes the shortest decimals that give the same float32."""
    return vector
