"""All three APIs read past messages of a conversation liberally, and requests for the answer strictly."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import anthropic.types as anthropic_types
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputItemParam

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import AsyncLLM
from raylm.ingress import build_asgi_app
from raylm.ingress.anthropic.body import MessagesRequest
from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.responses.body import ResponsesRequest
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, client_of
from tests.ingress.refused import CHAT_PATH, error_of, junk
from tests.ingress.typed_values import values_of
from tests.ingress.writing_engine import WritingEngine

IGNORED = "x-raylm-ignored-fields"


def accepted_or_refused_for_what_it_says(body: type[Any], data: dict[str, Any]) -> None:
    """An error must name a known field with its type or value, and never an unknown key."""
    try:
        body.parse(data)
        message = ""
    except InvalidRequestError as error:
        message = error.message
    assert "this field is not supported" not in message, data
    assert "Unrecognized" not in message, data


def _add(value: Any, more: dict[str, Any]) -> Any:
    """Add keys to the objects in ``value``, at any depth."""
    if isinstance(value, dict):
        return {**more, **{name: _add(entry, more) for name, entry in value.items()}}
    return [_add(entry, more) for entry in value] if isinstance(value, list) else value


quick = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(st.data())
def test_any_history_of_openais_types(data: st.DataObject) -> None:
    messages = data.draw(st.lists(values_of(ChatCompletionMessageParam), min_size=1, max_size=4))
    accepted_or_refused_for_what_it_says(ChatCompletionRequest, {"model": "m", "messages": messages})


@quick
@given(st.data())
def test_any_input_of_openais_types(data: st.DataObject) -> None:
    items = data.draw(st.lists(values_of(ResponseInputItemParam), min_size=1, max_size=4))
    accepted_or_refused_for_what_it_says(ResponsesRequest, {"model": "m", "input": items})


@quick
@given(st.data())
def test_any_history_of_anthropics_types(data: st.DataObject) -> None:
    messages = data.draw(st.lists(values_of(anthropic_types.MessageParam), min_size=1, max_size=4))
    accepted_or_refused_for_what_it_says(MessagesRequest, {"model": "m", "max_tokens": 9, "messages": messages})


@quick
@given(st.data())
def test_keys_that_nobody_knows_never_refuse_a_history(data: st.DataObject) -> None:
    """litellm's types are OpenAI's, with the keys of many providers."""
    said = st.one_of(
        st.fixed_dictionaries({"role": st.just("user"), "content": st.just([{"type": "text", "text": "a"}])}),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": st.sampled_from(["a", None])}),
        st.fixed_dictionaries({
            "role": st.just("assistant"), "content": st.none(),
            "tool_calls": st.just([{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        }),
    )  # fmt: skip
    added = st.dictionaries(st.sampled_from(["zzz", "cache_control", "reasoning_details", "thinking_blocks"]), junk)
    messages = [_add(data.draw(said), data.draw(added)) for _ in range(3)]
    read = ChatCompletionRequest.parse({"model": "m", "messages": messages})
    assert {name.rpartition(".")[2] for name in read.left_out} <= {
        "zzz", "cache_control", "reasoning_details", "thinking_blocks",
    }  # fmt: skip


async def test_a_history_with_keys_of_others_is_answered_and_the_keys_are_named(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    part = {"type": "text", "text": "Yes.", "role": "assistant", "refusal": None, "reasoning": "r"}
    function = {"name": "f", "arguments": "{}", "zzz": 1}
    call = {"id": "c", "type": "function", "function": function, "index": 0, "cache_control": {"a": 1}}
    messages = [
        {"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": [part], "audio": None, "function_call": None, "annotations": [{"a": 1}]},
        {"role": "assistant", "content": None, "refusal": None, "reasoning_details": [1],
         "provider_specific_fields": {"b": 1}},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done", "status": "ok"},
        {"role": "assistant", "content": None, "refusal": "I may not."},
    ]  # fmt: skip
    answer = await client.post(CHAT_PATH, json=CHAT | {"messages": messages})
    assert answer.status_code == 200, answer.text
    named = [
        "messages[].cache_control", "messages[].content[].role", "messages[].content[].reasoning",
        "messages[].annotations", "messages[].reasoning_details", "messages[].provider_specific_fields.b",
        "messages[].tool_calls[].cache_control", "messages[].tool_calls[].function.zzz", "messages[].status",
    ]  # fmt: skip
    assert sorted(answer.headers[IGNORED].split(", ")) == sorted(named)
    assert len(caplog.records) == len(named)
    said = [message["content"] for message in llm.rendered[0].messages]
    assert said[1] == "Yes."
    assert said[2] in ("", None)
    assert said[5] == "I may not."


async def test_options_tools_and_formats_stay_strict(client: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {}}
    for fields, param in (
        ({"tools": [tool]}, "tools[0].cache_control"),
        ({"response_format": {"type": "text", "zzz": 1}}, "response_format.zzz"),
        ({"zzz": 1}, "zzz"),
    ):
        assert error_of(await client.post(CHAT_PATH, json=CHAT | fields))["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT_PATH, {"store": True, "verbosity": "low"}, "verbosity, store"),
        (CHAT_PATH, {"service_tier": "flex", "prompt_cache_retention": "24h"}, "prompt_cache_retention, service_tier"),
        (CHAT_PATH, {"store": False, "verbosity": "medium", "service_tier": "auto"}, ""),
        (CHAT_PATH, {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}, ""),
        ("/v1/responses", {"text": {"verbosity": "high"}, "max_tool_calls": 3}, "text.verbosity"),
        ("/v1/responses", {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ("/v1/responses", {"reasoning": {"summary": "auto"}, "text": {"verbosity": "medium"}}, ""),
        ("/v1/responses", {"service_tier": "priority", "prompt_cache_retention": "24h"},
         "prompt_cache_retention, service_tier"),
    ],
)  # fmt: skip
async def test_wishes_that_change_nothing_are_accepted_and_named(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], named: str
) -> None:
    body = CHAT if path == CHAT_PATH else {"model": CHAT["model"], "input": "Hi"}
    plain = await client.post(path, json=body)
    answer = await client.post(path, json=body | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(IGNORED, "") == named
    said = [found.json().get("choices") or found.json()["output"][0]["content"] for found in (plain, answer)]
    assert said[0] == said[1]


async def test_a_conversation_that_a_limit_cut_anywhere_goes_on() -> None:
    """Also if the limit cuts the arguments of a call, which are not valid JSON then."""
    config = Config.model_validate({"model": "embedded", "ingress": {"store": ":memory:"}})
    llm, engine = AsyncLLM(config), WritingEngine("e", Random(0))
    engine.first = 7  # reasoning, text and two calls
    llm.add_engine(engine)
    function, ask = {"name": "f", "parameters": {}}, [{"role": "user", "content": "Hi"}]
    cut_calls = 0
    async with client_of(build_asgi_app(llm, config)) as client:

        async def post(path: str, body: dict[str, Any]) -> Any:
            answer = await client.post(path, json={"model": "embedded"} | body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        for limit in range(1, 90, 3):
            tools: Any = [{"type": "function", "function": function}]
            body = {"messages": ask, "max_tokens": limit, "tools": tools}
            message = (await post(CHAT_PATH, body))["choices"][0]["message"]
            called = [call["id"] for call in message.get("tool_calls", ())]
            results = [{"role": "tool", "tool_call_id": call, "content": "no"} for call in called]
            await post(CHAT_PATH, body | {"messages": [*ask, message, *results, *ask]})

            body = {"max_output_tokens": limit, "tools": [{"type": "function"} | function]}
            response = await post("/v1/responses", body | {"input": "Hi"})
            items = response["output"]
            called = [item["call_id"] for item in items if item["type"] == "function_call"]
            cut_calls += items[-1]["type"] == "function_call" and items[-1]["status"] == "incomplete"
            outputs = [{"type": "function_call_output", "call_id": call, "output": "no"} for call in called]
            await post("/v1/responses", body | {"previous_response_id": response["id"], "input": [*outputs, *ask]})
            await post("/v1/responses", body | {"previous_response_id": response["id"], "input": "Go on."})
            await post("/v1/responses", body | {"input": [*ask, *items, *outputs, *ask]})

            body = {"max_tokens": limit, "tools": [{"name": "f", "input_schema": {}}]}
            content = (await post("/v1/messages", body | {"messages": ask}))["content"]
            called = [block["id"] for block in content if block["type"] == "tool_use"]
            given = [{"type": "tool_result", "tool_use_id": call, "content": "no"} for call in called]
            turns = [*ask, {"role": "assistant", "content": content}, {"role": "user", "content": given}]
            if content and given:
                await post("/v1/messages", body | {"messages": turns})
    await llm.stop()
    assert cut_calls > 10


async def test_the_text_of_arguments_is_an_input_of_messages_too(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    block = {"type": "tool_use", "id": "t", "name": "f", "input": '{"city": "Kö'}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [block]}]
    body = {"model": "org/fake-model", "max_tokens": 9, "messages": [*turns, {"role": "user", "content": "Go on."}]}
    answer = await client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    (call,) = llm.rendered[0].messages[1]["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Kö"}
