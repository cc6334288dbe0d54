"""The streams of /v1/chat/completions and /v1/completions: chunks of JSON made of the engine's outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from raylm.frontend import offload
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Chunks
from raylm.ingress.http.sse import DONE, ChunkTemplate
from raylm.ingress.openai.generation import GenerationBody
from raylm.ingress.openai.logprobs import CompletionLogprobs, TokenTexts, chat_logprobs
from raylm.ingress.openai.outputs import (
    Usage,
    check_finished,
    extras,
    finish_reason,
    interleave,
    num_details,
)

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta, RequestOutput, ToolCallDelta
    from raylm.ingress.openai.outputs import Outputs


class ChoiceStream(ABC):
    """For each choice of one HTTP request an opening, what is new, and the finish_reason.

    Choice ``place * n + index`` is the sequence ``index`` of prompt ``place``. ``detailed`` chunks show more than text.
    """

    _ending: ClassVar[JSONObject]  # what stands in the last chunk of a choice in place of its news

    def __init__(self, body: GenerationBody, template: ChunkTemplate, tokens: TokenTexts, detailed: bool) -> None:
        self._template = template
        self._tokens = tokens
        self._n = body.n or 1
        self._with_token_ids = bool(body.return_token_ids)
        self._options = body.options
        self._with_usage = bool(self._options.include_usage and self._options.continuous_usage_stats)
        self._plain = not (detailed or self._with_token_ids or self._with_usage)
        self._prompts: set[int] = set()
        self._opened: set[int] = set()
        self._usage = Usage()

    async def chunks(self, outputs: Sequence[Outputs]) -> Chunks:
        """The stream's events; one item holds all that arrived together."""
        if len(outputs) == 1:
            finished = False
            async with aclosing(outputs[0]) as only:
                async for output in only:
                    finished = output.finished
                    if self._plain and len(output.deltas) == 1:  # nearly always; 64 streams feel the difference
                        data = self._delta(0, output.deltas[0], output)
                    else:
                        data = await self._offload(0, output)
                    if data:
                        yield data
            check_finished(finished)
        else:
            async with aclosing(interleave(outputs)) as items:
                async for place, output in items:
                    if data := await self._offload(place, output):
                        yield data
        last = self._template.choices([], self._usage.as_json()) if self._options.include_usage else b""
        yield last + DONE

    async def _offload(self, place: int, output: RequestOutput) -> bytes:
        return await offload(partial(self._deltas, place, output), num_details(output.deltas))

    def _deltas(self, place: int, output: RequestOutput) -> bytes:
        return b"".join([self._delta(place, delta, output) for delta in output.deltas])

    def _delta(self, place: int, delta: CompletionDelta, output: RequestOutput) -> bytes:
        self._usage.count_delta(delta)
        index = place * self._n + delta.index
        sorted_out = delta.reasoning or delta.tool_calls
        if self._plain and delta.finish_reason is None and index in self._opened and not sorted_out:
            return self._template.text(index, delta.text) if delta.text else b""
        return self._any_delta(index, place, delta, output)

    def _any_delta(self, index: int, place: int, delta: CompletionDelta, output: RequestOutput) -> bytes:
        reason = finish_reason(delta)
        if place not in self._prompts:
            self._prompts.add(place)
            self._usage.count_prompt(output)
        usage = self._usage.as_json() if self._with_usage else None
        choices = []
        if index not in self._opened:
            self._opened.add(index)
            choices += self._opening(index, place, output)
        if delta.text or delta.reasoning or delta.tool_calls or (delta.token_ids and not self._plain):
            choices.append({"index": index, "finish_reason": None} | self._news(index, delta))
        if reason is not None:
            end = {"index": index, "logprobs": None, "finish_reason": reason} | self._ending
            choices.append(end | extras(False, (), delta.stop_reason))
        return b"".join([self._template.choices([choice], usage) for choice in choices])

    @abstractmethod
    def _opening(self, index: int, place: int, output: RequestOutput) -> list[JSONObject]:
        """The first chunk of a choice, if it has one of its own."""

    @abstractmethod
    def _news(self, index: int, delta: CompletionDelta) -> JSONObject:
        """The fields of a choice in a chunk beside its index."""


