"""The stream of /v1/completions: for each choice the echoed prompt first, then text, then the finish_reason."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from raylm.ingress.endpoint import Chunks
from raylm.ingress.generation import Usage, finish_reason, interleave
from raylm.ingress.json_body import JSONObject
from raylm.ingress.logprobs import CompletionLogprobs, TokenTexts
from raylm.ingress.protocol_completions import CompletionRequest
from raylm.ingress.sse import DONE, ChunkTemplate

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta, RequestOutput
    from raylm.ingress.generation import Outputs


class CompletionStream:
    """Turns the outputs of a batch of prompts into chunks; choice ``place * n + index`` belongs to prompt ``place``.

    ``echoed`` are the texts that stand before the completions of each prompt, "" without echo.
    """

    def __init__(
        self, body: CompletionRequest, echoed: Sequence[str], n: int, template: ChunkTemplate, tokens: TokenTexts
    ) -> None:
        self._body = body
        self._echoed = echoed
        self._n = n
        self._template = template
        self._tokens = tokens
        self._columns: dict[int, CompletionLogprobs] = {}
        self._prompts_seen: set[int] = set()
        self._opened: set[int] = set()
        self._usage = Usage()

    async def chunks(self, outputs: Sequence[Outputs], include_usage: bool, continuous_usage: bool) -> Chunks:
        """The stream's events; one item holds all that arrived together."""
        plain = not (self._body.logprobs is not None or self._body.return_token_ids or continuous_usage)
        async with aclosing(interleave(outputs)) as items:
            async for place, output in items:
                if place not in self._prompts_seen:
                    self._prompts_seen.add(place)
                    self._usage.count_prompt(output)
                deltas = [self._delta(place, delta, output, plain, continuous_usage) for delta in output.deltas]
                if data := b"".join(deltas):
                    yield data
        last = self._template.choices([], self._usage.as_json()) if include_usage else b""
        yield last + DONE

    def _delta(
        self, place: int, delta: CompletionDelta, output: RequestOutput, plain: bool, continuous_usage: bool
    ) -> bytes:
        reason = finish_reason(delta)
        shown = self._body.max_tokens != 0  # the one token drawn for max_tokens 0 is not shown
        self._usage.completion_tokens += len(delta.token_ids) if shown else 0
        usage = self._usage.as_json() if continuous_usage else None
        index = place * self._n + delta.index
        data = b""
        if index not in self._opened:
            data = self._open(index, place, output, usage)
        if shown and plain and delta.text:
            data += self._template.text(index, delta.text)
        elif shown and not plain and (delta.text or delta.token_ids):
            data += self._template.choices([self._rich_choice(index, delta)], usage)
        if reason is not None:
            data += self._template.choices([_end(index, reason if shown else "length", delta, shown)], usage)
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


def _end(index: int, reason: str, delta: CompletionDelta, shown: bool) -> JSONObject:
    choice: JSONObject = {"index": index, "text": "", "logprobs": None, "finish_reason": reason}
    if shown and delta.stop_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    return choice
