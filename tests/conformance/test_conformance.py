"""All endpoints against the specifications, bad samples that must be detected, and /openapi.json."""

from __future__ import annotations

import copy
import re
from typing import Any

import httpx
import jsonschema
import pytest

from raylm.config import Config
from raylm.ingress import build_asgi_app
from tests.conformance.cases import CHAT, MESSAGE, RESPONSE, TEXT, cases
from tests.conformance.run import Report, faults_of, run, stream_events
from tests.ingress.fake_llm import FakeAsyncLLM


def test_no_violations(url: str) -> None:
    with httpx.Client(base_url=url, timeout=300) as client:
        report = run(client)
    assert not report.faults
    assert report.checked.total() > 1000
    assert min(report.checked.values()) > 0


def test_tools_and_thoughts_are_among_what_is_checked(url: str) -> None:
    found: dict[str, set[str]] = {"/v1/responses": set(), "/v1/messages": set()}
    with httpx.Client(base_url=url, timeout=300) as client:
        for case in cases():
            if case.path in found and case.body.get("stream"):
                text = client.post(case.path, json={"model": "embedded"} | case.body).text
                found[case.path] |= {event["type"] for event in stream_events(text, case.path, "", Report())}
                found[case.path] |= set(re.findall(r'"type":"([a-z_]+_delta|thinking|tool_use)"', text))
    assert found["/v1/responses"] >= {
        f"response.{kind}.delta" for kind in ("output_text", "reasoning_text", "function_call_arguments")
    }
    assert found["/v1/messages"] >= {"text_delta", "thinking_delta", "input_json_delta", "thinking", "tool_use"}


@pytest.fixture(scope="module")
def samples(url: str) -> dict[str, Any]:
    """One valid object of each kind."""
    found: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=300) as client:
        for path, body, schema in (
            ("/v1/chat/completions", CHAT | {"logprobs": True}, "CreateChatCompletionResponse"),
            ("/v1/completions", TEXT | {"logprobs": 1}, "CreateCompletionResponse"),
            ("/v1/responses", RESPONSE, "Response"),
            ("/v1/messages", MESSAGE, "anthropic.Message"),
            ("/v1/embeddings", {"input": "a"}, "CreateEmbeddingResponse"),
            ("/v1/embeddings", {"input": ""}, "ErrorResponse"),
        ):
            found[schema] = client.post(path, json={"model": "embedded"} | body).json()
        for path, body, schema in (
            ("/v1/chat/completions", CHAT, "CreateChatCompletionStreamResponse"),
            ("/v1/responses", RESPONSE, "ResponseStreamEvent"),
            ("/v1/messages", MESSAGE, "anthropic.RawMessageStreamEvent"),
        ):
            text = client.post(path, json={"model": "embedded", "stream": True} | body).text
            found[schema] = stream_events(text, path, "", Report())[0]
    return found


BAD_RESPONSES: list[tuple[str, str, Any]] = [
    ("Response", "status", "done"),
    ("Response", "output.0.type", "text"),
    ("Response", "output.0.content.0.annotations", None),
    ("Response", "usage.input_tokens_details", {}),
    ("Response", "tool_choice", "maybe"),
    ("ResponseStreamEvent", "type", "response.begun"),
    ("ResponseStreamEvent", "sequence_number", "1"),
]
BAD_MESSAGES: list[tuple[str, str, Any]] = [
    ("anthropic.Message", "stop_reason", "stop"),
    ("anthropic.Message", "content.0.text", None),
    ("anthropic.Message", "usage.output_tokens", "3"),
    ("anthropic.RawMessageStreamEvent", "type", "message_begin"),
]
BAD: list[tuple[str, str, Any]] = [
    ("CreateChatCompletionResponse", "object", "chat"),
    ("CreateChatCompletionResponse", "created", "now"),
    ("CreateChatCompletionResponse", "choices.0.finish_reason", "done"),
    ("CreateChatCompletionResponse", "choices.0.message.role", "user"),
    ("CreateChatCompletionResponse", "choices.0.message.content", None),  # None removes the field
    ("CreateChatCompletionResponse", "choices.0.logprobs.content.0.bytes", "x"),
    ("CreateChatCompletionResponse", "usage.total_tokens", "1"),
    ("CreateChatCompletionStreamResponse", "choices.0.index", "0"),
    ("CreateChatCompletionStreamResponse", "choices.0.delta", None),
    ("CreateChatCompletionStreamResponse", "object", "chat.completion"),
    ("CreateCompletionResponse", "choices.0.text", 3),
    ("CreateCompletionResponse", "choices.0.logprobs.text_offset", ["a"]),
    *BAD_RESPONSES,
    *BAD_MESSAGES,
    ("CreateEmbeddingResponse", "data.0.embedding", ["a"]),
    ("CreateEmbeddingResponse", "usage", None),
    ("ErrorResponse", "error.code", 400),
    ("ErrorResponse", "error", "wrong"),
]


