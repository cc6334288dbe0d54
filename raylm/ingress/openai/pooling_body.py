"""The bodies of /v1/embeddings, /score and /rerank."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.ingress.openai.fields import StringOrStrings
from raylm.ingress.openai.prompts import Prompt, Prompts, split_prompts
from raylm.ingress.openai.request_body import RequestBody
from raylm.params import PoolingParams, PoolingType

MAX_INPUTS = 2048  # OpenAI's bound
MAX_DOCUMENTS = 1024


class PoolingBody(RequestBody):
    """Fields of all requests that are answered by vectors or by what is computed from them."""

    pooling: PoolingType | None = None

    def pooling_params(self, default: PoolingType) -> PoolingParams:
        """How to pool.

        Raises:
            InvalidRequestError: a value lies out of range.
        """
        return PoolingParams(pooling=self.pooling or default)


class EmbeddingRequest(PoolingBody):
    """Fields of an embedding."""

    unserved: ClassVar[frozenset[str]] = frozenset({"messages", "embed_dtype", "endianness", "additional_data"})

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None

    def inputs(self) -> list[Prompt]:
        """The inputs, each a string or token ids.

        Raises:
            InvalidRequestError: ``input`` has none of the four forms, or holds too much or an empty string.
        """
        found = split_prompts(self.input, "input")
        if len(found) > MAX_INPUTS:
            raise InvalidRequestError(f"'input' may hold at most {MAX_INPUTS} inputs.", param="input")
        return found

    def pooling_params(self, default: PoolingType) -> PoolingParams:
        """How to pool, and what to make of the vector.

        Raises:
            InvalidRequestError: a value lies out of range.
        """
        normalize = self.normalize is not False
        return PoolingParams(pooling=self.pooling or default, normalize=normalize, dimensions=self.dimensions)


class ScoreRequest(PoolingBody):
    """Fields of /score: one text against each of many, or as many pairs as there are texts."""

    unserved: ClassVar[frozenset[str]] = frozenset({
        "activation", "use_activation", "data_1", "data_2", "mm_processor_kwargs", "queries", "documents",
        "instruction",
    })  # fmt: skip

    text_1: StringOrStrings
    text_2: StringOrStrings

    def check(self, config: Config) -> None:
        """Refuse too many texts, or none, or numbers of them that do not fit together, as well.

        Raises:
            InvalidRequestError: there are.
        """
        super().check(config)
        for name in ("text_1", "text_2"):
            _check_texts(name, getattr(self, name))
        if len(self.text_1) not in (1, len(self.text_2)):
            message = "'text_1' must hold one text, or as many as 'text_2'."
            raise InvalidRequestError(message, param="text_1")

    def pairs(self) -> list[tuple[int, int]]:
        """Which of ``text_1`` goes with which of ``text_2``."""
        return [(place if len(self.text_1) > 1 else 0, place) for place in range(len(self.text_2))]


class RerankRequest(PoolingBody):
    """Fields of /rerank, as Jina's and Cohere's clients send them."""

    unserved: ClassVar[frozenset[str]] = frozenset({
        "activation", "use_activation", "rank_fields", "max_chunks_per_doc", "max_tokens_per_doc",
        "mm_processor_kwargs", "instruction",
    })  # fmt: skip

    query: str
    documents: Annotated[list[str], Field(fail_fast=True)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None

    def check(self, config: Config) -> None:
        """Refuse too many documents, or none, as well.

        Raises:
            InvalidRequestError: there are.
        """
        super().check(config)
        _check_texts("query", [self.query])
        _check_texts("documents", self.documents)


def _check_texts(name: str, texts: list[str]) -> None:
    if not 1 <= len(texts) <= MAX_DOCUMENTS:
        raise InvalidRequestError(f"'{name}' must hold between 1 and {MAX_DOCUMENTS} texts.", param=name)
    if not all(texts):
        raise InvalidRequestError(f"'{name}' must not hold an empty text.", param=name)
