"""Refusals: each error has its status, names its field, and comes in OpenAI's envelope. No field is ignored."""

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
from tests.ingress.refused import CHAT_PATH, JSON, TEXT_PATH, error_of, junk


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
