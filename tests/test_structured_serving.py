"""Structured outputs, tools and reasoning through the whole server with the embedded model, and the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from benchmarks.engine.structured import grade, in_process
from benchmarks.engine.structured_cases import KINDS

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "embedded"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nope"}}}}}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(MODEL, scheduler={"max_num_seqs": 32}, cache={"num_blocks": 2048}) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://raylm/v1", api_key="none", max_retries=0, http_client=client)


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_have_the_form_that_was_asked_for(client: httpx.AsyncClient, kind: str) -> None:
    found, faults = await grade(client, MODEL, kind, 40)
    assert faults == []
    assert found["right"] == 40 - found["cut"]
    assert kind == "json_object" or not found["cut"]  # json_object allows objects of any length


async def test_without_the_form_nearly_all_are_found_wrong(client: httpx.AsyncClient) -> None:
    for kind in KINDS:
        found, _ = await grade(client, MODEL, kind, 6, unbound=True)
        assert found["right"] <= 1


async def test_streams_stop_strings_logprobs_and_free_requests_beside(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    body = {"model": MODEL, "messages": ASK, "max_tokens": 60, "seed": 5, "temperature": 1.0}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    schema["additionalProperties"] = False

    async def post(**fields: Any) -> Any:
        return (await client.post("/chat/completions", json=body | fields)).json()

    alone = await post()
    many = await asyncio.gather(
        post(),
        post(**form, n=4, logprobs=True, top_logprobs=2),
        post(**form, stop=["is"]),
        post(structured_outputs={"regex": "[a-z]{3}"}, min_tokens=8),
        client.post("/chat/completions", json=body | form | {"stream": True}),
        client.post("/completions", json={"model": MODEL, "prompt": "x", "structured_outputs": {"choice": ["a b"]}}),
    )
    assert many[0]["choices"] == alone["choices"]
    for choice in many[1]["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert {choice["message"]["content"] for choice in many[1]["choices"]} <= {'{"city":"Paris"}', '{"city":"Rome"}'}
    assert many[2]["choices"][0]["message"]["content"] in ('{"city":"Par', '{"city":"Rome"}')
    assert len(many[3]["choices"][0]["message"]["content"]) == 3
    assert many[3]["usage"]["completion_tokens"] >= 8
    chunks = [json.loads(line[6:]) for line in many[4].text.splitlines() if line.startswith("data: {")]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    jsonschema.validate(json.loads(text), schema)
    assert many[5].json()["choices"][0]["text"] == "a b"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "nothing"}}, "structured_outputs.grammar"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
            "response_format.json_schema.schema",
        ),
        pytest.param(
            {"tools": [WEATHER, BAD_TOOL], "tool_choice": "required"}, "tools[1].function.parameters"
        ),
        pytest.param(
            {"tools": [WEATHER], "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"
        ),
    ],
)  # fmt: skip
async def test_a_bad_form_fails_its_request_alone(client: httpx.AsyncClient, fields: Any, param: str) -> None:
    for stream in (False, True):
        answer = await client.post(
            "/chat/completions", json={"model": MODEL, "messages": ASK, "stream": stream} | fields
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    assert (await client.post("/chat/completions", json={"model": MODEL, "messages": ASK})).status_code == 200


class Booking(BaseModel):
    city: Literal["Paris", "Rome"]
    nights: Literal[1, 2, 3]
    breakfast: bool


class GetWeather(BaseModel):
    """Get the current weather."""

    city: Literal["Paris", "Oslo"]


async def test_parse_into_a_model(api: openai.AsyncOpenAI) -> None:
    for seed in range(3):
        answer = await api.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=Booking, temperature=1.0, seed=seed
        )
        assert isinstance(answer.choices[0].message.parsed, Booking)


async def test_parse_calls_into_a_model(api: openai.AsyncOpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(GetWeather)]
    for choice in ("auto", "required"):
        called = await api.chat.completions.parse(model=MODEL, messages=ASK, tools=tools, tool_choice=choice, seed=1)
        for call in called.choices[0].message.tool_calls or []:
            assert isinstance(call.function.parsed_arguments, GetWeather)
    assert called.choices[0].message.tool_calls


async def test_a_whole_round_trip_with_tools(api: openai.AsyncOpenAI) -> None:
    """The model was trained for this: it calls the tool by itself, and reports the tool's result."""
    tools: Any = [WEATHER]
    called = await api.chat.completions.create(model=MODEL, messages=ASK, tools=tools, temperature=0)
    assert called.choices[0].finish_reason == "tool_calls"
    message = called.choices[0].message
    assert message.tool_calls
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"temperature": 21}'}
    history: Any = [*ASK, message.model_dump(exclude_none=True), result]
    told = await api.chat.completions.create(model=MODEL, messages=history, tools=tools, temperature=0)
    assert told.choices[0].finish_reason == "stop"
    assert "21" in (told.choices[0].message.content or "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_calls_that_must_come_are_streamed(api: openai.AsyncOpenAI, choice: Any) -> None:
    body: Any = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "tool_choice": choice, "seed": 2}
    async with api.chat.completions.stream(**body, temperature=1.0) as stream:
        events = [event.type async for event in stream]
        answer = await stream.get_final_completion()
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls or []
    assert len(calls) >= 1
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])  # type: ignore[index]
    assert events.count("tool_calls.function.arguments.done") == len(calls)
    assert events.count("tool_calls.function.arguments.delta") > len(calls)


