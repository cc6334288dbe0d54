"""POST /v1/embeddings: a vector for each text, as numbers or as OpenAI's clients unpack them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from raylm.frontend import RequestHead, offload
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.pooling import Embedded, PoolingHandler, Text, Vector
from raylm.ingress.openai.pooling_body import EmbeddingRequest
from raylm.ingress.openai.prompts import count_items


class Embeddings(PoolingHandler[EmbeddingRequest]):
    """The handler of the route."""

    body, prefix = EmbeddingRequest, "embd"

    async def texts(self, body: EmbeddingRequest) -> Sequence[Text]:
        return [(prompt, "input") for prompt in await offload(body.inputs, count_items(body.input))]

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
