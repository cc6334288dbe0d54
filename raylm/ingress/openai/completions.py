"""POST /v1/completions: one prompt or a batch, as text or token ids, continued; whole or as a stream."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import CompletionDelta
from raylm.ingress.http.answer import Pieces, json_answer
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Answer
from raylm.ingress.http.sse import ChunkTemplate
from raylm.ingress.openai.fields import Prompt, Prompts, unsupported
from raylm.ingress.openai.generation import GenerationBody
from raylm.ingress.openai.logprobs import CompletionLogprobs, TokenTexts, prompt_part
from raylm.ingress.openai.outputs import Generation, Usage, extras, gather
from raylm.ingress.openai.streams import CompletionStream
from raylm.params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM
    from raylm.ingress.openai.outputs import Outputs

MAX_PROMPTS = 1024
MAX_CHOICES = 4096
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationBody):
    """Fields of a completion. ``best_of`` is accepted where it means nothing: equal to ``n``."""

    unserved: ClassVar[frozenset[str]] = frozenset({"suffix"})
    served_by: ClassVar[dict[str, str]] = GenerationBody.served_by | {
        "max_completion_tokens": "max_tokens",
        "messages": "prompt",
    }

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    def check(self, config: Config) -> None:
        super().check(config)
        if self.best_of not in (None, self.n or 1):
            raise unsupported(
                "best_of", "only a value equal to 'n' is supported; use 'n', and 'logprobs' to choose by."
            )
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

        Echo with logprobs needs the prompt's; ``max_tokens`` 0 draws one token that is not shown.

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
    body = CompletionRequest

    def __init__(self, llm: AsyncLLM, config: Config) -> None:
        self._llm = llm
        self._config = config
        self._tokens = TokenTexts(llm)

    async def __call__(self, data: JSONObject, request_id: str) -> Answer:
        arrival_time = time.time()
        body = await self.body.read(data)
        body.check(self._config)
        name = f"cmpl-{body.request_id or request_id}"
        head = body.head(name, arrival_time, "prompt", self._llm)
        params = body.params(self._llm.sampling_defaults, self._llm.default_max_tokens)
        self._llm.admission.expect(len(body.prompt) * params.n)
        prompts = [await self._tokenized(prompt, body) for prompt in body.prompt]
        echoed = [await self._text(prompt) if body.echo else "" for prompt in prompts]
        outputs: list[Outputs] = [
            self._llm.generate(prompt, params, head.nth(place)) for place, prompt in enumerate(prompts)
        ]
        shared = {"id": name, "object": "text_completion", "created": int(arrival_time), "model": body.model}
        if body.stream:
            template = ChunkTemplate(shared, "text", null_usage=bool(body.options.include_usage))
            tokens = self._tokens.named(by_id=body.return_tokens_as_token_ids)
            return CompletionStream(
                body, template, tokens, num_logprobs=body.logprobs, echoed=echoed if body.echo else None
            ).chunks(outputs)
        return await self._whole(shared, body, outputs, params.n, echoed)

    async def _tokenized(self, prompt: Prompt, body: CompletionRequest) -> Prompt:
        """A text stays one, unless it is cut or its special tokens are not added."""
        special = body.add_special_tokens is not False
        if isinstance(prompt, str) and special and body.truncate_prompt_tokens is None:
            return prompt
        if isinstance(prompt, list):
            return body.cut(prompt)
        token_ids = await self._llm.tokenize(prompt, add_special_tokens=special)
        kept = body.cut(token_ids)
        return prompt if special and len(kept) == len(token_ids) else kept

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
        self, index: int, choice: CompletionDelta, generation: Generation, body: CompletionRequest, echoed: str
    ) -> JSONObject:
        if body.max_tokens == 0:
            choice = CompletionDelta(index, finish_reason="length")
        shown: JSONObject = {
            "index": index,
            "text": echoed + choice.text,
            "logprobs": self._logprobs(choice, generation, body, echoed),
            "finish_reason": choice.finish_reason,
        }
        shown |= prompt_part(generation, body, self._tokens)
        return shown | extras(body.return_token_ids, choice.token_ids, choice.stop_reason)

    def _logprobs(
        self, choice: CompletionDelta, generation: Generation, body: CompletionRequest, echoed: str
    ) -> JSONObject | None:
        if body.logprobs is None:
            return None
        columns = CompletionLogprobs(self._tokens.named(by_id=body.return_tokens_as_token_ids), body.logprobs)
        if not body.echo:
            shown = columns.generated(choice.token_ids, choice.logprobs or ())
        else:
            prompt = columns.prompt(echoed, generation.prompt_token_ids, generation.prompt_logprobs or ())
            generated = columns.generated(choice.token_ids, choice.logprobs or ())
            shown = {name: prompt[name] + generated[name] for name in prompt}
        return shown | {"top_logprobs": Pieces(shown["top_logprobs"])}
