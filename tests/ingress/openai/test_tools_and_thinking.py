"""Tool calls and reasoning over HTTP: OpenAI's rules for deltas, its specification, and the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from raylm.frontend.answers.answer_format import AnswerFormat
from raylm.frontend.answers.reasoning_parsers import REASONING_PARSERS
from raylm.frontend.answers.tool_calls import TOOL_PARSERS
from raylm.messages import ReasoningTokenIds
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, events, served
from tests.ingress.openai.test_openai_schema import check

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"city": "Rome"}, {"city": "Oslo", "days": 2}]
TEXT = "<think>\nHm.\n</think>\n\nI ask.\n" + "\n".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(call)}}}\n</tool_call>' for call in CALLS
)
BODY = CHAT | {"tools": TOOLS}


@pytest.fixture(autouse=True)
def reply(llm: FakeAsyncLLM) -> None:
    llm.reply = TEXT
    llm.answer_format = AnswerFormat(
        reasoning=REASONING_PARSERS["think"],
        thinking=ReasoningTokenIds(ord("<"), ord("/"), (), begun=False),  # a token of the fake is a byte
        tool_parser=TOOL_PARSERS["hermes"],
        tools={"get_weather": {}},
    )


async def test_whole(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/chat/completions", json=BODY | {"n": 1, "logprobs": True})).json()
    check(answer, "CreateChatCompletionResponse")
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("I ask.", "Hm.", "Hm.")
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == CALLS
    assert len(choice["logprobs"]["content"]) == len(TEXT) + 1
    counted = len("think>\nHm.\n<")  # the tokens between the bytes that act as markers
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}


@pytest.mark.parametrize("step", [1, 4, 500])
@pytest.mark.parametrize("options", [{}, {"logprobs": True, "return_token_ids": True}])
async def test_stream(client: httpx.AsyncClient, llm: FakeAsyncLLM, step: int, options: dict[str, Any]) -> None:
    llm.step = step
    text = (await client.post("/v1/chat/completions", json=BODY | {"stream": True} | options)).text
    *chunks, done = events(text)
    assert done == "[DONE]"
    kinds, calls, finish = [], [], None
    for chunk in chunks:
        check(chunk, "CreateChatCompletionStreamResponse")
        (choice,) = chunk["choices"]
        assert finish is None
        finish = choice["finish_reason"]
        kinds += [kind for kind in ("reasoning_content", "content", "tool_calls") if choice["delta"].get(kind)]
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["id"]
                assert call["type"] == "function"
                calls.append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert call["index"] == len(calls) - 1
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert finish == "tool_calls"
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
    assert [json.loads(call["arguments"]) for call in calls] == CALLS
    assert {call["name"] for call in calls} == {"get_weather"}


async def test_the_official_client_puts_a_stream_together(app: Starlette, llm: FakeAsyncLLM) -> None:
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        for llm.step in (1, 7, 500):
            async with api.chat.completions.stream(**BODY) as stream:
                seen = [event.type async for event in stream]
                answer = await stream.get_final_completion()
            message = answer.choices[0].message
            assert message.content == "I ask."
            assert message.model_extra["reasoning_content"] == "Hm."  # type: ignore[index]
            assert message.tool_calls
            assert [json.loads(call.function.arguments) for call in message.tool_calls] == CALLS
            assert seen.count("tool_calls.function.arguments.done") == len(CALLS)


async def test_history_with_calls_and_thoughts_comes_back_in(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    answer = (await client.post("/v1/chat/completions", json=BODY)).json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Sunny."} for call in answer["tool_calls"]]
    body = BODY | {"messages": [*CHAT["messages"], answer, *results]}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    echoed = llm.rendered[-1].messages[1]
    assert echoed["reasoning_content"] == "Hm."
    assert [call["function"]["arguments"] for call in echoed["tool_calls"]] == CALLS
