"""The table of bad inputs to /v1/responses and /v1/responses/compact."""

from __future__ import annotations

from raylm.ingress.responses.body import ResponsesRequest
from raylm.ingress.responses.compact import CompactRequest
from raylm.ingress.responses.conversations import (
    AddItemsRequest,
    CreateConversationRequest,
    UpdateConversationRequest,
)
from tests.ingress.wrong_values import (
    BOOLEAN,
    CHOICE,
    COUNT,
    GENERATION,
    INTEGER,
    OBJECT,
    OBJECTS,
    REQUEST_ID,
    SAMPLING,
    STRING,
    TEXTS,
    Endpoint,
)

USER = {"role": "user", "content": "x"}
ITEMS = [
    5, "Hi", {}, [5], [{}], [{"type": "nonsense"}], [USER | {"role": "robot"}], [USER] * 21,
    [USER | {"id": "msg_1"}] * 2,
    [{"id": "msg_unknown", "type": "item_reference"}],
]  # fmt: skip
METADATA = [*OBJECT, {"a": 1}, {"x" * 65: "a"}, {"a": "x" * 513}, {f"{n}": "" for n in range(17)}]

ENDPOINTS = {
    "/v1/responses": Endpoint(
        ResponsesRequest,
        {"model": "embedded", "input": "Hi", "max_output_tokens": 4},
        SAMPLING | {
            "model": STRING,
            "input": [5, True, {}, [5], [{}], [{"type": "nonsense"}], [{"role": "robot", "content": "x"}]],
            "instructions": STRING,
            "previous_response_id": [*STRING, "x" * 129],
            "conversation": [5, True, [], {}, {"id": 5}, {"id": "a", "zzz": 1}, "x" * 129, "conv_unknown"],
            "stream": BOOLEAN,
            "stream_options": [*OBJECT, {"zzz": 1}],
            "store": BOOLEAN,
            "background": BOOLEAN,
            "max_output_tokens": [*COUNT, 10**7],
            "top_logprobs": [*INTEGER, -1, 21],
            "include": [*TEXTS, ["nonsense"]],
            "text": [*OBJECT, {"zzz": 1}, {"format": 5}],
            "reasoning": [*OBJECT, {"zzz": 1}, {"effort": 5}],
            "tools": [*OBJECTS, [{}], [{"type": "nonsense"}]],
            "tool_choice": [5, "sometimes", [1], {"type": "nonsense"}],
            "parallel_tool_calls": BOOLEAN,
            "truncation": CHOICE,
            "metadata": [*OBJECT, {"a": 1}],
            "client_metadata": OBJECT,
            "user": STRING,
            "safety_identifier": STRING,
            "prompt_cache_key": STRING,
            "prompt_cache_retention": CHOICE,
            "service_tier": CHOICE,
            "max_tool_calls": COUNT,
            "request_id": REQUEST_ID,
            "chat_template_kwargs": [*OBJECT, {"messages": []}],
            "structured_outputs": GENERATION["structured_outputs"],
            "thinking_token_budget": [*INTEGER, -1],
        },
        ("input",),
        {"max_output_tokens": ("input",)},
    ),
    "/v1/responses/compact": Endpoint(
        CompactRequest,
        {"model": "embedded", "input": "Hi"},
        {
            "model": STRING,
            "input": [5, True, {}, [5], [{}], [{"type": "nonsense"}], [{"role": "robot", "content": "x"}]],
            "instructions": STRING,
            "previous_response_id": [*STRING, "x" * 129],
            "prompt_cache_key": STRING,
            "prompt_cache_retention": CHOICE,
            "service_tier": CHOICE,
        },
        ("input",),
    ),
    "/v1/conversations": Endpoint(CreateConversationRequest, {}, {"items": ITEMS, "metadata": METADATA}),
    "/v1/conversations/conv_1": Endpoint(
        UpdateConversationRequest, {"metadata": {}}, {"metadata": METADATA}, ("metadata",)
    ),
    "/v1/conversations/conv_1/items": Endpoint(
        AddItemsRequest, {"items": [{"role": "user", "content": "Hi"}]}, {"items": [*ITEMS, None]}, ("items",)
    ),
}  # fmt: skip
