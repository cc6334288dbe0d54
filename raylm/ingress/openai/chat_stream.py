"""The messages of /v1/chat/completions as clients read them: whole, and as the chunks of a stream."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from raylm.frontend import offload
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Chunks
from raylm.ingress.http.sse import DONE, ChunkTemplate
from raylm.ingress.openai.generation import StreamOptions
from raylm.ingress.openai.logprobs import TokenTexts, chat_logprobs
from raylm.ingress.openai.outputs import Choice, Usage, check_finished, extras, finish_reason, num_details

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta, RequestOutput, ToolCallDelta
    from raylm.ingress.openai.outputs import Outputs


def assistant_message(choice: Choice) -> JSONObject:
    """The message of a finished choice; thoughts go by both of the names in use."""
    message: JSONObject = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message |= {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning}
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return message


def delta_message(delta: CompletionDelta) -> JSONObject:
    """What is new, as the ``delta`` of a chunk's choice."""
    found: JSONObject = {}
    if delta.reasoning:
        found |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    if delta.text or not (delta.reasoning or delta.tool_calls):
        found["content"] = delta.text
    if delta.tool_calls:
        found["tool_calls"] = [_call_chunk(call) for call in delta.tool_calls]
    return found


def _call_chunk(call: ToolCallDelta) -> JSONObject:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


class ChatStream:
    """Turns one request's outputs into chunks: the role first, then text, then the finish_reason, for each choice."""

    def __init__(
        self,
        template: ChunkTemplate,
        tokens: TokenTexts,
        options: StreamOptions,
        *,
        with_logprobs: bool,
        with_token_ids: bool,
    ) -> None:
        self._template = template
        self._tokens = tokens
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._options = options
        self._plain = not (self._with_logprobs or self._with_token_ids or options.continuous_usage_stats)
        self._opened: set[int] = set()
        self._usage = Usage()

    async def chunks(self, outputs: Outputs) -> Chunks:
        """The stream's events; one item holds all that arrived together."""
        finished = False
        async with aclosing(outputs):
            async for output in outputs:
                if not self._opened:
                    self._usage.count_prompt(output)
                finished = output.finished
                if len(output.deltas) == 1 and self._plain:  # nearly always; 64 streams feel the difference
                    data = self._delta(output.deltas[0], output)
                else:
                    data = await offload(partial(self._deltas, output), num_details(output.deltas))
                if data:
                    yield data
        check_finished(finished)
        last = self._template.choices([], self._usage.as_json()) if self._options.include_usage else b""
        yield last + DONE

    def _deltas(self, output: RequestOutput) -> bytes:
        return b"".join([self._delta(delta, output) for delta in output.deltas])

    def _delta(self, delta: CompletionDelta, output: RequestOutput) -> bytes:
        self._usage.count_delta(delta)
        sorted_out = delta.reasoning or delta.tool_calls
        if self._plain and delta.finish_reason is None and delta.index in self._opened and not sorted_out:
            return self._template.text(delta.index, delta.text) if delta.text else b""
        return self._any_delta(delta, output)

    def _any_delta(self, delta: CompletionDelta, output: RequestOutput) -> bytes:
        reason = finish_reason(delta)
        usage = self._usage.as_json() if self._options.continuous_usage_stats else None
        data = b""
        if delta.index not in self._opened:
            data = self._role(delta.index, output, usage)
        anything = delta.text or delta.reasoning or delta.tool_calls
        if anything or (delta.token_ids and not self._plain):
            data += self._template.choices([self._rich_choice(delta)], usage)
        if reason is not None:
            end: dict[str, Any] = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": reason}
            data += self._template.choices([end | extras(False, (), delta.stop_reason)], usage)
        return data

    def _role(self, index: int, output: RequestOutput, usage: JSONObject | None) -> bytes:
        self._opened.add(index)
        opening = {"role": "assistant", "content": "", "refusal": None}
        choice: JSONObject = {"index": index, "delta": opening, "logprobs": None, "finish_reason": None}
        if self._with_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return self._template.choices([choice], usage)

    def _rich_choice(self, delta: CompletionDelta) -> JSONObject:
        choice: JSONObject = {"index": delta.index, "delta": delta_message(delta), "finish_reason": None}
        entries = delta.logprobs or ()
        choice["logprobs"] = chat_logprobs(entries, self._tokens) if self._with_logprobs else None
        return choice | extras(self._with_token_ids, delta.token_ids, None)
