"""POST /score and /rerank: how near texts are to each other, by the cosine of their embeddings (a bi-encoder)."""

from __future__ import annotations

from collections.abc import Sequence

from raylm.frontend import RequestHead
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.pooling import Embedded, PoolingHandler, Text
from raylm.ingress.openai.pooling_body import RerankRequest, ScoreRequest


class Score(PoolingHandler[ScoreRequest]):
    """The handler of /score, which answers in vLLM's form."""

    body, prefix = ScoreRequest, "score"

    async def texts(self, body: ScoreRequest) -> Sequence[Text]:
        return [(text, "text_1") for text in body.text_1] + [(text, "text_2") for text in body.text_2]

    def answer(self, body: ScoreRequest, head: RequestHead, embedded: Embedded) -> JSONObject:
        pairs = [(one, len(body.text_1) + other) for one, other in body.pairs()]
        scores = enumerate(_cosines(embedded, pairs))
        return {
            "id": head.request_id,
            "object": "list",
            "created": int(head.arrival_time),
            "model": body.model,
            "data": [{"index": index, "object": "score", "score": cosine} for index, cosine in scores],
            "usage": embedded.usage,
        }


class Rerank(PoolingHandler[RerankRequest]):
    """The handler of /rerank, which answers in Jina's and Cohere's form: the nearest document first."""

    body, prefix = RerankRequest, "rerank"

    async def texts(self, body: RerankRequest) -> Sequence[Text]:
        return [(body.query, "query"), *((text, "documents") for text in body.documents)]

    def answer(self, body: RerankRequest, head: RequestHead, embedded: Embedded) -> JSONObject:
        cosines = _cosines(embedded, [(0, place) for place in range(1, len(embedded.vectors))])
        order = sorted(range(len(cosines)), key=lambda place: -cosines[place])[: body.top_n or None]
        results = [self._result(place, cosines[place], body) for place in order]
        return {"id": head.request_id, "model": body.model, "usage": embedded.usage, "results": results}

    @staticmethod
    def _result(place: int, cosine: float, body: RerankRequest) -> JSONObject:
        shown: JSONObject = {"index": place, "relevance_score": cosine}
        if body.return_documents is not False:
            shown["document"] = {"text": body.documents[place]}
        return shown


def _cosines(embedded: Embedded, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Of each pair of vectors, which have length 1."""
    return [float(embedded.vectors[one] @ embedded.vectors[other]) for one, other in pairs]
