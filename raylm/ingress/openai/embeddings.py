"""POST /v1/embeddings: a vector for each text, as numbers or as OpenAI's clients unpack them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import RequestHead
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.fields import Prompts
from raylm.ingress.openai.pooling import Embedded, PoolingBody, PoolingHandler, Text, Vector
from raylm.params import PoolingParams, PoolingType

MAX_INPUTS = 2048  # OpenAI's bound


class EmbeddingRequest(PoolingBody):
    """Fields of an embedding."""

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
    """The handler of the route."""

    body, prefix = EmbeddingRequest, "embd"

    def texts(self, body: EmbeddingRequest) -> Sequence[Text]:
        return [(prompt, "input") for prompt in body.input]

    def answer(self, body: EmbeddingRequest, head: RequestHead, embedded: Embedded) -> JSONObject:
        encode = _as_base64 if body.encoding_format == "base64" else _as_is
        return {
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


def _as_base64(vector: Vector) -> Any:
    """float32, little-endian, as OpenAI's clients ask for and unpack by themselves."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _as_is(vector: Vector) -> Any:
    """orjson writes the shortest decimals that give the same float32."""
    return vector
