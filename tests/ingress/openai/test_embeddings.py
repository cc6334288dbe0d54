"""/v1/embeddings, /score and /rerank with a fake AsyncLLM: forms of input, encodings, orders, refusals."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from raylm.errors import EngineDiedError
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import served
from tests.ingress.openai.test_openai_schema import check
from tests.ingress.refused import error_of

MODEL = "org/fake-model"


def vector_of(first_byte: int) -> list[float]:
    angle = first_byte / 256 * math.pi / 2
    return [math.cos(angle), math.sin(angle), 0.0, 0.0]


async def embed(client: httpx.AsyncClient, value: Any, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": value, **fields})
    assert answer.status_code == 200, answer.text
    check(answer.json(), "CreateEmbeddingResponse")
    return answer.json()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("value", "first_bytes", "tokens"),
    [("Say", [83], 3), (["ab", "b"], [97, 98], 3), ([9, 8], [9], 2), ([[1, 2], [3]], [1, 3], 3)],
)
async def test_forms_of_input(client: httpx.AsyncClient, value: Any, first_bytes: list[int], tokens: int) -> None:
    answer = await embed(client, value)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(first_bytes)))
    for entry, first in zip(answer["data"], first_bytes, strict=True):
        assert entry["embedding"] == pytest.approx(vector_of(first), abs=1e-7)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_base64_and_dimensions(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    answer = await embed(client, "Say", encoding_format="base64", dimensions=3)
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert struct.unpack("<3f", raw) == pytest.approx(vector_of(83)[:3], abs=1e-7)
    await embed(client, "Say", pooling="mean", normalize=False, truncate_prompt_tokens=2)
    (_, plain), (ids, chosen) = llm.embedded
    assert (plain.pooling, plain.normalize, plain.dimensions) == ("last", True, 3)
    assert (chosen.pooling, chosen.normalize, ids) == ("mean", False, [97, 121])


@pytest.mark.parametrize("limit", [-1, 5000])
async def test_a_truncation_above_the_context_is_the_context(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, limit: int
) -> None:
    llm.max_model_len = 4
    await embed(client, "Say it", truncate_prompt_tokens=limit)
    assert llm.embedded[-1][0] == [*b"y it"]


async def test_score_takes_queries_and_documents(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "queries": "a", "documents": ["a", "z"]}
    named = {"model": MODEL, "text_1": "a", "text_2": ["a", "z"]}
    answer, wanted = [(await client.post("/score", json=each)).json() for each in (body, named)]
    assert (answer["data"], answer["usage"]) == (wanted["data"], wanted["usage"])


async def test_rerank_cuts_documents(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    body = {"model": MODEL, "query": "abcd", "documents": ["abcd", "ef"], "max_tokens_per_doc": 3}
    answer = (await client.post("/rerank", json=body)).json()
    assert [bytes(ids) for ids, _ in llm.embedded] == [b"abcd", b"abc", b"ef"]
    assert answer["usage"]["prompt_tokens"] == 4 + 3 + 2
    await client.post("/rerank", json=body | {"max_tokens_per_doc": 0})
    assert [bytes(ids) for ids, _ in llm.embedded][3:] == [b"abcd", b"abcd", b"ef"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_score(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, json={"model": MODEL, "text_1": "a", "text_2": ["a", "z"]})
    expected = [1.0, math.cos((ord("z") - ord("a")) / 256 * math.pi / 2)]
    assert [entry["score"] for entry in answer.json()["data"]] == pytest.approx(expected, abs=1e-6)
    assert answer.json()["usage"]["total_tokens"] == 3
    pairs = await client.post(path, json={"model": MODEL, "text_1": ["a", "z"], "text_2": ["a", "z"]})
    assert [entry["score"] for entry in pairs.json()["data"]] == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank(client: httpx.AsyncClient, path: str) -> None:
    body = {"model": MODEL, "query": "m", "documents": ["a", "n", "z", "m"]}
    answer = (await client.post(path, json=body)).json()
    assert [entry["index"] for entry in answer["results"]] == [3, 1, 0, 2]
    assert answer["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6)
    assert answer["results"][0]["document"] == {"text": "m"}
    short = (await client.post(path, json=body | {"top_n": 2, "return_documents": False})).json()
    assert [sorted(entry) for entry in short["results"]] == [["index", "relevance_score"]] * 2


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": None}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": [[]]}, "input[0]"),
    ("/v1/embeddings", {"input": ["a", 1]}, "input[1]"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "pooling": "max"}, "pooling"),
    ("/v1/embeddings", {"input": "a", "messages": []}, "messages"),
    ("/v1/embeddings", {"input": "a", "priority": 1}, "priority"),
    ("/v1/embeddings", {"input": "a", "stream": True}, "stream"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/score", {"text_1": "a", "text_2": [""]}, "text_2"),
    ("/score", {"text_1": "a", "text_2": "b", "activation": True}, "activation"),
    ("/score", {"text_1": "a"}, "text_2"),
    ("/score", {"queries": "a"}, "documents"),
    ("/score", {"queries": ["a", "b"], "documents": ["a"]}, "queries"),
    ("/score", {"text_1": "a", "queries": "a", "documents": "b"}, "text_1"),
    ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "a", "documents": [{"text": "a"}]}, "documents[0]"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD)
async def test_refusals(client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str) -> None:
    assert error_of(await client.post(path, json={"model": MODEL, **fields}))["param"] == param


async def test_the_official_client(app: Starlette, llm: FakeAsyncLLM) -> None:
    """The client requests base64 by default, and decodes it."""
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        answer = await api.embeddings.create(model=MODEL, input=["a", "z"])
        assert answer.data[1].embedding == pytest.approx(vector_of(ord("z")), abs=1e-7)
        with pytest.raises(openai.BadRequestError) as wrong:
            await api.embeddings.create(model=MODEL, input="a", dimensions=9)
        assert wrong.value.param == "dimensions"


async def test_one_that_fails_fails_all(client: httpx.AsyncClient, llm: FakeAsyncLLM, monkeypatch: Any) -> None:
    async def broken(prompt: str, params: Any, *_: Any) -> Any:
        raise EngineDiedError("The engine was lost.")
        yield

    monkeypatch.setattr(llm, "embed", broken)
    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": ["a", "b"]})
    assert error_of(answer, 503)["code"] == "engine_died"


async def test_the_texts_of_a_body_become_requests_only_as_they_are_started(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, at_begin = 0, list[int]()
    embed_one = FakeAsyncLLM.embed

    def counted(self: FakeAsyncLLM, *args: Any) -> Any:
        nonlocal made
        made += 1

        async def begun() -> Any:
            at_begin.append(made)
            async for output in embed_one(self, *args):
                yield output

        return begun()

    monkeypatch.setattr(FakeAsyncLLM, "embed", counted)
    answer = await embed(client, ["a"] * 500)
    assert len(answer["data"]) == len(at_begin) == 500
    assert at_begin[0] < 100
