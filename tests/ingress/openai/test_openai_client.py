"""The official client with a real server: what it parses, streams and raises."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from starlette.applications import Starlette

from raylm.errors import EngineDiedError
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import served

MODEL = "org/fake-model"


@pytest.fixture
async def api(app: Starlette) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


async def test_chat(api: openai.AsyncOpenAI) -> None:
    answer = await api.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], n=2, extra_body={"top_k": 3}
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello wörld", "Hello wörld1"]
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_chat_stream(api: openai.AsyncOpenAI) -> None:
    chunks = await api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=1,
    )
    found = [chunk async for chunk in chunks]
    texts = [c.choices[0].delta.content or "" for c in found if c.choices]
    assert "".join(texts) == "Hello wörld"
    assert found[-1].usage
    assert found[-1].usage.completion_tokens == 13
    logprobs = [c.choices[0].logprobs for c in found if c.choices]
    assert sum(len(entry.content or ()) for entry in logprobs if entry) == 13


async def test_the_accumulating_stream_helper(api: openai.AsyncOpenAI) -> None:
    async with api.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], n=2, logprobs=True
    ) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == ["Hello wörld", "Hello wörld1"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert kinds.count("content.done") == 2


async def test_completions(api: openai.AsyncOpenAI) -> None:
    answer = await api.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["aHello wörld", "bHello wörld"]
    chunks = await api.completions.create(model=MODEL, prompt=[[1], [2]], stream=True)
    texts = ["", ""]
    async for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["Hello wörld"] * 2


async def test_models(api: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in api.models.list()] == [MODEL]
    assert (await api.models.retrieve(MODEL)).owned_by == "raylm"


async def test_errors_have_their_types(api: openai.AsyncOpenAI, llm: FakeAsyncLLM, app: Starlette) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        await api.completions.create(model=MODEL, prompt="a", temperature=3)
    assert wrong.value.param == "temperature"
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as unknown:
        await api.completions.create(model=MODEL, prompt="a", extra_body={"guided_json": {}})
    assert unknown.value.code == "unsupported_field"
    with pytest.raises(openai.NotFoundError) as missing:
        await api.completions.create(model="gpt", prompt="a", stream=True)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await api.images.generate(model=MODEL, prompt="a")
    llm.fail_after = 0
    with pytest.raises(openai.InternalServerError):
        await api.completions.create(model=MODEL, prompt="a")
    await app.state.requests.drain(0)
    with pytest.raises(openai.InternalServerError) as leaving:
        await api.completions.create(model=MODEL, prompt="a")
    assert leaving.value.status_code == 503
    assert leaving.value.code == "shutting_down"


async def test_an_error_within_a_stream_is_raised(api: openai.AsyncOpenAI, llm: FakeAsyncLLM) -> None:
    llm.fail_after, llm.failure = 3, EngineDiedError("The engine was lost.")
    stream = await api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True)
    texts: list[str | None] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(openai.APIError) as broken:
        await read()
    assert broken.value.code == "engine_died"
    assert broken.value.message == "The engine was lost."
    assert texts == ["", "H", "e", "l"]
