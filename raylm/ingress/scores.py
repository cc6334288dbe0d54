"""POST /score and /rerank: how near texts are to each other, by the cosine of their embeddings (a bi-encoder)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import orjson

from raylm.config import Config
from raylm.ingress.embeddings import Embedder
from raylm.ingress.json_body import JSONObject
from raylm.ingress.models import check_model
from raylm.ingress.protocol_embeddings import PoolingBody, RerankRequest, ScoreRequest
from raylm.params import PoolingParams

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM


class _Scorer:
    """What both handlers share."""

    def __init__(self, llm: AsyncLLM, config: Config) -> None:
        self._llm = llm
        self._config = config
        self._embed = Embedder(llm)

    async def _cosines(
        self, texts: list[tuple[str, str]], pairs: list[tuple[int, int]], body: PoolingBody, name: str
    ) -> tuple[list[float], int]:
        """The cosine of each pair of ``texts`` (each with the field it came from), and the tokens of all texts."""
        params = PoolingParams(pooling=body.pooling or self._llm.pooling_defaults.pooling)
        vectors, num_tokens = await self._embed(texts, params, body, name)
        return [float(vectors[one] @ vectors[other]) for one, other in pairs], num_tokens


class Score(_Scorer):
    """The handler of /score."""

    body = ScoreRequest

    async def __call__(self, data: JSONObject, request_id: str) -> bytes:
        """Answer one request, in vLLM's form.

        Raises:
            RayLMError: the request is refused or failed.
        """
        body = self.body.parse(data)
        body.check(self._config)
        check_model(body.model, self._llm)
        pairs = [(one, len(body.text_1) + other) for one, other in body.pairs()]
        texts = [(text, "text_1") for text in body.text_1] + [(text, "text_2") for text in body.text_2]
        name = f"score-{body.request_id or request_id}"
        cosines, num_tokens = await self._cosines(texts, pairs, body, name)
        return orjson.dumps({
            "id": name,
            "object": "list",
            "created": int(time.time()),
            "model": body.model,
            "data": [{"index": index, "object": "score", "score": cosine} for index, cosine in enumerate(cosines)],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        })  # fmt: skip


class Rerank(_Scorer):
    """The handler of /rerank."""

    body = RerankRequest

    async def __call__(self, data: JSONObject, request_id: str) -> bytes:
        """Answer one request, in Jina's and Cohere's form: the nearest document first.

        Raises:
            RayLMError: the request is refused or failed.
        """
        body = self.body.parse(data)
        body.check(self._config)
        check_model(body.model, self._llm)
        texts = [(body.query, "query"), *((text, "documents") for text in body.documents)]
        pairs = [(0, place) for place in range(1, len(texts))]
        name = f"rerank-{body.request_id or request_id}"
        cosines, num_tokens = await self._cosines(texts, pairs, body, name)
        order = sorted(range(len(cosines)), key=lambda place: -cosines[place])[: body.top_n or None]
        results = [self._result(place, cosines[place], body) for place in order]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return orjson.dumps({"id": name, "model": body.model, "usage": usage, "results": results})

    @staticmethod
    def _result(place: int, cosine: float, body: RerankRequest) -> JSONObject:
        shown: JSONObject = {"index": place, "relevance_score": cosine}
        if body.return_documents is not False:
            shown["document"] = {"text": body.documents[place]}
        return shown
