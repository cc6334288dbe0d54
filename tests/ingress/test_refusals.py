"""Refusals: each mistake has its status, names its field, and comes in OpenAI's envelope; nothing is dropped."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from raylm.config import Config
from raylm.errors import EngineUnavailableError, OverloadedError
from raylm.ingress import build_asgi_app
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT, client_of

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
INSIDES = ("Traceback", "0x", "/srv", "/home", "site-packages")


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", **fields}]}


def call(**function: Any) -> dict[str, Any]:
    return assistant(tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", **function}}])


def error_of(answer: httpx.Response, status: int = 400, asked: str = "") -> dict[str, Any]:
    """The error of an answer, which shows no insides beyond those that the caller ``asked`` for by name."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    (key,) = answer.json()
    error: dict[str, Any] = answer.json()[key]
    assert key == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert len(error["message"]) < 700
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["param"] is None or len(error["param"]) <= 120
    assert not [inside for inside in INSIDES if inside in error["message"] and inside not in asked]
    return error


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"zzz": 1}, "zzz"),
    ({"temprature": 1}, "temprature"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"guided": "a"}}, "structured_outputs.guided"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"json_object": True}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": 1}}},
        "response_format.json_schema.strict",
    ),
    ({"model": 3}, "model"),
    ({"model": None}, "model"),
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": True}}, "stream_options.x"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": -0.01}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": 1}, "stop"),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"allowed_token_ids": 5}, "allowed_token_ids"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x", "x" * 2049]}, "bad_words[1]"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), "wrong, but not looked at")}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"user": 1}, "user"),
    ({"x" * 100_000: 1}, "x" * 63 + "…"),
]
ONLY_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0].role"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    (user(None), "messages[0].content"),
    (user(5), "messages[0].content"),
    (user([]), "messages[0].content"),
    (user(["x"]), "messages[0].content[0]"),
    (user([{"type": "text", "text": 5}]), "messages[0].content[0].text"),
    (user([{"type": "text", "text": "a"}, {"type": "image_url"}]), "messages[0].content[1].type"),
    (user([{"type": "text", "text": "a", "x": 1}]), "messages[0].content[0].x"),
    (user("x", tool_calls=[]), "messages[0].tool_calls"),
    (user("x", zzz=1), "messages[0].zzz"),
    (user("x", name=1), "messages[0].name"),
    (assistant(content=None), "messages[0].content"),
    (assistant(content="x", function_call={"name": "f", "arguments": ""}), "messages[0].function_call"),
    (assistant(content="x", refusal="no"), "messages[0].refusal"),
    (assistant(content="x", tool_calls="f"), "messages[0].tool_calls"),
    (assistant(tool_calls=["f"]), "messages[0].tool_calls[0]"),
    (assistant(tool_calls=[{"id": "1", "type": "custom"}]), "messages[0].tool_calls[0].type"),
    (assistant(tool_calls=[{"id": "1", "type": "function"}]), "messages[0].tool_calls[0].function"),
    (call(), "messages[0].tool_calls[0].function.arguments"),
    (call(arguments="{"), "messages[0].tool_calls[0].function.arguments"),
    (call(arguments="[1]"), "messages[0].tool_calls[0].function.arguments"),
    (call(arguments="{}", x=1), "messages[0].tool_calls[0].function.x"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    (
        {
            "tool_choice": {"type": "function", "function": {"name": "g"}},
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        "tool_choice.function.name",
    ),
    (
        {"tool_choice": {"type": "allowed_tools"}, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tool_choice.type",
    ),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"store": True}, "store"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"service_tier": "x"}, "service_tier"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"functions": []}, "functions"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"echo": True}, "echo"),
    ({"prompt": "x"}, "prompt"),
    ({"suffix": None}, "suffix"),
]
ONLY_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.0]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [[1], [1, None]]}, "prompt[1][1]"),
    ({"prompt": [[1], 2]}, "prompt[1]"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 1024, "n": 128}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"messages": []}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
]
CASES = [
    *((CHAT_PATH, CHAT | fields, param) for fields, param in SHARED + ONLY_CHAT),
    *((TEXT_PATH, TEXT | fields, param) for fields, param in SHARED + ONLY_TEXT),
    *((path, {k: v for k, v in body.items() if k != "model"}, "model") for path, body in
      ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT))),
    (CHAT_PATH, {"model": "org/fake-model"}, "messages"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("/tokenize", {"messages": CHAT["messages"], "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"prompt": 1}, "prompt"),
    ("/tokenize", {"text": "a"}, "text"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
    ("/detokenize", {"tokens": [9999]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), CASES)
async def test_a_wrong_field_is_named(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(await client.post(path, json=body))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert llm.calls == []


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}',
        b'{"a": -1e999}', b'{"a": "\\ud800"}', b'{"a": 1,}', b"\xef\xbb\xbf{}", b'{"a":' * 5000,
        b'{"model":' + b"[" * 64 + b"]" * 64 + b"}",
    ],
)  # fmt: skip
async def test_what_is_no_json_object_is_refused(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    assert error_of(await client.post(path, content=body, headers=JSON))["type"] == "invalid_request_error"


async def test_nesting_up_to_the_bound_is_read(client: httpx.AsyncClient) -> None:
    def nested(levels: int) -> dict[str, Any]:
        value: Any = 1
        for _ in range(levels):
            value = {"a": value}
        return CHAT | {"chat_template_kwargs": value}

    assert (await client.post(CHAT_PATH, json=nested(63))).status_code == 200
    assert "64 levels" in error_of(await client.post(CHAT_PATH, json=nested(64)))["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {},
    ],
)
async def test_the_media_type_is_checked(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert error_of(await client.post(CHAT_PATH, content=b"{}", headers=headers), 415)["code"]


async def test_utf8_json_is_taken(client: httpx.AsyncClient) -> None:
    headers = {"content-type": 'Application/JSON; charset="UTF-8"'}
    body = b'{"model": "org/fake-model", "prompt": "x"}'
    assert (await client.post(TEXT_PATH, content=body, headers=headers)).status_code == 200


async def test_a_long_body_is_refused_with_and_without_its_length(llm: FakeAsyncLLM) -> None:
    config = Config.model_validate({"ingress": {"max_body_mib": 0.001}})
    body = b'{"prompt": "' + b"x" * 2000 + b'"}'

    async def pieces() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with client_of(build_asgi_app(llm, config)) as client:  # type: ignore[arg-type]
        for content in (body, pieces()):
            answer = await client.post("/tokenize", content=content, headers=JSON)
            assert error_of(answer, 413)["code"] == "body_too_large"


@pytest.mark.parametrize(
    "headers", [[(f"x-{i}", "1") for i in range(257)], [("x-long", "x" * 66_000)]], ids=["many", "long"]
)
async def test_headers_are_bounded(client: httpx.AsyncClient, headers: list[tuple[str, str]]) -> None:
    assert error_of(await client.get("/v1/models", headers=headers), 431)["code"] == "headers_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", CHAT_PATH, 405, "POST"),
        ("DELETE", "/v1/completions", 405, "POST"),
        ("POST", "/v1/models", 405, "GET"),
        ("PUT", "/health", 405, "GET"),
        ("GET", "/v1/nothing", 404, None),
        ("POST", "/v1/images/generations", 404, None),
        ("POST", "/v1/chat/completions/", 404, None),
        ("GET", "/" + "x" * 10_000, 404, None),
        ("GET", "/%ff%00", 404, None),
    ],
)
async def test_unknown_routes_and_methods(
    client: httpx.AsyncClient, method: str, path: str, status: int, allow: str | None
) -> None:
    answer = await client.request(method, path)
    error_of(answer, status)
    assert allow is None or allow in answer.headers["allow"]


