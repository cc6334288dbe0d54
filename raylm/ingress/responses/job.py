"""ResponseJob: the state and events of one response during generation. ResponseItems: its output items."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

from raylm.errors import CancelledRequestError, RayLMError
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import as_known_error
from raylm.ingress.openai.fields import renamed
from raylm.ingress.openai.logprobs import TokenTexts, chat_logprobs
from raylm.ingress.openai.outputs import Usage
from raylm.ingress.responses.body import PARAM_NAMES, ResponsesRequest
from raylm.ingress.responses.input import CALLS, item_id, made_call_id, text_part
from raylm.ingress.responses.tools import CallableTool, shown, text_of
from raylm.params import SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta, RequestOutput
    from raylm.ingress.openai.outputs import Outputs


Events = list[JSONObject]


class ResponseJob:
    """Owns the state of one response. ``response`` returns it as JSON at any time.

    The response is ``stored`` unless its client disables that, or the store failed. ``owner`` is the name of its key.
    ``tokens`` counts the tokens of the answer read so far. Tokens of earlier events are read again without events.
    ``last`` is the number of the newest event of a background response.
    """

    def __init__(
        self,
        response_id: str,
        owner: str,
        body: ResponsesRequest,
        params: SamplingParams,
        items: ResponseItems,
        created_at: int,
    ) -> None:
        self.id = response_id
        self.owner = owner
        self.items = items
        self.status = "queued"
        self._body = body
        self._params = params
        self.tokens = 0
        self.last = -1
        self.stored = body.store is not False
        self._created_at = created_at
        self._completed_at: int | None = None
        self._usage = Usage()
        self._error: RayLMError | None = None

    @property
    def is_streamed(self) -> bool:
        return bool(self._body.stream)

    @property
    def done(self) -> bool:
        return self.status in ("completed", "incomplete", "failed")

    def response(self) -> JSONObject:
        return self._as_asked() | {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": None if self._error is None else {"code": "server_error", "message": self._error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": list(self.items.items),
            "usage": self._usage_json(),
        }

    def _usage_json(self) -> JSONObject:
        """The counts so far. Open Responses requires them at any time, and OpenAI's specification forbids null."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    async def events(self, outputs: Outputs, *, begun: bool = False) -> AsyncGenerator[Events, None]:
        """Read the sequence to its end. Each item has the events since the previous item.

        For a response that was ``begun`` before, earlier events are not repeated. ``response.created`` is omitted if an
        event was stored before.

        Raises:
            Exception: generation failed before it began. Later errors become an event.
            CancelledRequestError: an operator ended a background response.
        """
        try:
            async with aclosing(outputs):
                with renamed(PARAM_NAMES):
                    output = await anext(outputs)
                self.status = "in_progress"
                kinds = [] if begun else ["in_progress"] if self.last >= 0 else ["created", "in_progress"]
                yield self.told_as(*kinds) + self._take(output)
                async for output in outputs:
                    yield self._take(output)
            self._usage.check_finished()
        except Exception as error:
            if self.status == "queued" or (self._body.background and isinstance(error, CancelledRequestError)):
                raise
            self.fail(error)
            yield self.told_as("failed")

    def told_as(self, *kinds: str) -> Events:
        """Events with the whole response in its current state."""
        return [{"type": f"response.{kind}", "response": self.response()} for kind in kinds]

    def fail(self, error: Exception) -> None:
        self._error, self.status = as_known_error(error, self.id), "failed"
        self.items.finish("incomplete")

    def check(self) -> None:
        """Raise the error with which the response failed, if it did."""
        if self._error is not None:
            raise self._error

    def _take(self, output: RequestOutput) -> Events:
        events: Events = []
        self._usage.count(output)
        for delta in output.deltas:
            self.tokens += len(delta.token_ids)
            news = self.items.add(delta)
            events += [] if delta.told else news
            if delta.finish_reason is not None:
                self.status = "incomplete" if delta.finish_reason == "length" else "completed"
                self._completed_at = int(time.time()) if self.status == "completed" else None
                events += self.items.finish(self.status)
                events += self.told_as(self.status)
        return events

    def _as_asked(self) -> JSONObject:
        """The fields of the request, with the defaults that were applied."""
        body, params = self._body, self._params
        named = {} if body.conversation_id is None else {"conversation": {"id": body.conversation_id}}
        return (
            ({} if body.user is None else {"user": body.user})
            | named
            | {
                "background": bool(body.background),
                "frequency_penalty": params.frequency_penalty,
                "instructions": body.instructions,
                "max_output_tokens": body.max_output_tokens,
                "max_tool_calls": body.max_tool_calls,
                "metadata": body.metadata or {},
                "model": body.model,
                "parallel_tool_calls": body.parallel_tool_calls is not False,
                "presence_penalty": params.presence_penalty,
                "previous_response_id": body.previous_response_id,
                "prompt_cache_key": body.prompt_cache_key,
                "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
                "safety_identifier": body.safety_identifier,
                "service_tier": "default",
                "store": self.stored,
                "temperature": params.temperature,
                "text": {"format": (body.text and body.text.format) or {"type": "text"}},
                "tool_choice": body.tool_choice or "auto",
                "tools": shown(body.tools),
                "top_logprobs": body.top_logprobs or 0,
                "top_p": params.top_p,
                "truncation": body.truncation or "disabled",
            }
        )


