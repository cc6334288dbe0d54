"""Fields that a body may omit, and unknown fields that ``ingress.unknown_fields: warn`` ignores."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, get_type_hints

import httpx
import pytest

from raylm.config import Config
from raylm.ingress import build_asgi_app
from raylm.ingress.http.middleware import MAX_SHOWN
from raylm.ingress.openai import fields, unknown_fields
from raylm.ingress.openai.unknown_fields import AGENTS_CONTEXT, MAX_TOLD
from raylm.messages import LoRAAdapter
from tests.ingress.bad_inputs import ENDPOINTS
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT, client_of, events
from tests.ingress.refused import CHAT_PATH, TEXT_PATH, error_of

IGNORED = "x-raylm-ignored-fields"
WITH_MODEL = [path for path, endpoint in ENDPOINTS.items() if "model" in endpoint.good]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
async def warning(llm: FakeAsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app that ignores unknown fields with a warning."""
    config = Config.model_validate({"ingress": {"unknown_fields": "warn"}})
    async with client_of(build_asgi_app(llm, config)) as found:  # type: ignore[arg-type]
        yield found


@pytest.mark.parametrize("path", WITH_MODEL)
@pytest.mark.parametrize("left_out", [{}, {"model": None}], ids=["absent", "null"])
async def test_the_one_model_need_not_be_named(client: httpx.AsyncClient, path: str, left_out: dict[str, Any]) -> None:
    body = {name: value for name, value in ENDPOINTS[path].good.items() if name != "model"}
    answer = await client.post(path, json=body | left_out)
    assert answer.status_code == 200, answer.text
    if path not in ("/v1/messages/count_tokens", "/v1/responses/compact"):
        assert answer.json()["model"] == "org/fake-model"


@pytest.mark.parametrize("path", WITH_MODEL)
async def test_one_of_several_models_is_named(client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str) -> None:
    llm.adapters.known["mine"] = LoRAAdapter("mine", "/srv/mine")
    body = {name: value for name, value in ENDPOINTS[path].good.items() if name != "model"}
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "'model'" in message
    assert "'org/fake-model', 'mine'" in message
    tokens = await client.post("/tokenize", json={"prompt": "a"})
    assert tokens.status_code == 200, "all served models have one tokenizer"


async def test_unknown_fields_are_left_out_and_told(
    warning: httpx.AsyncClient, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}], "id": 5}
    sent = {
        "messages": [message, CHAT["messages"][0] | {"id": 6}],
        "web_search_options": {},
        "session": {"deep": [1]},
        "audio": None,
        "stream": True,
        "stream_options": {"include_usage": True, "usage": 1},
    }
    known = {
        "messages": [{"role": "user", "content": "Hi"}, *CHAT["messages"]],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = await warning.post(CHAT_PATH, json=sent)
    assert answer.status_code == 200, answer.text
    wanted = await client.post(CHAT_PATH, json=known)
    told = ["messages[].content[].cache_control", "messages[].id", "web_search_options", "session"]
    told.append("stream_options.usage")
    assert answer.headers[IGNORED].split(", ") == told
    assert IGNORED not in wanted.headers
    texts = [[chunk["choices"] for chunk in events(found.text) if chunk != "[DONE]"] for found in (answer, wanted)]
    assert texts[0] == texts[1]
    assert [record.getMessage().split()[5].rstrip(",") for record in caplog.records] == told
    await warning.post(CHAT_PATH, json=sent)
    assert len(caplog.records) == len(told), "each name is logged once"


async def test_every_unserved_field_of_every_body_is_left_out(warning: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    for path, endpoint in ENDPOINTS.items():
        good = endpoint.good | ({"model": llm.model_name} if path in WITH_MODEL else {})
        bare = await warning.post(path, json=good)
        answer = await warning.post(path, json=good | dict.fromkeys(endpoint.body.unserved, "x") | {"zzz": [1]})
        assert answer.status_code == bare.status_code, answer.text
        named = answer.headers[IGNORED].split(", ")
        assert set(named) == {*endpoint.body.unserved, "zzz"}


async def test_values_of_known_fields_are_checked_as_ever(warning: httpx.AsyncClient) -> None:
    answer = await warning.post(CHAT_PATH, json=CHAT | {"zzz": 1, "temperature": 3})
    assert error_of(answer)["param"] == "temperature"
    assert answer.headers[IGNORED] == "zzz"
    answer = await warning.post(CHAT_PATH, json=CHAT | {"messages": [{"role": "user", "content": 5, "zzz": 1}]})
    assert error_of(answer)["param"] == "messages[0].content"


async def test_fields_that_have_another_name_here_are_refused_in_either_case(
    warning: httpx.AsyncClient, client: httpx.AsyncClient
) -> None:
    for api in (client, warning):
        for name, other in {"guided_json": "structured_outputs.json", "functions": "tools", "best_of": "n"}.items():
            error = error_of(await api.post(CHAT_PATH, json=CHAT | {name: 1}))
            assert error["param"] == name
            assert f"'{other}'" in error["message"]
            assert (await api.post(CHAT_PATH, json=CHAT | {name: None})).status_code == 200


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, "tools, tool_choice, "),
        ({"reasoning_effort": "high", "thinking_token_budget": 5}, "reasoning_effort, thinking_token_budget"),
    ],
)
async def test_what_only_other_models_serve_is_left_out_too(
    warning: httpx.AsyncClient, llm: FakeAsyncLLM, fields: dict[str, Any], named: str
) -> None:
    assert IGNORED not in (await warning.post(CHAT_PATH, json=CHAT | fields)).headers
    llm.calls_tools = llm.reasons = False
    answer = await warning.post(CHAT_PATH, json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED].startswith(named)
    assert llm.rendered[-1].tools is None
    assert llm.rendered[-1].reasoning_effort is None
    assert llm.calls[-1].params.thinking_token_budget is None


