"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a conversation, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import orjson

from raylm.frontend import offload
from raylm.ingress.anthropic.blocks import Events, MessageBlocks
from raylm.ingress.anthropic.body import PARAM_NAMES, CountTokensRequest, MessagesRequest
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Answer, Chunks
from raylm.ingress.http.sse import named_event
from raylm.ingress.openai.chat import Conversations
from raylm.ingress.openai.fields import renamed
from raylm.ingress.openai.outputs import Usage, check_finished, finish_reason

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta, RequestOutput
    from raylm.ingress.openai.outputs import Outputs

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CreateMessage:
    """The handler of /v1/messages."""

    body = MessagesRequest

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def __call__(self, data: JSONObject, request_id: str) -> Answer:
        """Answer one request.

        Raises:
            RayLMError: the request is refused or failed.
        """
        body = await self.body.read(data)
        message_id = f"msg_{uuid.uuid4().hex}"
        with renamed(PARAM_NAMES):
            chat = await offload(body.as_chat, len(body.messages))
            _, outputs = await self._conversations.start(chat, message_id, time.time())
        message = Message(message_id, body.model)
        if body.stream:
            return _encode(message.events(outputs))
        async with aclosing(message.events(outputs)) as events:
            async for _ in events:
                pass
        return orjson.dumps(message.as_json())


class CountTokens:
    """The handler of /v1/messages/count_tokens."""

    body = CountTokensRequest

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def __call__(self, data: JSONObject, request_id: str) -> bytes:
        """{input_tokens}: of the prompt that the same request to /v1/messages would come to."""
        body = await self.body.read(data)
        with renamed(PARAM_NAMES):
            chat = await offload(body.as_chat, len(body.messages))
            return orjson.dumps({"input_tokens": await self._conversations.count(chat)})


class Message:
    """One answer while it is made."""

    def __init__(self, message_id: str, model: str) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._blocks = MessageBlocks()
        self._usage = Usage()
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def as_json(self) -> JSONObject:
        """Anthropic's Message object."""
        return self._head | {
            "content": list(self._blocks.blocks),
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage_json(),
        }

    async def events(self, outputs: Outputs) -> AsyncGenerator[Events, None]:
        """Read the one sequence to its end; every item is what happened since the last one.

        Raises:
            RayLMError: it was refused, or failed.
        """
        begun = finished = False
        async with aclosing(outputs):
            with renamed(PARAM_NAMES):
                async for output in outputs:
                    events = [] if begun else self._begin(output)
                    begun, finished = True, output.finished
                    for delta in output.deltas:
                        events += self._take(delta)
                    yield events
        check_finished(finished)

    def _begin(self, output: RequestOutput) -> Events:
        self._usage.count_prompt(output)
        return [{"type": "message_start", "message": self.as_json()}, {"type": "ping"}]

    def _take(self, delta: CompletionDelta) -> Events:
        self._usage.count_delta(delta)
        events = self._blocks.add(delta)
        reason = finish_reason(delta)
        if reason is None:
            return events
        self._stop_reason = _STOP_REASONS[reason]
        if reason == "stop" and isinstance(delta.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
        ending = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        events += self._blocks.finish()
        return [
            *events,
            {"type": "message_delta", "delta": ending, "usage": self._usage_json()},
            {"type": "message_stop"},
        ]

    def _usage_json(self) -> JSONObject:
        """Anthropic's count of the input leaves out what came from the cache."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


async def _encode(items: AsyncGenerator[Events, None]) -> Chunks:
    async with aclosing(items):
        async for events in items:
            if events:
                yield b"".join(map(named_event, events))