# The first content of an item, besides its id, type and status.
_EMPTY: dict[str, JSONObject] = {
    "reasoning": {"summary": []},
    "message": {"role": "assistant", "content": []},
    "function_call": {"call_id": "", "name": "", "arguments": ""},
    "custom_tool_call": {"call_id": "", "name": "", "input": ""},
}
# The names, in events, of the growing content of an item: the arguments of a call, or its single part.
_PIECES = {
    "reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}  # fmt: skip


class ResponseItems:
    """Builds items of reasoning, text and calls. An item is opened, extended, and closed before the next.

    ``items`` are updated when they are closed. Their ids are the same if a response is generated again. Events have no
    sequence_number; the sender adds it. With ``seal`` reasoning also has encrypted content. ``tools`` are those of the
    request, by the names of their functions.
    """

    def __init__(
        self,
        response_id: str,
        tokens: TokenTexts,
        tools: Mapping[str, CallableTool],
        *,
        with_logprobs: bool,
        seal: Callable[[str], str] | None = None,
    ) -> None:
        self._response_id = response_id
        self._seal = seal
        self.items: list[JSONObject] = []
        self._tokens = tokens
        self._tools = tools
        self._with_logprobs = with_logprobs
        self._kind: str | None = None  # of the open item, which is the last one
        self._pieces: list[str] = []
        self._logprobs: list[JSONObject] = []
        self._call = -1

    def add(self, delta: CompletionDelta) -> Events:
        events: Events = []
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.text)):
            if text:
                events += [] if self._kind == kind else self._open(kind)
                events.append(self._grow(text, delta))
        for call in delta.tool_calls or ():
            if call.index != self._call:
                self._call = call.index
                events += self._open_call(made_call_id(self._response_id, call.index), call.name or "")
            if call.arguments and self._kind == "custom_tool_call":
                self._pieces.append(call.arguments)  # JSON, whose text is sent when it is complete
            elif call.arguments:
                events.append(self._grow(call.arguments, delta))
        return events

    def finish(self, status: str) -> Events:
        """Close the open item as ``completed`` or ``incomplete``. An empty answer gets an empty message."""
        return ([] if self.items else self._open("message")) + self._close(status)

    def _open_call(self, call_id: str, function: str) -> Events:
        tool = self._tools.get(function)
        if tool is None:
            return self._open("function_call", call_id=call_id, name=function)
        named = {"name": tool.tool["name"]} | ({} if tool.namespace is None else {"namespace": tool.namespace})
        return self._open("custom_tool_call" if tool.is_custom else "function_call", call_id=call_id, **named)

    def _open(self, kind: str, **fields: str) -> Events:
        events = self._close("completed")
        self._kind, self._pieces, self._logprobs = kind, [], []
        made = item_id(kind, self._response_id, len(self.items))
        item = {"id": made, "type": kind, "status": "in_progress"} | _EMPTY[kind] | fields
        self.items.append(item)
        events.append({"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)})
        if kind not in CALLS:
            events.append(self._event("content_part.added", part=text_part(_PIECES[kind], "")))
        return events

    def _grow(self, piece: str, delta: CompletionDelta) -> JSONObject:
        assert self._kind is not None
        self._pieces.append(piece)
        event = self._event(f"{_PIECES[self._kind]}.delta", delta=piece)
        if self._kind == "message":
            entries = (delta.text_logprobs or ()) if self._with_logprobs else ()
            logprobs = list(chat_logprobs(entries, self._tokens)["content"].values)
            self._logprobs += logprobs
            event["logprobs"] = _without_bytes(logprobs)
        return event

    def _close(self, status: str) -> Events:
        if self._kind is None:
            return []
        item, text, piece = self.items[-1], "".join(self._pieces), _PIECES[self._kind]
        if self._kind == "function_call":
            item["arguments"] = text
            events = [self._event(f"{piece}.done", name=item["name"], arguments=text)]
        elif self._kind == "custom_tool_call":
            item["input"] = text = text_of(text)
            events = [self._event(f"{piece}.delta", delta=text)] if text else []
            events.append(self._event(f"{piece}.done", input=text))
        else:
            part = text_part(piece, text, self._logprobs)
            item["content"] = [part]
            if self._kind == "reasoning" and self._seal is not None:
                item["encrypted_content"] = self._seal(text)
            shown = {"logprobs": _without_bytes(self._logprobs)} if self._kind == "message" else {}
            done = self._event(f"{piece}.done", text=text, **shown)
            events = [done, self._event("content_part.done", part=part)]
        item["status"] = status
        self._kind = None
        return [*events, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]

    def _event(self, kind: str, **fields: object) -> JSONObject:
        place = {} if self._kind in CALLS else {"content_index": 0}
        head = {"type": f"response.{kind}", "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return head | place | fields


def _without_bytes(logprobs: list[JSONObject]) -> list[JSONObject]:
    """Remove bytes from log-probabilities, which events do not have in OpenAI's specification."""
    return [_bare(entry) | {"top_logprobs": [_bare(top) for top in entry["top_logprobs"]]} for entry in logprobs]


def _bare(entry: JSONObject) -> JSONObject:
    return {"token": entry["token"], "logprob": entry["logprob"]}
