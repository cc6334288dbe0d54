"""Every answer and every chunk conforms to OpenAI's own specification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.openai.completions import CompletionRequest
from raylm.ingress.openai.embeddings import EmbeddingRequest
from raylm.ingress.openai.fields import Body
from tests.conformance.specification import violations
from tests.ingress.harness import CHAT, TEXT, events

SPEC = json.loads((Path(__file__).parents[2] / "data" / "openai_schemas.json").read_text())


def check(value: Any, name: str) -> None:
    """Fail if ``value`` does not conform to OpenAI's schema ``name``."""
    assert violations(value, name) == []


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"max_tokens": 4},
    {"return_token_ids": True},
    {"n": 2, "seed": 1, "temperature": 0.5, "user": "u"},
]
STREAM_OPTIONS: list[dict[str, Any] | None] = [
    None,
    {"include_usage": True},
    {"continuous_usage_stats": True, "include_usage": True, "include_obfuscation": False},
]


@pytest.mark.parametrize("options", [*OPTIONS, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3, "n": 2}])
async def test_chat_completion(client: httpx.AsyncClient, options: dict[str, Any]) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT | options)
    assert answer.status_code == 200
    check(answer.json(), "CreateChatCompletionResponse")
    assert len(answer.json()["choices"]) == options.get("n", 1)


@pytest.mark.parametrize("stream_options", STREAM_OPTIONS)
@pytest.mark.parametrize("options", [*OPTIONS, {"logprobs": True, "top_logprobs": 2}])
async def test_chat_chunks(
    client: httpx.AsyncClient, options: dict[str, Any], stream_options: dict[str, Any] | None
) -> None:
    body = CHAT | options | {"stream": True, "stream_options": stream_options}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    for chunk in chunks:
        check(chunk, "CreateChatCompletionStreamResponse")


@pytest.mark.parametrize("options", [*OPTIONS, {"logprobs": 0}, {"logprobs": 3}, {"echo": True}])
@pytest.mark.parametrize("prompt", ["Say", ["a", "b"], [1, 2], [[1, 2], [3]]])
async def test_completion(client: httpx.AsyncClient, options: dict[str, Any], prompt: Any) -> None:
    answer = await client.post("/v1/completions", json=TEXT | options | {"prompt": prompt})
    assert answer.status_code == 200
    check(answer.json(), "CreateCompletionResponse")


@pytest.mark.parametrize("options", [{"logprobs": 2}, {"logprobs": 1, "max_tokens": 0}])
async def test_echoed_completion(client: httpx.AsyncClient, options: dict[str, Any]) -> None:
    answer = await client.post("/v1/completions", json=TEXT | {"echo": True} | options)
    check(answer.json(), "CreateCompletionResponse")


@pytest.mark.parametrize("stream_options", STREAM_OPTIONS)
@pytest.mark.parametrize("options", [*OPTIONS, {"logprobs": 3}, {"echo": True, "logprobs": 1}])
async def test_completion_chunks(
    client: httpx.AsyncClient, options: dict[str, Any], stream_options: dict[str, Any] | None
) -> None:
    answer = await client.post(
        "/v1/completions", json=TEXT | options | {"stream": True, "stream_options": stream_options}
    )
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    for chunk in chunks:
        check(chunk, "CreateCompletionResponse")


async def test_models_and_errors(client: httpx.AsyncClient) -> None:
    check((await client.get("/v1/models")).json(), "ListModelsResponse")
    check((await client.get("/v1/models/org/fake-model")).json(), "Model")
    check((await client.get("/v1/models/other")).json(), "ErrorResponse")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (ChatCompletionRequest, "CreateChatCompletionRequest"),
        (CompletionRequest, "CreateCompletionRequest"),
        (EmbeddingRequest, "CreateEmbeddingRequest"),
    ],
)
def test_every_field_of_openai_is_decided(model: type[Body], name: str) -> None:
    decided = model.model_fields.keys() | model.unserved | model.served_by.keys()
    assert set(SPEC["request_fields"][name]) <= decided
    assert not model.model_fields.keys() & (model.unserved | model.served_by.keys())
