"""POST /score and /rerank: how well texts match.

A cross-encoder scores each pair of texts. For other models it is the cosine of their embeddings (a bi-encoder).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import Request, RequestHead
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.embeddings import B, Embedded, PoolingBody, PoolingHandler, Text
from raylm.ingress.openai.fields import Prompt, StringOrStrings
from raylm.params import PoolingParams

if TYPE_CHECKING:
    from raylm.ingress.openai.outputs import Outputs

MAX_DOCUMENTS = 1024


class ScoreRequest(PoolingBody):
    """The body of /score: one text against many, or pairs of texts."""

    unserved: ClassVar[frozenset[str]] = frozenset({
        "activation", "use_activation", "data_1", "data_2", "mm_processor_kwargs", "instruction",
    })  # fmt: skip

    text_1: StringOrStrings | None = None
    text_2: StringOrStrings | None = None
    queries: StringOrStrings | None = None
    documents: StringOrStrings | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The fields with the texts: one of the two pairs of names."""
        given = self.queries is not None or self.documents is not None
        return ("queries", "documents") if given else ("text_1", "text_2")

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The texts in both fields of ``names``."""
        one, other = (getattr(self, name) or [] for name in self.names)
        return one, other

    def check(self, config: Config) -> None:
        super().check(config)
        for name in self.names:
            if getattr(self, name) is None:
                raise InvalidRequestError(f"'{name}' is required.", param=name)
            _check_texts(name, getattr(self, name))
        for name in {"text_1", "text_2"} - {*self.names}:
            if getattr(self, name) is not None:
                message = f"Give 'text_1' and 'text_2', or 'queries' and 'documents', but not '{name}' with 'queries'."
                raise InvalidRequestError(message, param=name)
        (first, second), (one, other) = self.names, self.sides
        if len(one) not in (1, len(other)):
            raise InvalidRequestError(f"'{first}' must hold one text, or as many as '{second}'.", param=first)


class RerankRequest(PoolingBody):
    """The body of /rerank, as Jina's and Cohere's clients send it.

    ``max_tokens_per_doc`` keeps the first tokens of each document, without special tokens; 0 keeps all.
    """

    unserved: ClassVar[frozenset[str]] = frozenset({
        "activation", "use_activation", "rank_fields", "max_chunks_per_doc", "mm_processor_kwargs", "instruction",
    })  # fmt: skip

    query: str
    documents: Annotated[list[str], Field(fail_fast=True)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = None

    def check(self, config: Config) -> None:
        super().check(config)
        _check_texts("query", [self.query])
        _check_texts("documents", self.documents)


def _check_texts(name: str, texts: list[str]) -> None:
    if not 1 <= len(texts) <= MAX_DOCUMENTS:
        raise InvalidRequestError(f"'{name}' must hold between 1 and {MAX_DOCUMENTS} texts.", param=name)
    if not all(texts):
        raise InvalidRequestError(f"'{name}' must not hold an empty text.", param=name)


Pair = tuple[int, int]
"""The places of two texts of a body."""


class ScoringHandler(PoolingHandler[B]):
    """The handler of a route with a score for each pair of texts."""

    @abstractmethod
    def pairs(self, body: B, count: int) -> list[Pair]:
        """The pairs to score of ``count`` texts."""

    async def streams(
        self, body: B, request: Request, head: RequestHead, params: PoolingParams | None = None
    ) -> tuple[int, Iterator[Outputs]]:
        """As in the base class. Of a cross-encoder: the number of pairs, and the single output of each."""
        if not self._llm.pooling_defaults.scores_pairs:
            return await super().streams(body, request, head, params)
        for name in ("pooling", "truncate_prompt_tokens"):
            if getattr(body, name) is not None:
                message = f"'{name}' is not served by a model that scores pairs of texts. Omit it."
                raise InvalidRequestError(message, param=name)
        texts = self.texts(body)
        pairs = self.pairs(body, len(texts))
        request.expect(len(pairs), 1)
        heads = [head.nth(place, texts[other][1]) for place, (_, other) in enumerate(pairs)]
        found = [await self._tokenized(texts[one], texts[other], body) for one, other in pairs]
        each = [replace(body.pooling_params("cls"), pair_at=pair_at) for _, pair_at in found]
        reserved = await self._llm.reserve([prompt for prompt, _ in found], each[0], heads)
        streams = zip(reserved, each, heads, strict=True)
        return len(pairs), (self._llm.embed(prompt, pair, nth) for prompt, pair, nth in streams)

    async def _tokenized(self, one: Text, other: Text, body: B) -> tuple[list[int], int]:
        first, second = await self.prompt(one, body), await self.prompt(other, body)
        assert isinstance(first, str), "texts are truncated by tokens only if asked"
        assert isinstance(second, str), "texts are truncated by tokens only if asked"
        return await self._llm.tokenize_pair(first, second, other[1])

    def scores(self, body: B, embedded: Embedded) -> list[float]:
        """The score of each pair, in order."""
        if self._llm.pooling_defaults.scores_pairs:
            return [float(vector[0]) for vector in embedded.vectors]
        return _cosines(embedded, self.pairs(body, len(embedded.vectors)))


class Score(ScoringHandler[ScoreRequest]):
    """Answers in vLLM's form."""

    prefix = "score"

    def pairs(self, body: ScoreRequest, count: int) -> list[Pair]:
        firsts, others = map(len, body.sides)
        return [(place if firsts > 1 else 0, firsts + place) for place in range(others)]

    def texts(self, body: ScoreRequest) -> Sequence[Text]:
        return [(text, name) for name, side in zip(body.names, body.sides, strict=True) for text in side]

    def answer(self, body: ScoreRequest, head: RequestHead, embedded: Embedded) -> JSONObject:
        return {
            "id": head.request_id,
            "object": "list",
            "created": int(head.arrival_time),
            "model": body.model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(self.scores(body, embedded))
            ],
            "usage": embedded.usage,
        }


class Rerank(ScoringHandler[RerankRequest]):
    """Answers in Jina's and Cohere's form: the document that matches best first."""

    prefix = "rerank"
    listed = "results"

    def pairs(self, body: RerankRequest, count: int) -> list[Pair]:
        return [(0, place) for place in range(1, count)]

    def texts(self, body: RerankRequest) -> Sequence[Text]:
        return [(body.query, "query"), *((text, "documents") for text in body.documents)]

    async def prompt(self, text: Text, body: RerankRequest) -> Prompt:
        whole, field = text
        if field == "documents" and body.max_tokens_per_doc and isinstance(whole, str):
            token_ids = await self._llm.tokenize(whole, add_special_tokens=False)
            if len(token_ids) > body.max_tokens_per_doc:
                whole = await self._llm.detokenize(token_ids[: body.max_tokens_per_doc])
        return await super().prompt((whole, field), body)

    def answer(self, body: RerankRequest, head: RequestHead, embedded: Embedded) -> JSONObject:
        scores = self.scores(body, embedded)
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n or None]
        results: list[JSONObject] = [{"index": place, "relevance_score": scores[place]} for place in order]
        if body.return_documents is not False:
            results = [result | {"document": {"text": body.documents[result["index"]]}} for result in results]
        return {"id": head.request_id, "model": body.model, "usage": embedded.usage, "results": results}


def _cosines(embedded: Embedded, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """The cosine of each pair of vectors, which have length 1."""
    return [float(embedded.vectors[one] @ embedded.vectors[other]) for one, other in pairs]