@pytest.mark.parametrize(("schema", "place", "value"), BAD)
def test_bad_samples_are_caught(samples: dict[str, Any], schema: str, place: str, value: Any) -> None:
    """The value None removes the field."""
    assert faults_of(samples[schema], schema) == []
    sample = copy.deepcopy(samples[schema])
    *way, last = place.split(".")
    holder = sample
    for step in way:
        holder = holder[int(step) if step.isdecimal() else step]
    if value is None:
        del holder[last]
    else:
        holder[last] = value
    assert faults_of(sample, schema)


def test_bad_streams_are_caught() -> None:
    good = 'event: a\ndata: {"type":"a","sequence_number":0}\n\n'
    for text in (good.replace("event: a\n", ""), good.replace(":0}", ":1}"), good.removesuffix("\n")):
        report = Report()
        stream_events(text, "/v1/responses", "", report)
        assert report.faults
    report = Report()
    stream_events('data: {"id":"x"}\n\n', "/v1/completions", "", report)
    assert report.faults == [": the stream does not end with [DONE]"]


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    """/openapi.json of the app."""
    import asyncio

    from tests.ingress.harness import client_of

    async def fetch() -> dict[str, Any]:
        async with client_of(build_asgi_app(FakeAsyncLLM(), Config())) as client:  # type: ignore[arg-type]
            return (await client.get("/openapi.json")).json()  # type: ignore[no-any-return]

    return asyncio.run(fetch())


def test_every_route_is_described_and_nothing_else(description: dict[str, Any]) -> None:
    app = build_asgi_app(FakeAsyncLLM(), Config())  # type: ignore[arg-type]
    served = {
        (re.sub(r":\w+}", "}", route.path), method.lower())  # type: ignore[attr-defined]
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert {(path, method) for path, methods in description["paths"].items() for method in methods} == served
    ids = [operation["operationId"] for methods in description["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)


def body_validator(description: dict[str, Any], path: str) -> jsonschema.Draft202012Validator:
    content = description["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"] | {"components": description["components"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_description_takes_what_the_server_takes(description: dict[str, Any]) -> None:
    served = [case for case in cases() if case.status == 200]
    for case in served:
        body_validator(description, case.path).validate({"model": "m"} | case.body)
    for path in {case.path for case in served}:
        good = next(case.body for case in served if case.path == path)
        assert body_validator(description, path).is_valid(good), "with one served model, a request may omit its name"
        if "messages" in good and path == "/v1/chat/completions":
            custom, wrong = ({"messages": [{"role": role, "content": "x"}]} for role in ("critic", "no role"))
            assert body_validator(description, path).is_valid(good | custom)
            assert not body_validator(description, path).is_valid(good | wrong)
        for bad in ({"model": 3} | good, {"model": "m", "no_such_field": 1} | good):
            assert not body_validator(description, path).is_valid(bad)
