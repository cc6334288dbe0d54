"""Histories that litellm's types can express: each is answered, or refused for a reason other than an unknown key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MODEL = "embedded"
_EXAMPLES = 150


def litellm_histories(url: str) -> None:
    """With chats, and with Anthropic's messages."""
    from litellm.types.llms.anthropic import AllAnthropicPassThroughMessageValues
    from litellm.types.llms.openai import AllMessageValues

    _any_history(f"{url}/v1/chat/completions", AllMessageValues)
    _any_history(f"{url}/v1/messages", AllAnthropicPassThroughMessageValues)


def _any_history(address: str, kind: Any) -> None:
    import httpx
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from tests.ingress.typed_values import values_of

    answered = 0
    with httpx.Client(timeout=300) as client:

        @settings(max_examples=_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(values_of(kind), min_size=1, max_size=4))
        def ask(messages: list[Any]) -> None:
            nonlocal answered
            answer = client.post(address, json={"model": MODEL, "max_tokens": 1, "messages": messages})
            assert answer.status_code in (200, 400), answer.text[:600]
            if answer.status_code == 400:
                message = answer.json()["error"]["message"]
                assert "this field is not supported" not in message, message
                assert "Unrecognized" not in message, message
            answered += answer.status_code == 200

        run: Callable[[], None] = ask
        run()
    assert answered > 0
