"""POST /score and /rerank: how near texts are to each other, by the cosine of their embeddings (a bi-encoder)."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from raylm.ingress.embeddings import Embedded, Embedder
from raylm.ingress.json_body import JSONObject
from raylm.ingress.protocol_embeddings import RerankRequest, ScoreRequest


class Score:
    """The handler of /score."""

    body = ScoreRequest

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def __call__(self, data: JSONObject, request_id: str) -> bytes:
        """Answer one request, in vLLM's form.

        Raises:
            RayLMError: the request is refused or failed.
        """
        body = self.body.parse(data)
        head = self._embedder.head(body, f"score-{body.request_id or request_id}")
        pairs = [(one, len(body.text_1) + other) for one, other in body.pairs()]
        texts = [(text, "text_1") for text in body.text_1] + [(text, "text_2") for text in body.text_2]
        embedded = await self._embedder(texts, body, head)
        return orjson.dumps({
            "id": head.request_id,
            "object": "list",
            "created": int(head.arrival_time),
            "model": body.model,
            "data": [
                {"index": index, "object": "score", "score": cosine}
                for index, cosine in enumerate(_cosines(embedded, pairs))
            ],
            "usage": embedded.usage,
        })  # fmt: skip


class Rerank:
    """The handler of /rerank."""

    body = RerankRequest

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def __call__(self, data: JSONObject, request_id: str) -> bytes:
        """Answer one request, in Jina's and Cohere's form: the nearest document first.

        Raises:
            RayLMError: the request is refused or failed.
        """
        body = self.body.parse(data)
        head = self._embedder.head(body, f"rerank-{body.request_id or request_id}")
        texts = [(body.query, "query"), *((text, "documents") for text in body.documents)]
        embedded = await self._embedder(texts, body, head)
        cosines = _cosines(embedded, [(0, place) for place in range(1, len(texts))])
        order = sorted(range(len(cosines)), key=lambda place: -cosines[place])[: body.top_n or None]
        results = [_result(place, cosines[place], body) for place in order]
        answer = {"id": head.request_id, "model": body.model, "usage": embedded.usage, "results": results}
        return orjson.dumps(answer)


def _cosines(embedded: Embedded, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Of each pair of vectors, which have length 1."""
    return [float(embedded.vectors[one] @ embedded.vectors[other]) for one, other in pairs]


def _result(place: int, cosine: float, body: RerankRequest) -> JSONObject:
    shown: JSONObject = {"index": place, "relevance_score": cosine}
    if body.return_documents is not False:
        shown["document"] = {"text": body.documents[place]}
    return shown