async def test_another_model_is_not_found(client: httpx.AsyncClient) -> None:
    answers = [
        await client.post(CHAT_PATH, json=CHAT | {"model": "gpt"}),
        await client.post(TEXT_PATH, json=TEXT | {"model": "x" * 10_000}),
        await client.post("/tokenize", json={"model": "gpt", "prompt": "x"}),
        await client.get("/v1/models/gpt"),
    ]
    for answer in answers:
        error = error_of(answer, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EngineUnavailableError("No engine."), 503, "engine_unavailable"),
        (OverloadedError("Full."), 429, "overloaded"),
        (RuntimeError("secret /srv/x at 0xdeadbeef"), 500, None),
    ],
)
async def test_failures_before_the_first_token_have_their_true_status(
    client: httpx.AsyncClient,
    llm: FakeAsyncLLM,
    failure: Exception,
    status: int,
    code: str | None,
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    llm.fail_after, llm.failure = 0, failure
    answer = await client.post(path, json=body | {"stream": stream})
    error = error_of(answer, status)
    assert error["code"] == code
    assert "secret" not in error["message"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))


async def test_a_prompt_that_is_too_long(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.max_model_len = 4
    for stream in (False, True):
        error = error_of(await client.post(TEXT_PATH, json=TEXT | {"stream": stream, "prompt": "long enough"}))
        assert error["code"] == "context_length_exceeded"


async def test_unexpected_failures_are_logged_with_their_request(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    llm.fail_after = 0
    await client.post(TEXT_PATH, json=TEXT, headers={"x-request-id": "find-me"})
    (record,) = caplog.records
    assert "find-me" in record.getMessage()
    assert record.exc_info


async def test_health_follows_the_engine(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    for path in ("/health", "/ready", "/version", "/", "/metrics"):
        assert (await client.get(path)).status_code == 200
    assert (await client.get("/metrics")).headers["content-type"].startswith("text/plain")
    llm.is_ready = False
    for path in ("/health", "/ready"):
        answer = await client.get(path)
        error_of(answer, 503)
        assert answer.headers["retry-after"]


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcrole", max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "x"]) | junk,
        "content": st.just("x") | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": junk})) | junk,
        "tool_calls": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": junk})) | junk,
        "name": junk,
    },
)
NAMES = [
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids",
    "logit_bias", "bad_words", "logprobs", "top_logprobs", "stream", "stream_options", "tools", "tool_choice",
    "response_format", "metadata", "echo", "best_of", "priority", "cache_salt", "request_id", "prompt_logprobs",
    "chat_template_kwargs", "model", "prompt", "tokens", "whatever", "add_special_tokens",
]  # fmt: skip
FIELDS: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(NAMES, junk)
BODIES = st.fixed_dictionaries({}, optional=FIELDS | {"messages": st.lists(MESSAGE, max_size=3) | junk})
BASES = {CHAT_PATH: CHAT, TEXT_PATH: TEXT, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [104]}}


