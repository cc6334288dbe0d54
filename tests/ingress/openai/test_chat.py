"""Chat completions: the client's answer, whole and streamed, and the inputs of the engine and the template."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from raylm.config import Config
from raylm.ingress import build_asgi_app
from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.openai.completions import CompletionRequest
from tests.ingress.fake_llm import EOS, FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT, client_of, events

PATH = "/v1/chat/completions"


async def post(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post(PATH, json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    answer = await client.post(PATH, json=CHAT | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    return chunks


async def test_a_whole_answer(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    answer = await post(client)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello wörld", "refusal": None, "annotations": []}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    prompt_tokens = len("user:Hi\n") + 1
    completion_tokens = len("Hello wörld".encode()) + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "org/fake-model"
    assert llm.calls[0].ended == "finished"


@pytest.mark.parametrize("step", [1, 2, 5, 100])
async def test_a_stream_says_the_same_in_order(client: httpx.AsyncClient, llm: FakeAsyncLLM, step: int) -> None:
    llm.step = step
    chunks = await stream(client)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    middle = [c["choices"][0] for c in chunks[1:-1]]
    assert "".join(c["delta"]["content"] for c in middle) == "Hello wörld"
    assert all(c["finish_reason"] is None and c["delta"]["content"] for c in middle)
    assert all("usage" not in c for c in chunks)


async def test_choices_of_n_are_kept_apart(client: httpx.AsyncClient) -> None:
    whole = await post(client, n=3)
    wanted = ["Hello wörld", "Hello wörld1", "Hello wörld2"]
    assert [c["message"]["content"] for c in whole["choices"]] == wanted
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    texts = ["", "", ""]
    ends = []
    for chunk in await stream(client, n=3):
        for choice in chunk["choices"]:
            assert choice["index"] not in ends
            texts[choice["index"]] += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                ends.append(choice["index"])
    assert texts == wanted
    assert sorted(ends) == [0, 1, 2]


async def test_usage_comes_last_and_null_before(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == (await post(client))["usage"]
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)


async def test_continuous_usage_counts_up_to_the_whole(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0, "the first chunk has the role and no token"
    assert chunks[-2]["usage"] == chunks[-1]["usage"] == (await post(client))["usage"]
    assert chunks[-2]["choices"]


@pytest.mark.parametrize("options", [{}, {"include_usage": False}])
async def test_continuous_usage_needs_usage_to_be_asked_for(client: httpx.AsyncClient, options: dict[str, Any]) -> None:
    chunks = await stream(client, stream_options=options | {"continuous_usage_stats": True})
    assert not [chunk for chunk in chunks if chunk.get("usage") or not chunk["choices"]]


async def test_logprobs_in_openais_form(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.reply = "aö"
    (choice,) = (await post(client, logprobs=True, top_logprobs=2))["choices"]
    first, second, third, end = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert first["top_logprobs"] == [
        {"token": "a", "logprob": -0.25, "bytes": [97]},
        {"token": "b", "logprob": -0.5, "bytes": [98]},
    ]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -0.25, [97])
    assert [(t["token"], t["bytes"]) for t in (second, third)] == [("\\xc3", [0xC3]), ("\\xb6", [0xB6])]
    assert end["token"] == "</s>"
    assert llm.calls[0].params.logprobs == 2
    chunks = await stream(client, logprobs=True, top_logprobs=2)
    streamed = [t for c in chunks for t in ((c["choices"][0]["logprobs"] or {}).get("content") or [])]
    assert streamed == [first, second, third, end]


async def test_logprobs_without_alternatives(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    (choice,) = (await post(client, logprobs=True))["choices"]
    assert all(t["top_logprobs"] == [] for t in choice["logprobs"]["content"])
    assert llm.calls[0].params.logprobs == 0
    await post(client, logprobs=False)
    assert llm.calls[1].params.logprobs is None


async def test_token_ids_are_returned_when_asked_for(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    answer = await post(client, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [*"Hello wörld".encode(), EOS]
    assert answer["prompt_token_ids"] == [256, *b"user:Hi\n"]
    chunks = await stream(client, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert not [chunk for chunk in chunks if "prompt_token_ids" in chunk["choices"][0]]
    ids = [i for c in chunks for i in c["choices"][0].get("token_ids", [])]
    assert ids == answer["choices"][0]["token_ids"]


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    answer = await post(client, prompt_logprobs=1)
    first, second, *_ = answer["prompt_logprobs"]
    assert first is None
    assert second == {"117": {"logprob": -0.25, "rank": 1, "decoded_token": "u"}}


async def test_every_sampling_field_reaches_the_engine(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    given: dict[str, Any] = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1.5, "repetition_penalty": 1.25, "seed": -3, "min_tokens": 2, "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "prompt_logprobs": 3,
    }  # fmt: skip
    lists = {"stop": ["x", "y"], "stop_token_ids": [5], "allowed_token_ids": [1, 2], "bad_words": ["bad"]}
    await post(client, **given, **lists, max_completion_tokens=9, logit_bias={"17": 250, "3": -1.5})
    params = llm.calls[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert {name: list(getattr(params, name)) for name in lists} == lists
    assert params.max_tokens == 9
    assert params.logit_bias == {17: 100.0, 3: -1.5}
    await post(client, stop="one", max_tokens=3, max_completion_tokens=3)
    assert llm.calls[1].params.stop == ("one",)
    assert llm.calls[1].params.max_tokens == 3


async def test_defaults_give_way_to_the_checkpoints_and_those_to_the_users(
    client: httpx.AsyncClient, llm: FakeAsyncLLM
) -> None:
    llm.sampling_defaults = {"temperature": 0.25, "top_k": 20}
    await post(client, temperature=0, top_k=None)
    params = llm.calls[0].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0, 20, 1.0, None)


async def test_names_salt_and_ids_are_handed_on(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    answer = await client.post(PATH, json=CHAT | {"cache_salt": "s"}, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.json()["id"] == "chatcmpl-abc-1"
    head = llm.calls[0].head
    assert (head.request_id, head.cache_salt, head.priority) == ("chatcmpl-abc-1", "s", 0)
    assert (await post(client, request_id="mine"))["id"] == "chatcmpl-mine"
    odd = await client.post(PATH, json=CHAT, headers={"X-Request-Id": "a b\tc"})
    assert len(odd.headers["x-request-id"]) == 32


async def test_priority_under_the_priority_policy(llm: FakeAsyncLLM) -> None:
    config = Config.model_validate({"scheduler": {"policy": "priority"}})
    async with client_of(build_asgi_app(llm, config)) as client:  # type: ignore[arg-type]
        await post(client, priority=-4)
    assert llm.calls[0].head.priority == -4


async def test_messages_as_the_template_reads_them(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    echoed = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "N"},
        {"role": "assistant", "content": None, "tool_calls": [call], **echoed},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done", "tool_calls": None},
        {"role": "assistant", "content": "so", "provider_specific_fields": {"refusal": None, "reasoning": "Hm."}},
        {"role": "assistant", "content": "on", "provider_specific_fields": None},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    await post(client, messages=messages, tools=tools, tool_choice="auto", chat_template_kwargs={"think": True})
    (rendered,) = llm.rendered
    assert rendered.messages == [
        {"role": "system", "content": "D"},
        {"role": "user", "content": "a\nb", "name": "N"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "so", "reasoning": "Hm."},
        {"role": "assistant", "content": "on"},
    ]
    assert rendered.tools == tools
    assert rendered.template_kwargs == {"think": True}
    assert (rendered.add_generation_prompt, rendered.continue_final_message) == (True, False)


async def test_template_switches(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    await post(client, tools=tools, tool_choice="none", add_generation_prompt=False)
    await post(client, continue_final_message=True, truncate_prompt_tokens=4)
    assert [r.tools for r in llm.rendered] == [None, None]
    switches = [(r.add_generation_prompt, r.continue_final_message) for r in llm.rendered]
    assert switches == [(False, False), (False, True)]
    assert llm.calls[1].prompt == [*b":Hi\n"]


async def test_fields_without_effect_are_accepted(client: httpx.AsyncClient) -> None:
    harmless: dict[str, Any] = {
        "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "store": False,
        "modalities": ["text"], "service_tier": "auto", "parallel_tool_calls": True, "prompt_cache_retention":
        "in_memory", "response_format": {"type": "text"}, "tool_choice": "none", "functions": None, "audio": None,
        "temperature": None, "stop": None, "n": None, "logit_bias": None, "stream": None, "stream_options": None,
        "top_logprobs": None, "tools": None,
    }  # fmt: skip
    answer = await post(client, **harmless)
    assert answer["choices"][0]["message"]["content"] == "Hello wörld"
    assert answer["service_tier"] == "default"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_null_is_as_good_as_absent(client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str) -> None:
    body = CHAT if path == PATH else TEXT
    model = ChatCompletionRequest if path == PATH else CompletionRequest
    nulls = dict.fromkeys((model.model_fields.keys() | model.unserved | model.served_by.keys()) - body.keys())
    bare, with_nulls = [await client.post(path, json=body | extra) for extra in ({}, nulls)]
    assert with_nulls.status_code == 200, with_nulls.text
    assert with_nulls.json()["choices"] == bare.json()["choices"]
    assert llm.calls[0].params == llm.calls[1].params
