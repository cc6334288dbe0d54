"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import orjson

from raylm.frontend import Request, offload
from raylm.ingress.anthropic.blocks import Events, MessageBlocks
from raylm.ingress.anthropic.body import PARAM_NAMES, CountTokensRequest, MessagesRequest
from raylm.ingress.anthropic.told import STATES, Told
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Answer, Chunks
from raylm.ingress.http.sse import named_event
from raylm.ingress.http.stream_ids import Posted
from raylm.ingress.openai.chat import ChatCompletions
from raylm.ingress.openai.fields import renamed
from raylm.ingress.openai.outputs import Usage

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta
    from raylm.ingress.openai.outputs import Outputs

PING = named_event({"type": "ping"})
LAST_EVENT = {"type": "message_stop"}
# Required by Anthropic's specification in a message's usage, but not in a message_delta's.
_OF_WHOLE_USAGE: JSONObject = {
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "inference_geo": None,
    "service_tier": "standard",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CreateMessage:
    def __init__(self, conversations: ChatCompletions) -> None:
        self._conversations = conversations

    async def __call__(self, body: MessagesRequest, request: Request, posted: Posted) -> Answer:
        message_id = f"msg_{uuid.uuid4().hex}"
        stream_id = await self._conversations.open_stream(body.model, posted, STATES, streamed=body.stream)
        told = Told(stream_id)
        if told.ended:
            return _last_event(told)
        with renamed(PARAM_NAMES):
            chat = await offload(body.as_chat, len(body.messages))
            _, outputs = await self._conversations.start(chat, request, message_id, time.time(), stream_id=stream_id)
        message = Message(message_id, body.model, told)
        if body.stream:
            return _encode(message.events(outputs), told)
        async with aclosing(message.events(outputs)) as events:
            async for _ in events:
                pass
        return orjson.dumps(message.as_json())


class CountTokens:
    def __init__(self, conversations: ChatCompletions) -> None:
        self._conversations = conversations

    async def __call__(self, body: CountTokensRequest, request: Request) -> bytes:
        with renamed(PARAM_NAMES):
            chat = await offload(body.as_chat, len(body.messages))
            return orjson.dumps({"input_tokens": await self._conversations.count(chat)})


class Message:
    """Builds one answer. Parts that were ``told`` before are omitted."""

    def __init__(self, message_id: str, model: str, told: Told) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model, "container": None}
        self._told = told
        self._blocks = MessageBlocks(told)
        self._usage = Usage()
        self._stop: JSONObject = {"stop_reason": None, "stop_sequence": None, "stop_details": None}

    def as_json(self) -> JSONObject:
        return self._head | {
            "content": list(self._blocks.blocks),
            **self._stop,
            "usage": self._usage_json() | _OF_WHOLE_USAGE,
        }

    async def events(self, outputs: Outputs) -> AsyncGenerator[Events, None]:
        """Read the sequence to its end. Each item has the events since the previous item."""
        begun = False
        async with aclosing(outputs):
            with renamed(PARAM_NAMES):
                async for output in outputs:
                    self._usage.count(output)
                    events: Events = []
                    if not begun:
                        begun, events = True, [{"type": "message_start", "message": self._opening()}, {"type": "ping"}]
                        events = events[self._told.openings :]
                    for delta in output.deltas:
                        events += self._take(delta)
                    yield events
        self._usage.check_finished()

    def _take(self, delta: CompletionDelta) -> Events:
        self._told.cut(delta)
        events = self._blocks.add(delta)
        reason = delta.finish_reason
        if reason is not None:
            self._stop["stop_reason"] = _STOP_REASONS[reason]
            if reason == "stop" and isinstance(delta.stop_reason, str):
                self._stop |= {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
            events += self._blocks.finish()
            ended = self._stop | {"container": None}
            events.append({"type": "message_delta", "delta": ended, "usage": self._usage_json()})
            events.append(LAST_EVENT)
        return events

    def _opening(self) -> JSONObject:
        """The message before its content. It counts no token that comes after it."""
        message = self.as_json()
        message["usage"] |= {"output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
        return message

    def _usage_json(self) -> JSONObject:
        """Anthropic's count of input tokens excludes cached tokens."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "server_tool_use": None,
        }


async def _encode(items: AsyncGenerator[Events, None], told: Told) -> Chunks:
    async with aclosing(items):
        async for events in items:
            if events:
                yield b"".join(map(told.encode, events))


async def _last_event(told: Told) -> Chunks:
    yield told.encode(LAST_EVENT)
