"""The stream of /v1/completions: for each choice the echoed prompt first, then text, then the finish_reason."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from raylm.frontend import offload
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Chunks
from raylm.ingress.http.sse import DONE, ChunkTemplate
from raylm.ingress.openai.completion_body import CompletionRequest
from raylm.ingress.openai.generation_body import StreamOptions
from raylm.ingress.openai.logprobs import CompletionLogprobs, TokenTexts
from raylm.ingress.openai.outputs import Usage, check_finished, extras, finish_reason, interleave, num_details

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta, RequestOutput
    from raylm.ingress.openai.outputs import Outputs


class CompletionStream:
    """Turns the outputs of a batch of prompts into chunks; choice ``place * n + index`` belongs to prompt ``place``.

    ``echoed`` are the texts that stand before the completions of each prompt, "" without echo.
    """

    def __init__(
        self,
        body: CompletionRequest,
        options: StreamOptions,
        echoed: Sequence[str],
        n: int,
        template: ChunkTemplate,
        tokens: TokenTexts,
    ) -> None:
        self._body = body
        self._options = options
        self._echoed = echoed
        self._n = n
        self._template = template
        self._tokens = tokens
        self._plain = not (body.logprobs is not None or body.return_token_ids or options.continuous_usage_stats)
        self._columns: dict[int, CompletionLogprobs] = {}
        self._prompts_seen: set[int] = set()
        self._opened: set[int] = set()
        self._usage = Usage()

    async def chunks(self, outputs: Sequence[Outputs]) -> Chunks:
        """The stream's events; one item holds all that arrived together."""
        if len(outputs) == 1:
            finished = False
            async with aclosing(outputs[0]) as only:
                async for output in only:
                    finished = output.finished
                    if data := await self._aside(0, output):
                        yield data
            check_finished(finished)
        else:
            async with aclosing(interleave(outputs)) as items:
                async for place, output in items:
                    if data := await self._aside(place, output):
                        yield data
        last = self._template.choices([], self._usage.as_json()) if self._options.include_usage else b""
        yield last + DONE

    async def _aside(self, place: int, output: RequestOutput) -> bytes:
        return await offload(partial(self._encode, place, output), 0 if self._plain else num_details(output.deltas))

    def _encode(self, place: int, output: RequestOutput) -> bytes:
        if place not in self._prompts_seen:
            self._prompts_seen.add(place)
            self._usage.count_prompt(output)
        return b"".join([self._delta(place, delta, output) for delta in output.deltas])

    def _delta(self, place: int, delta: CompletionDelta, output: RequestOutput) -> bytes:
        index = place * self._n + delta.index
        if self._body.max_tokens == 0:  # one token is drawn, and not shown
            ended = finish_reason(delta) is not None
            unseen = replace(delta, text="", token_ids=[], logprobs=None, stop_reason=None)
            return self._any_delta(index, place, replace(unseen, finish_reason="length" if ended else None), output)
        self._usage.count_delta(delta)
        if self._plain and delta.finish_reason is None and index in self._opened:
            return self._template.text(index, delta.text) if delta.text else b""
        return self._any_delta(index, place, delta, output)

    def _any_delta(self, index: int, place: int, delta: CompletionDelta, output: RequestOutput) -> bytes:
        reason = finish_reason(delta)
        usage = self._usage.as_json() if self._options.continuous_usage_stats else None
        data = b""
        if index not in self._opened:
            data = self._open(index, place, output, usage)
        if self._plain and delta.text:
            data += self._template.text(index, delta.text)
        elif not self._plain and (delta.text or delta.token_ids):
            data += self._template.choices([self._rich_choice(index, delta)], usage)
        if reason is not None:
            end: JSONObject = {"index": index, "text": "", "logprobs": None, "finish_reason": reason}
            data += self._template.choices([end | extras(False, (), delta.stop_reason)], usage)
        return data

    def _open(self, index: int, place: int, output: RequestOutput, usage: JSONObject | None) -> bytes:
        """The first chunk of a choice, empty unless the prompt is echoed or its token ids are asked for."""
        self._opened.add(index)
        body, echoed = self._body, self._echoed[place]
        if body.logprobs is not None:
            self._columns[index] = CompletionLogprobs(self._tokens, body.logprobs)
        if not (body.echo or body.return_token_ids):
            return b""
        choice: JSONObject = {"index": index, "text": echoed, "logprobs": None, "finish_reason": None}
        if body.echo and body.logprobs is not None:
            entries = output.prompt_logprobs or ()
            choice["logprobs"] = self._columns[index].prompt(echoed, output.prompt_token_ids, entries)
        if body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return self._template.choices([choice], usage)

    def _rich_choice(self, index: int, delta: CompletionDelta) -> JSONObject:
        choice: JSONObject = {"index": index, "text": delta.text, "logprobs": None, "finish_reason": None}
        if index in self._columns:
            choice["logprobs"] = self._columns[index].generated(delta.token_ids, delta.logprobs or ())
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice
