"""``context_management``: old tool results are cleared and counted as in Anthropic's documentation."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount, BetaRawMessageDeltaEvent

from raylm.ingress.anthropic.context import CLEARED
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import typed_events

PATH = "/v1/messages"
RESULT = "x" * 200
NUM_USES = 6


def conversation(**edit: Any) -> dict[str, Any]:
    """Six tool uses, of ``read`` and ``list`` in turn, each with a result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    for place in range(NUM_USES):
        use = {"type": "tool_use", "id": f"u{place}", "name": ("read", "list")[place % 2], "input": {"n": place}}
        result = {"type": "tool_result", "tool_use_id": f"u{place}", "content": f"{place}{RESULT}"}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "list")]
    edits = [{"type": "clear_tool_uses_20250919"} | edit]
    return {"model": "org/fake-model", "messages": messages, "tools": tools, "context_management": {"edits": edits}}


def uses(value: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": value}


def tokens(value: int) -> dict[str, Any]:
    return {"type": "input_tokens", "value": value}


async def shown(client: httpx.AsyncClient, llm: FakeAsyncLLM, **edit: Any) -> tuple[list[int], list[Any], list[Any]]:
    """The numbers of the cleared results, the arguments that the model sees, and the applied edits of the answer."""
    llm.rendered.clear()
    answer = await client.post(f"{PATH}?beta=true", json=conversation(**edit) | {"max_tokens": 5})
    assert answer.status_code == 200, answer.text
    messages = llm.rendered[-1].messages
    results = [message["content"] for message in messages if message["role"] == "tool"]
    calls = [message["tool_calls"][0]["function"] for message in messages if message.get("tool_calls")]
    parsed = BetaMessage.model_validate(answer.json(), strict=True)
    assert parsed.context_management is not None
    applied = [entry.model_dump() for entry in parsed.context_management.applied_edits]
    cleared = [place for place, result in enumerate(results) if result == CLEARED]
    assert all(result == f"{place}{RESULT}" for place, result in enumerate(results) if place not in cleared)
    return cleared, [call["arguments"] for call in calls], applied


@pytest.mark.parametrize(
    ("edit", "cleared"),
    [
        ({}, []),  # default trigger: 100,000 tokens
        ({"trigger": tokens(1000)}, [0, 1, 2]),  # three results are kept
        ({"trigger": uses(6)}, []),
        ({"trigger": uses(5)}, [0, 1, 2]),
        ({"trigger": uses(5), "keep": uses(0)}, [0, 1, 2, 3, 4, 5]),
        ({"trigger": uses(5), "keep": uses(5)}, [0]),
        ({"trigger": uses(5), "keep": uses(6)}, []),
        ({"trigger": uses(5), "exclude_tools": ["list"]}, [0, 2]),
        ({"trigger": uses(5), "keep": uses(1), "exclude_tools": ["read"]}, [1, 3]),
        ({"trigger": uses(5), "clear_at_least": tokens(400)}, [0, 1, 2]),
        ({"trigger": uses(5), "clear_at_least": tokens(100_000)}, []),
    ],
)
async def test_old_results_are_cleared(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, edit: dict[str, Any], cleared: list[int]
) -> None:
    found, arguments, applied = await shown(client, llm, **edit)
    assert found == cleared
    assert arguments == [{"n": place} for place in range(NUM_USES)]
    if not cleared:
        assert applied == []
        return
    (entry,) = applied
    assert entry["cleared_tool_uses"] == len(cleared)
    assert entry["cleared_input_tokens"] == len(cleared) * (1 + len(RESULT) - len(CLEARED))  # a token is a byte


async def test_inputs_are_cleared_when_asked_for(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    _, arguments, _ = await shown(client, llm, trigger=uses(5), clear_tool_inputs=True)
    assert arguments == [{}, {}, {}, {"n": 3}, {"n": 4}, {"n": 5}]
    _, arguments, _ = await shown(client, llm, trigger=uses(5), clear_tool_inputs=["list"])
    assert arguments == [{"n": 0}, {}, {"n": 2}, {"n": 3}, {"n": 4}, {"n": 5}]


async def test_two_edits_are_applied_in_turn(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    body = conversation(trigger=uses(5), keep=uses(4))
    more = {"type": "clear_tool_uses_20250919", "trigger": uses(1), "keep": uses(3)}
    body["context_management"]["edits"] += [{"type": "clear_thinking_20251015", "keep": "all"}, more]
    answer = (await client.post(PATH, json=body | {"max_tokens": 5})).json()
    assert [entry["cleared_tool_uses"] for entry in answer["context_management"]["applied_edits"]] == [2, 1]


async def test_a_stream_tells_the_edits_at_its_end(client: httpx.AsyncClient) -> None:
    body = conversation(trigger=uses(5)) | {"max_tokens": 5, "stream": True}
    found = typed_events((await client.post(PATH, json=body)).text)
    assert "context_management" not in found[0]["message"]
    (delta,) = [event for event in found if event["type"] == "message_delta"]
    parsed = BetaRawMessageDeltaEvent.model_validate(delta, strict=True)
    assert parsed.context_management is not None
    assert [entry.type for entry in parsed.context_management.applied_edits] == ["clear_tool_uses_20250919"]


async def test_counted_tokens_are_those_after_the_edits(client: httpx.AsyncClient) -> None:
    body = conversation(trigger=uses(5))
    edits = body.pop("context_management")
    bare = (await client.post(f"{PATH}/count_tokens", json=body)).json()
    assert bare.keys() == {"input_tokens"}
    counted = (await client.post(f"{PATH}/count_tokens", json=body | {"context_management": edits})).json()
    parsed = BetaMessageTokensCount.model_validate(counted, strict=True)
    assert parsed.context_management is not None
    assert parsed.context_management.original_input_tokens == bare["input_tokens"]
    assert parsed.input_tokens == bare["input_tokens"] - 3 * (1 + len(RESULT) - len(CLEARED))
    usage = (await client.post(PATH, json=body | {"context_management": edits, "max_tokens": 5})).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == parsed.input_tokens


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"trigger": {"type": "turns", "value": 1}}, "trigger.type"),
        ({"trigger": tokens(-1)}, "trigger.value"),
        ({"keep": tokens(3)}, "keep.type"),
        ({"clear_at_least": uses(3)}, "clear_at_least.type"),
        ({"exclude_tools": "read"}, "exclude_tools"),
        ({"clear_tool_inputs": 1}, "clear_tool_inputs"),
        ({"zzz": 1}, "zzz"),
    ],
)
async def test_wrong_edits_are_refused_by_name(client: httpx.AsyncClient, edit: dict[str, Any], named: str) -> None:
    answer = await client.post(PATH, json=conversation(**edit) | {"max_tokens": 5})
    assert answer.status_code == 400
    assert f"context_management.edits[0].{named}" in answer.json()["error"]["message"]