class ChatStream(ChoiceStream):
    """The role opens a choice, and then what is ``echoed``; ``with_logprobs`` and ``with_reasoning`` as asked."""

    _ending: ClassVar[JSONObject] = {"delta": {}}

    def __init__(
        self,
        body: GenerationBody,
        template: ChunkTemplate,
        tokens: TokenTexts,
        *,
        with_logprobs: bool,
        with_reasoning: bool = True,
        echoed: str = "",
    ) -> None:
        super().__init__(body, template, tokens, with_logprobs)
        self._with_logprobs = with_logprobs
        self._with_reasoning = with_reasoning
        self._echoed = echoed

    def _any_delta(self, index: int, place: int, delta: CompletionDelta, output: RequestOutput) -> bytes:
        if not self._with_reasoning:
            delta.reasoning = ""
        return super()._any_delta(index, place, delta, output)

    def _opening(self, index: int, place: int, output: RequestOutput) -> list[JSONObject]:
        opening = {"role": "assistant", "content": "", "refusal": None}
        prompt = {"prompt_token_ids": output.prompt_token_ids} if self._with_token_ids else {}
        rest = {"logprobs": None, "finish_reason": None}
        choices: list[JSONObject] = [{"index": index, "delta": opening} | rest | prompt]
        return [*choices, {"index": index, "delta": {"content": self._echoed}} | rest] if self._echoed else choices

    def _news(self, index: int, delta: CompletionDelta) -> JSONObject:
        logprobs = chat_logprobs(delta.logprobs or (), self._tokens) if self._with_logprobs else None
        news = {"delta": _delta_message(delta), "logprobs": logprobs}
        return news | extras(self._with_token_ids, delta.token_ids, None)


class CompletionStream(ChoiceStream):
    """``echoed`` are the texts that stand before the completions of each prompt, None without echo.

    ``num_logprobs`` are shown of each token, None for none.
    """

    _ending: ClassVar[JSONObject] = {"text": ""}

    def __init__(
        self,
        body: GenerationBody,
        template: ChunkTemplate,
        tokens: TokenTexts,
        *,
        num_logprobs: int | None,
        echoed: Sequence[str] | None,
    ) -> None:
        super().__init__(body, template, tokens, num_logprobs is not None)
        self._num_logprobs = num_logprobs
        self._echoed = echoed
        self._unseen = body.max_tokens == 0  # one token is drawn, and not shown
        self._columns: dict[int, CompletionLogprobs] = {}

    def _delta(self, place: int, delta: CompletionDelta, output: RequestOutput) -> bytes:
        if not self._unseen:
            return super()._delta(place, delta, output)
        reason: Literal["length"] | None = None if finish_reason(delta) is None else "length"
        bare = replace(delta, text="", token_ids=[], logprobs=None, stop_reason=None, finish_reason=reason)
        return self._any_delta(place * self._n + delta.index, place, bare, output)

    def _opening(self, index: int, place: int, output: RequestOutput) -> list[JSONObject]:
        """Empty unless the prompt is echoed or its token ids are asked for."""
        if self._num_logprobs is not None:
            self._columns[index] = CompletionLogprobs(self._tokens, self._num_logprobs)
        if self._echoed is None and not self._with_token_ids:
            return []
        echoed = "" if self._echoed is None else self._echoed[place]
        choice: JSONObject = {"index": index, "text": echoed, "logprobs": None, "finish_reason": None}
        if self._echoed is not None and index in self._columns:
            entries = output.prompt_logprobs or ()
            choice["logprobs"] = self._columns[index].prompt(echoed, output.prompt_token_ids, entries)
        if self._with_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return [choice]

    def _news(self, index: int, delta: CompletionDelta) -> JSONObject:
        logprobs = None
        if index in self._columns:
            logprobs = self._columns[index].generated(delta.token_ids, delta.logprobs or ())
        return {"text": delta.text, "logprobs": logprobs} | extras(self._with_token_ids, delta.token_ids, None)


def assistant_message(choice: CompletionDelta) -> JSONObject:
    """The message of a finished choice; reasoning goes by both of the names in use."""
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


def _delta_message(delta: CompletionDelta) -> JSONObject:
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