async def test_objects_lose_what_only_other_models_serve(warning: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.reasons = False
    answer = await warning.post("/v1/responses", json={"input": "Hi", "reasoning": {"effort": "low", "summary": None}})
    assert answer.headers[IGNORED] == "reasoning.effort"
    assert answer.json()["reasoning"]["effort"] is None
    body = {"messages": CHAT["messages"], "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 5}}
    answer = await warning.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "thinking"


async def test_what_is_told_is_bounded_and_plain(warning: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    names = [f"field\r\nset-cookie: {number}, ä" + "x" * 200 for number in range(MAX_TOLD + 50)]
    answer = await warning.post(TEXT_PATH, json=TEXT | dict.fromkeys(names, 1))
    assert answer.status_code == 200
    shown = answer.headers[IGNORED].split(", ")
    assert len(shown) == MAX_SHOWN + 1
    assert shown[-1] == f"and {len(names) - MAX_SHOWN} more"
    assert all(name.isascii() and name.isprintable() and len(name) <= 100 for name in shown)
    assert "set-cookie" not in answer.headers
    assert len(caplog.records) == MAX_TOLD


async def test_an_agent_that_meets_a_small_context_is_warned_of_once(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for length, agent, lines in (
        (AGENTS_CONTEXT, "claude-cli/2.1 (external, cli)", 0),
        (4096, "OpenAI/Python 2.54.0", 0),
        (4096, "claude-cli/2.1 (external, cli)", 1),
        (4096, "claude-cli/2.2 (external, cli)", 1),
        (4096, "opencode/1.2 ai-sdk/4", 2),
    ):
        llm.max_model_len = length
        answer = await client.post(CHAT_PATH, json=CHAT, headers={"user-agent": agent})
        assert answer.status_code == 200
        assert len(caplog.records) == lines, agent
    assert "opencode" in caplog.records[1].getMessage()
    assert "4096" in caplog.records[1].getMessage()


async def test_type_hints_are_read_once(warning: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving them for each message would make a long history slow."""
    text: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}
    body = CHAT | {"messages": [text], "tools": TOOLS, "tool_choice": "none"}
    first = await warning.post(CHAT_PATH, json=body)
    read: list[object] = []

    def counted(kind: object, **options: Any) -> dict[str, Any]:
        read.append(kind)
        return get_type_hints(kind, **options)

    monkeypatch.setattr(fields, "get_type_hints", counted)
    monkeypatch.setattr(unknown_fields, "get_type_hints", counted)
    second = await warning.post(CHAT_PATH, json=body | {"messages": [text] * 20})
    assert first.status_code == second.status_code == 200, second.text
    assert first.headers[IGNORED] == second.headers[IGNORED]
    assert not read