@pytest.mark.parametrize("path", list(BASES))
@given(body=BODIES, with_base=st.booleans())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_no_body_breaks_the_server(app: Any, path: str, body: dict[str, Any], with_base: bool) -> None:
    async with client_of(app) as client:
        answer = await client.post(path, json=BASES[path] | body if with_base else body)
    if answer.status_code != 200:
        assert answer.status_code in (400, 404)
        error_of(answer, answer.status_code, asked=str(body))


@pytest.mark.parametrize("path", list(BASES))
@given(body=st.binary(max_size=60))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_bytes_break_the_server(app: Any, path: str, body: bytes) -> None:
    async with client_of(app) as client:
        error_of(await client.post(path, content=body, headers=JSON), asked=body.decode(errors="replace"))


@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"]),
    path=st.sampled_from([*BASES, "/v1/models", "/health", "/ready", "/metrics", "/version", "/", ""])
    | st.text(st.characters(codec="ascii"), max_size=30).map("/v1/models/{}".format)
    | st.text(max_size=30).map("/{}".format),
)
@example(method="GET", path="/v1/models/0x")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_path_or_method_breaks_the_server(app: Any, method: str, path: str) -> None:
    async with client_of(app) as client:
        answer = await client.request(method, f"http://test/{quote(path[1:])}")
    assert answer.status_code in (200, 404, 405, 415)
    if answer.status_code != 200 and method != "HEAD":
        error_of(answer, answer.status_code, asked=path)
