"""POST /v1/completions: one prompt or a batch, as text or token ids, continued; whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import offload
from raylm.ingress.http.answer import Pieces, json_answer
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Answer, Chunks
from raylm.ingress.http.sse import DONE, ChunkTemplate
from raylm.ingress.openai.fields import Prompt, Prompts, unsupported
from raylm.ingress.openai.generation import GenerationBody
from raylm.ingress.openai.logprobs import CompletionLogprobs, TokenTexts, join_columns, prompt_part
from raylm.ingress.openai.outputs import (
    Choice,
    Generation,
    Usage,
    check_finished,
    extras,
    finish_reason,
    gather,
    interleave,
    num_details,
)
from raylm.params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM, CompletionDelta, RequestOutput
    from raylm.ingress.openai.outputs import Outputs

MAX_PROMPTS = 1024
MAX_CHOICES = 4096
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationBody):
    """Fields of a completion. ``best_of`` is accepted where it means nothing: equal to ``n``."""

    unserved: ClassVar[frozenset[str]] = frozenset({"suffix"})

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    def check(self, config: Config) -> None:
        super().check(config)
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", "only a value equal to 'n' is supported.")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("'max_tokens' may be 0 only with 'echo'.", param="max_tokens")
        if self.max_tokens == 0 and self.min_tokens:
            raise InvalidRequestError("'min_tokens' must not exceed 'max_tokens'.", param="min_tokens")
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequestError(f"'prompt' may hold at most {MAX_PROMPTS} prompts.", param="prompt")
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequestError(f"'n' times the prompts may make at most {MAX_CHOICES} choices.", param="n")

    def params(self, defaults: JSONObject, default_max_tokens: int | None) -> SamplingParams:
        """How to draw the answers; ``defaults`` and ``default_max_tokens`` are the checkpoint's.

        Echo with logprobs needs the prompt's; ``max_tokens`` 0 draws one token that nobody is shown.

        Raises:
            InvalidRequestError: a value lies out of range.
        """
        wanted = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        limit = max(self.max_tokens, 1) if self.max_tokens is not None else None
        if limit is None and default_max_tokens is None:
            limit = DEFAULT_MAX_TOKENS
        params = self.sampling(defaults, max_tokens=limit, logprobs=self.logprobs)
        return replace(params, prompt_logprobs=max(wanted, default=None))


class Completions:
    """The handler of the route."""

    body = CompletionRequest

    def __init__(self, llm: AsyncLLM, config: Config) -> None:
        self._llm = llm
        self._config = config
        self._tokens = TokenTexts(llm)

    async def __call__(self, data: JSONObject, request_id: str) -> Answer:
        """Answer one request.

        Raises:
            RayLMError: the request is refused or failed.
        """
        arrival_time = time.time()
        body = await self.body.read(data)
        body.check(self._config)
        name = f"cmpl-{body.request_id or request_id}"
        head = body.head(name, arrival_time, "prompt", self._llm)
        params = body.params(self._llm.sampling_defaults, self._llm.default_max_tokens)
        self._llm.admission.expect(len(body.prompt) * params.n)
        prompts = [await self._truncate(prompt, body.truncate_prompt_tokens) for prompt in body.prompt]
        echoed = [await self._text(prompt) if body.echo else "" for prompt in prompts]
        outputs: list[Outputs] = [
            self._llm.generate(prompt, params, head.nth(place)) for place, prompt in enumerate(prompts)
        ]
        shared = {"id": name, "object": "text_completion", "created": int(arrival_time), "model": body.model}
        if body.stream:
            template = ChunkTemplate(shared, "text", null_usage=bool(body.options.include_usage))
            return CompletionStream(body, echoed, params.n, template, self._tokens).chunks(outputs)
        return await self._whole(shared, body, outputs, params.n, echoed)

    async def _truncate(self, prompt: Prompt, limit: int | None) -> Prompt:
        if limit is None:
            return prompt
        token_ids = await self._llm.tokenize(prompt) if isinstance(prompt, str) else prompt
        return token_ids[-limit:] if len(token_ids) > limit else prompt

    async def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        try:
            return await self._llm.detokenize(prompt)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message.replace("tokens", "prompt", 1), param="prompt") from None

    async def _whole(
        self, shared: JSONObject, body: CompletionRequest, outputs: list[Outputs], n: int, echoed: list[str]
    ) -> list[bytes]:
        usage = Usage()
        generations = await gather(outputs, n, usage)
        if body.max_tokens == 0:
            usage.completion_tokens = 0

        def make() -> JSONObject:
            choices = Pieces(
                self._choice(place * n + index, choice, generation, body, echoed[place])
                for place, generation in enumerate(generations)
                for index, choice in enumerate(generation.choices)
            )
            return shared | {"choices": choices, "usage": usage.as_json()}

        return await json_answer(make, sum(generation.num_details for generation in generations))

    def _choice(
        self, index: int, choice: Choice, generation: Generation, body: CompletionRequest, echoed: str
    ) -> JSONObject:
        if body.max_tokens == 0:
            choice = Choice(finish_reason="length")
        shown: JSONObject = {
            "index": index,
            "text": echoed + choice.text,
            "logprobs": self._logprobs(choice, generation, body, echoed),
            "finish_reason": choice.finish_reason,
        }
        shown |= prompt_part(generation, body, self._tokens)
        return shown | extras(body.return_token_ids, choice.token_ids, choice.stop_reason)

    def _logprobs(
        self, choice: Choice, generation: Generation, body: CompletionRequest, echoed: str
    ) -> JSONObject | None:
        if body.logprobs is None:
            return None
        columns = CompletionLogprobs(self._tokens, body.logprobs)
        if not body.echo:
            shown = columns.generated(choice.token_ids, choice.logprobs)
        else:
            prompt = columns.prompt(echoed, generation.prompt_token_ids, generation.prompt_logprobs or ())
            shown = join_columns(prompt, columns.generated(choice.token_ids, choice.logprobs))
        return shown | {"top_logprobs": Pieces(shown["top_logprobs"])}


class CompletionStream:
    """Turns the outputs of a batch of prompts into chunks; choice ``place * n + index`` belongs to prompt ``place``.

    ``echoed`` are the texts that stand before the completions of each prompt, "" without echo.
    """

    def __init__(
        self,
        body: CompletionRequest,
        echoed: Sequence[str],
        n: int,
        template: ChunkTemplate,
        tokens: TokenTexts,
    ) -> None:
        self._body = body
        self._options = options = body.options
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
                    if data := await self._offload(0, output):
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
