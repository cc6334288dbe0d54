"""The answers of /v1/chat/completions and /v1/completions: whole, or as JSON chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from raylm.frontend import offload
from raylm.ingress.http.answer import Pieces, json_answer
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Answer, Chunks
from raylm.ingress.http.sse import DONE, ChunkTemplate
from raylm.ingress.http.stream_ids import FINISH, FIRST_OPENING, OPEN, TEXT_TO_THE_END, USAGE, StreamId
from raylm.ingress.openai.generation import GenerationBody
from raylm.ingress.openai.logprobs import TokenTexts, prompt_logprobs
from raylm.ingress.openai.outputs import Usage, gather, merge, num_details, num_prompt_details
from raylm.params import SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import CompletionDelta, RequestOutput
    from raylm.ingress.openai.outputs import Outputs


class Choices(ABC):
    """The answer to one HTTP request. Choice ``place * n + index`` is sequence ``index`` of prompt ``place``.

    In a stream, each choice has an opening, new output, and the finish_reason. ``head`` has the first fields of the
    whole answer, or of every chunk. A resumed stream omits events before its ``stream_id``. The id of each event
    encodes the progress of the stream.
    """

    _text_key: ClassVar[str]
    _on_top: ClassVar[tuple[str, ...]] = ()  # fields of an opening that are next to ``choices`` in its chunk
    _ending: ClassVar[JSONObject]  # fields of a choice's last chunk in place of new output

    def __init__(
        self,
        head: JSONObject,
        body: GenerationBody,
        params: SamplingParams,
        tokens: TokenTexts,
        stream_id: StreamId,
        at_once: float,
    ) -> None:
        self._head = head
        self._body = body
        self._tokens = tokens
        self._shown_as = tokens.by_id() if body.return_tokens_as_token_ids else tokens  # in log-probabilities
        self._n = params.n
        self._num_logprobs = params.logprobs
        self._options = body.options
        self._with_usage = bool(self._options.include_usage and self._options.continuous_usage_stats)
        detailed = params.logprobs is not None or body.return_token_ids or self._with_usage
        self._plain = not detailed
        self._opened: set[int] = set()
        self._id = stream_id
        self._at_once = at_once  # prompts that wait for their first output together
        self._told: Counter[int] = Counter()  # tokens sent of each choice

    async def answer(self, outputs: Sequence[Outputs]) -> Answer:
        return self._chunks(outputs) if self._body.stream else await self._whole(outputs)

    async def _whole(self, outputs: Sequence[Outputs]) -> list[bytes]:
        usage = Usage(len(outputs))
        whole = await gather(outputs, self._n, usage, self._at_once)

        def make() -> JSONObject:
            choices = Pieces(self._whole_choice(choice, output) for output in whole for choice in output.deltas)
            return self._head | self._shared(whole[0]) | {"choices": choices, "usage": usage.as_json()}

        return await json_answer(make, sum(num_details(output.deltas) + num_prompt_details(output) for output in whole))

    def _whole_choice(self, choice: CompletionDelta, output: RequestOutput) -> JSONObject:
        index = output.place * self._n + choice.index
        shown = {"index": index, "finish_reason": choice.finish_reason} | self._choice(index, choice, output)
        return shown | self._token_ids(choice) | _stop_reason(choice)

    async def _chunks(self, outputs: Sequence[Outputs]) -> Chunks:
        """The stream's events. One item has all events that were available together."""
        template = ChunkTemplate(self._head, self._text_key, null_usage=bool(self._options.include_usage))
        usage, with_usage = Usage(len(outputs)), bool(self._options.include_usage)
        if self._id.all_told(with_usage=with_usage):
            yield self._id.line() + DONE
            return
        async with aclosing(merge(outputs, len(outputs), self._at_once)) as items:
            async for output in items:
                shown = None
                if self._with_usage:
                    usage.begin(output)
                    shown = replace(usage)
                usage.count(output)
                if self._plain and len(output.deltas) == 1:  # the common case, made fast for many concurrent streams
                    data = self._delta(template, output, output.deltas[0], shown)
                else:
                    work = partial(self._deltas, template, output, shown)
                    data = await offload(work, num_details(output.deltas))
                if data:
                    yield data
        usage.check_finished()
        last = b""
        if with_usage:
            self._id.reach(0, USAGE)
            last = self._id.line() + template.choices([], usage.as_json())
        yield last + self._id.line() + DONE

    def _deltas(self, template: ChunkTemplate, output: RequestOutput, usage: Usage | None) -> bytes:
        return b"".join([self._delta(template, output, delta, usage) for delta in output.deltas])

    def _delta(
        self, template: ChunkTemplate, output: RequestOutput, delta: CompletionDelta, usage: Usage | None
    ) -> bytes:
        """The chunks for new output of one choice.

        If ``usage`` is given, chunks include it: the opening without the delta's tokens, the others with them.
        """
        index, reason = output.place * self._n + delta.index, delta.finish_reason
        sorted_out = delta.reasoning or delta.tool_calls
        choices = []
        if index not in self._opened:
            self._opened.add(index)
            choices += self._untold_opening(index, output)
        num_opening = len(choices)
        self._told[index] += len(delta.token_ids)
        reached = OPEN + self._told[index] if reason is None else TEXT_TO_THE_END
        if self._plain and reason is None and not choices and not sorted_out and not delta.told:
            self._id.reach(index, reached)
            return self._id.line() + template.text(index, delta.text) if delta.text else b""
        if delta.text or sorted_out or (self._shown_ids(delta) and not self._plain):
            news = {"finish_reason": None} | self._news(index, delta) | self._token_ids(delta)
            if not delta.told:
                choices.append((reached, news))
        if reason is not None and not (delta.told and self._id.finish_told(index)):
            ending = {"logprobs": None, "finish_reason": reason} | self._ending | _stop_reason(delta)
            choices.append((FINISH, ending))
        chunks = []
        for place, (state, choice) in enumerate(choices):
            if usage is not None and place == num_opening:
                usage.add(delta)
            chunks.append(self._chunk(template, index, state, choice, None if usage is None else usage.as_json()))
        if usage is not None and len(choices) <= num_opening:
            usage.add(delta)
        return b"".join(chunks)

    def _untold_opening(self, index: int, output: RequestOutput) -> list[tuple[int, JSONObject]]:
        """The chunks of a choice's opening that were not sent before, each with the progress that it encodes."""
        opening = self._opening(index, output)
        reached = [*[FIRST_OPENING] * (len(opening) - 1), OPEN]
        return list(zip(reached, opening, strict=False))[self._id.openings_told(index, len(opening)) :]

    def _chunk(
        self, template: ChunkTemplate, index: int, reached: int, choice: JSONObject, usage: JSONObject | None
    ) -> bytes:
        self._id.reach(index, reached)
        on_top = {name: choice.pop(name) for name in self._on_top if name in choice}
        return self._id.line() + template.choices([{"index": index} | choice], usage, on_top)

    def _token_ids(self, delta: CompletionDelta) -> JSONObject:
        return {"token_ids": self._shown_ids(delta)} if self._body.return_token_ids else {}

    def _shown_ids(self, delta: CompletionDelta) -> list[int]:
        """The delta's tokens that the answer shows."""
        return delta.token_ids

    def _prompt_token_ids(self, output: RequestOutput) -> JSONObject:
        return {"prompt_token_ids": output.prompt_token_ids} if self._body.return_token_ids else {}

    def _prompt(self, output: RequestOutput) -> JSONObject:
        """The fields of a prompt that the request asks for, in a whole answer."""
        part = self._prompt_token_ids(output)
        if (num_top := self._body.prompt_logprobs) is not None:
            part["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or (), num_top, self._tokens)
        return part

    def _shared(self, output: RequestOutput) -> JSONObject:
        """Fields of a whole answer besides head, choices and usage. ``output`` belongs to the first prompt."""
        return {}

    @abstractmethod
    def _choice(self, index: int, choice: CompletionDelta, output: RequestOutput) -> JSONObject:
        """The fields of a choice in a whole answer."""

    @abstractmethod
    def _opening(self, index: int, output: RequestOutput) -> list[JSONObject]:
        """The first chunks of a choice, if any."""

    @abstractmethod
    def _news(self, index: int, delta: CompletionDelta) -> JSONObject:
        """The fields of a choice in a chunk."""


def _stop_reason(delta: CompletionDelta) -> JSONObject:
    return {} if delta.stop_reason is None else {"stop_reason": delta.stop_reason}
