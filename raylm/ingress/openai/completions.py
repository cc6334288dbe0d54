"""POST /v1/completions: one prompt or a batch, as text or token ids, continued; whole or as a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import offload
from raylm.ingress.http.answer import Pieces, json_answer
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Answer
from raylm.ingress.http.sse import ChunkTemplate
from raylm.ingress.openai.completion_body import DEFAULT_MAX_TOKENS, CompletionRequest
from raylm.ingress.openai.completion_stream import CompletionStream
from raylm.ingress.openai.logprobs import CompletionLogprobs, TokenTexts, prompt_logprobs
from raylm.ingress.openai.models import check_model
from raylm.ingress.openai.outputs import Choice, Generation, Usage, extras, gather
from raylm.ingress.openai.prompts import Prompt, count_items
from raylm.params import SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM
    from raylm.ingress.openai.outputs import Outputs


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt as it goes to the engine, and the text that stands before its completion ("" without echo)."""

    prompt: Prompt
    echoed: str


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
        body = self.body.parse(data)
        body.check(self._config)
        name = f"cmpl-{body.request_id or request_id}"
        head = body.head(name, arrival_time, "prompt", check_model(body.model, self._llm))
        options = body.options
        params = self._params(body)
        prompts = await offload(body.prompts, count_items(body.prompt))
        self._llm.admission.expect(len(prompts) * params.n)
        jobs = [await self._job(prompt, body) for prompt in prompts]
        outputs: list[Outputs] = [
            self._llm.generate(job.prompt, params, head.nth(place)) for place, job in enumerate(jobs)
        ]
        shared = {"id": name, "object": "text_completion", "created": int(arrival_time), "model": body.model}
        echoed = [job.echoed for job in jobs]
        if body.stream:
            template = ChunkTemplate(shared, "text", null_usage=bool(options.include_usage))
            return CompletionStream(body, options, echoed, params.n, template, self._tokens).chunks(outputs)
        return await self._whole(shared, body, outputs, params.n, echoed)

    def _params(self, body: CompletionRequest) -> SamplingParams:
        """Echo with logprobs needs the prompt's; ``max_tokens`` 0 draws one token that nobody is shown."""
        wanted = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
        limit = max(body.max_tokens, 1) if body.max_tokens is not None else None
        if limit is None and self._llm.default_max_tokens is None:
            limit = DEFAULT_MAX_TOKENS
        params = body.sampling(self._llm.sampling_defaults, max_tokens=limit, logprobs=body.logprobs)
        return replace(params, prompt_logprobs=max(wanted, default=None))

    async def _job(self, prompt: Prompt, body: CompletionRequest) -> _Job:
        limit = body.truncate_prompt_tokens
        if limit is not None:
            token_ids = await self._llm.tokenize(prompt) if isinstance(prompt, str) else prompt
            prompt = token_ids[-limit:] if len(token_ids) > limit else prompt
        if not body.echo:
            return _Job(prompt, "")
        return _Job(prompt, prompt if isinstance(prompt, str) else await self._detokenize(prompt))

    async def _detokenize(self, token_ids: list[int]) -> str:
        try:
            return await self._llm.detokenize(token_ids)
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
        if body.return_token_ids:
            shown["prompt_token_ids"] = generation.prompt_token_ids
        if body.prompt_logprobs is not None:
            entries = generation.prompt_logprobs or ()
            shown["prompt_logprobs"] = prompt_logprobs(entries, body.prompt_logprobs, self._tokens)
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
            generated = columns.generated(choice.token_ids, choice.logprobs)
            shown = {name: prompt[name] + generated[name] for name in prompt}
        return shown | {"top_logprobs": Pieces(shown["top_logprobs"])}
