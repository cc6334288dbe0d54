"""The table of bad inputs to Anthropic's endpoints."""

from __future__ import annotations

from typing import Any

from raylm.ingress.anthropic.body import CountTokensRequest, MessagesRequest
from tests.ingress.wrong_values import (
    BOOLEAN,
    CHAT,
    CHOICE,
    COUNT,
    INTEGER,
    OBJECT,
    OBJECTS,
    SAMPLING,
    STRING,
    Endpoint,
)

CLAUDES_MESSAGES = [
    *OBJECTS,
    [], [{}], [{"role": "robot", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": ["x"]}], [{"role": "user", "content": [{"type": "nonsense"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
]  # fmt: skip
CLAUDE: dict[str, list[Any]] = {
    "model": STRING,
    "messages": CLAUDES_MESSAGES,
    "system": [5, True, [5], [{"type": "nonsense"}]],
    "tools": [*OBJECTS, [{}], [{"name": 5, "input_schema": {}}]],
    "tool_choice": [*OBJECT, {}, {"type": "nonsense"}],
    "thinking": [*OBJECT, {}, {"type": "nonsense"}],
    "output_config": [*OBJECT, {"zzz": 1}],
    "cache_control": OBJECT,
    "context_management": [*OBJECT, {"edits": 5}, {"edits": [{"type": "nonsense"}]}],
}
ENDPOINTS = {
    "/v1/messages": Endpoint(
        MessagesRequest,
        CHAT,
        CLAUDE | {
            "max_tokens": [*COUNT, 10**7],
            "stream": BOOLEAN,
            "temperature": SAMPLING["temperature"],
            "top_p": SAMPLING["top_p"],
            "top_k": [*INTEGER, -1],
            "stop_sequences": [5, {}, True, ["a", 1], [""]],
            "metadata": [*OBJECT, {"zzz": 1}],
            "service_tier": CHOICE,
        },
        ("messages", "max_tokens"),
        {"max_tokens": ("messages", "completion")},
    ),
    "/v1/messages/count_tokens": Endpoint(
        CountTokensRequest, {"model": "embedded", "messages": CHAT["messages"]}, CLAUDE, ("messages",)
    ),
}  # fmt: skip