async def test_a_call_or_an_answer_in_json(api: openai.AsyncOpenAI) -> None:
    body: Any = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "response_format": {"type": "json_object"}}
    for seed in range(5):
        answer = await api.chat.completions.create(**body, seed=seed, temperature=1.0, max_tokens=200)
        (choice,) = answer.choices
        assert choice.finish_reason != "stop" or json.loads(choice.message.content or "") is not None


async def test_thoughts_by_effort_and_within_their_budget(api: openai.AsyncOpenAI) -> None:
    ask: Any = [{"role": "user", "content": "What is 12 + 7 + 30?"}]
    body: Any = {"model": MODEL, "messages": ask, "temperature": 0}
    silent = await api.chat.completions.create(**body, reasoning_effort="none")
    assert "reasoning_content" not in (silent.choices[0].message.model_extra or {})
    free = await api.chat.completions.create(**body, reasoning_effort="high")
    assert free.choices[0].message.content == "12 + 7 + 30 = 49."
    assert free.choices[0].message.model_extra["reasoning_content"]  # type: ignore[index]
    assert free.usage and free.usage.completion_tokens_details  # noqa: PT018
    thoughts = free.usage.completion_tokens_details.reasoning_tokens or 0
    assert thoughts > 10
    for budget in (0, 5, thoughts + 5):
        bound = await api.chat.completions.create(
            **body, reasoning_effort="high", extra_body={"thinking_token_budget": budget}
        )
        assert bound.usage and bound.usage.completion_tokens_details  # noqa: PT018
        counted = bound.usage.completion_tokens_details.reasoning_tokens
        assert counted == min(budget, thoughts)
        assert bound.choices[0].finish_reason == "stop"
        assert bound.choices[0].message.content
    assert bound.choices[0].message.content == "12 + 7 + 30 = 49."


async def test_a_form_holds_behind_the_thoughts(api: openai.AsyncOpenAI) -> None:
    ask: Any = [{"role": "user", "content": "What is 12 + 7 + 30?"}]
    for budget in (None, 6):
        extra = {"chat_template_kwargs": {"enable_thinking": True}, "structured_outputs": {"regex": "[0-9]{2}"}}
        answer = await api.chat.completions.create(
            model=MODEL,
            messages=ask,
            temperature=0,
            extra_body=extra | ({} if budget is None else {"thinking_token_budget": budget}),
        )
        assert answer.choices[0].message.model_extra["reasoning"]  # type: ignore[index]
        assert (answer.choices[0].message.content or "").isdecimal()
    stream = await api.chat.completions.create(
        model=MODEL, messages=ask, stream=True, temperature=0, reasoning_effort="low", extra_body={"min_p": 0.0}
    )
    fields = [key async for chunk in stream for key, value in chunk.choices[0].delta.model_dump().items() if value]
    assert fields.index("reasoning_content") < fields.index("content")


async def test_what_has_no_thoughts_has_no_budget(client: httpx.AsyncClient) -> None:
    answer = await client.post("/completions", json={"model": MODEL, "prompt": "x", "thinking_token_budget": 3})
    assert answer.json()["error"]["param"] == "thinking_token_budget"
    closed = {"model": MODEL, "messages": ASK, "thinking_token_budget": 3, "max_tokens": 5}
    assert (await client.post("/chat/completions", json=closed)).status_code == 200
