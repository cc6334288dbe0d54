"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

import orjson

from raylm.frontend import Request, offload
from raylm.ingress.anthropic.blocks import Events, MessageBlocks
from raylm.ingress.anthropic.body import PARAM_NAMES, CountTokensRequest, MessagesRequest
from raylm.ingress.anthropic.context import edit, with_messages
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
_OF_WHOLE_USAGE: JSONObject = {"inference_geo": None, "service_tier": "standard"}
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
            edited = await edit(body, partial(_count, self._conversations, request.arrival.key_name))
            shown = with_messages(body, edited.messages)
            chat = await offload(shown.as_chat, len(body.messages))
            _, outputs = await self._conversations.start(chat, request, message_id, time.time(), stream_id=stream_id)
        edits = None if body.context_management is None else edited.applied
        block_size = self._conversations.cached_block_size if body.asks_for_cache else 0
        message = Message(message_id, body.model, told, edits, block_size)
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
            edited = await edit(body, partial(_count, self._conversations, request.arrival.key_name))
            count = await _count(self._conversations, request.arrival.key_name, with_messages(body, edited.messages))
        answer: JSONObject = {"input_tokens": count}
        if body.context_management is not None:
            original = count if edited.original is None else edited.original
            answer["context_management"] = {"original_input_tokens": original}
        return orjson.dumps(answer)


async def _count(conversations: ChatCompletions, owner: str, body: CountTokensRequest) -> int:
    return await conversations.count(await offload(body.as_chat, len(body.messages)), owner)


class Message:
    """Builds one answer. Parts that were ``told`` before are omitted.

    ``edits`` are the edits of context_management that were applied; None if the request did not ask for any.
    ``block_size`` is the size of blocks of the prefix cache in tokens; 0 does not count what is written to the cache.
    """

    def __init__(
        self, message_id: str, model: str, told: Told, edits: list[JSONObject] | None = None, block_size: int = 0
    ) -> None:
        self._block_size = block_size
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model, "container": None}
        self._told = told
        self._blocks = MessageBlocks(told)
        self._usage = Usage()
        self._edits: JSONObject = {} if edits is None else {"context_management": {"applied_edits": edits}}
        self._stop: JSONObject = {"stop_reason": None, "stop_sequence": None, "stop_details": None}

    def as_json(self) -> JSONObject:
        return self._head | {
            "content": list(self._blocks.blocks),
            **self._stop,
            "usage": self._usage_json() | _OF_WHOLE_USAGE | {"cache_creation": self._cache_creation()},
            **self._edits,
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
            events.append({"type": "message_delta", "delta": ended, "usage": self._usage_json(), **self._edits})
            events.append(LAST_EVENT)
        return events

    def _opening(self) -> JSONObject:
        """The message before its content. It counts no token that comes after it."""
        message = self.as_json()
        message["usage"] |= {"output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
        message.pop("context_management", None)  # it comes in the message_delta
        return message

    @property
    def _num_created(self) -> int:
        """The prompt's tokens that an equal prompt reads from the cache from now on, but that this one did not."""
        if not self._block_size or not self._usage.prompt_tokens:
            return 0
        readable = (self._usage.prompt_tokens - 1) // self._block_size * self._block_size
        return max(readable - self._usage.cached_tokens, 0)

    def _cache_creation(self) -> JSONObject:
        return {"ephemeral_5m_input_tokens": self._num_created, "ephemeral_1h_input_tokens": 0}

    def _usage_json(self) -> JSONObject:
        """Anthropic's count of input tokens excludes tokens that are read from the cache or written to it."""
        usage, created = self._usage, self._num_created
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - created,
            "cache_creation_input_tokens": created,
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
