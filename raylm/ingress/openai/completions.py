"""POST /v1/completions: continues one or several prompts, as text or token ids, whole or as a stream."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import ApiKey, CompletionDelta, Request
from raylm.ingress.http.answer import Pieces
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Answer
from raylm.ingress.http.stream_ids import UNRESUMABLE, Posted, StreamId, StreamIds
from raylm.ingress.openai.choices import Choices
from raylm.ingress.openai.fields import NumLogprobs, Prompt, Prompts, unsupported
from raylm.ingress.openai.generation import GenerationBody, check_target, open_stream, tokenized
from raylm.ingress.openai.logprobs import CompletionLogprobs, TokenTexts
from raylm.params import SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM, RequestOutput
    from raylm.ingress.openai.outputs import Outputs

MAX_PROMPTS = 1024
MAX_CHOICES = 4096
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationBody):
    """The body of a completion. ``best_of`` is accepted only if it equals ``n``."""

    unserved: ClassVar[frozenset[str]] = frozenset({"suffix"})
    served_by: ClassVar[dict[str, str]] = GenerationBody.served_by | {
        "max_completion_tokens": "max_tokens",
        "messages": "prompt",
    }

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
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
            raise InvalidRequestError(f"'n' times the number of prompts must be at most {MAX_CHOICES}.", param="n")

    def params(self, defaults: JSONObject, default_max_tokens: int | None, key: ApiKey | None) -> SamplingParams:
        """SamplingParams of this body. ``defaults`` and ``default_max_tokens`` are the checkpoint's.

        Echo with logprobs requests the prompt's logprobs. ``max_tokens`` 0 draws one token that is not shown. Raises as
        ``sampling``.
        """
        wanted = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        limit = max(self.max_tokens, 1) if self.max_tokens is not None else None
        if limit is None and default_max_tokens is None:
            limit = DEFAULT_MAX_TOKENS
            if key is not None:
                limit = min(limit, key.max_output or limit)
        return self.sampling(
            defaults, max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=max(wanted, default=None)
        )


class CompletionChoices(Choices):
    """The choices of a completion. ``echoed`` has the text before the completions of each prompt, None without echo."""

    _text_key = "text"
    _ending: ClassVar[JSONObject] = {"text": ""}

    def __init__(
        self,
        head: JSONObject,
        body: GenerationBody,
        params: SamplingParams,
        tokens: TokenTexts,
        stream_id: StreamId,
        at_once: float,
        echoed: list[str] | None,
    ) -> None:
        super().__init__(head, body, params, tokens, stream_id, at_once)
        self._echoed = echoed
        self._hidden = tokens.special if params.skip_special_tokens else ()
        self._columns: dict[int, CompletionLogprobs] = {}

    def _choice(self, index: int, choice: CompletionDelta, output: RequestOutput) -> JSONObject:
        echo, shown = self._echo(index, output), self._news(index, choice) | self._prompt(output)
        shown["text"] = echo["text"] + shown["text"]
        if (told := echo["logprobs"]) is not None:
            columns = shown["logprobs"]
            top = Pieces(chain(told.pop("top_logprobs").values, columns.pop("top_logprobs").values))
            shown["logprobs"] = {name: told[name] + column for name, column in columns.items()} | {"top_logprobs": top}
        return shown

    def _opening(self, index: int, output: RequestOutput) -> list[JSONObject]:
        """Empty unless the prompt or its token ids are requested."""
        echo = self._echo(index, output) | {"finish_reason": None} | self._prompt_token_ids(output)
        return [] if self._echoed is None and not self._body.return_token_ids else [echo]

    def _echo(self, index: int, output: RequestOutput) -> JSONObject:
        """The text before a choice's own text, with its log-probabilities if requested."""
        text, logprobs = "" if self._echoed is None else self._echoed[output.place], None
        if self._num_logprobs is not None:
            columns = self._columns[index] = CompletionLogprobs(self._shown_as, self._num_logprobs, self._hidden)
            if self._echoed is not None:
                logprobs = columns.prompt(text, output.prompt_token_ids, output.prompt_logprobs or ())
        return {"text": text, "logprobs": logprobs}

    def _news(self, index: int, delta: CompletionDelta) -> JSONObject:
        logprobs = None
        if index in self._columns:
            logprobs = self._columns[index].generated(delta.token_ids, delta.logprobs or ())
        return {"text": delta.text, "logprobs": logprobs}


@dataclass(frozen=True, slots=True)
class StartedCompletions:
    """A started completion: its parameters, and each prompt (maybe truncated) with its outputs."""

    params: SamplingParams
    prompts: list[Prompt]
    outputs: list[Outputs]


class Completions:
    def __init__(self, llm: AsyncLLM, config: Config, stream_ids: StreamIds | None = None) -> None:
        self._llm = llm
        self._config = config
        self._stream_ids = stream_ids or StreamIds()
        self._tokens = TokenTexts(llm)

    async def __call__(self, body: CompletionRequest, request: Request, posted: Posted) -> Answer:
        name, arrival_time = f"cmpl-{body.request_id or request.id}", time.time()
        num_choices = len(body.prompt) * (body.n or 1)
        ids, llm = self._stream_ids, self._llm
        stream_id = await open_stream(body.model, posted, num_choices, ids, llm, streamed=body.stream)
        started = await self.start(body, request, name, arrival_time, stream_id=stream_id)
        echoed = [await self._text(prompt) for prompt in started.prompts] if body.echo else None
        outputs = [_unseen(stream) for stream in started.outputs] if body.max_tokens == 0 else started.outputs
        shared = {"id": name, "object": "text_completion", "created": int(arrival_time), "model": body.model}
        shared["system_fingerprint"] = self._llm.fingerprint
        params, at_once = started.params, request.at_once(started.params.n)
        choices = CompletionChoices(shared, body, params, self._tokens, stream_id, at_once, echoed)
        return await choices.answer(outputs)

    async def start(
        self,
        body: CompletionRequest,
        request: Request,
        name: str,
        arrival_time: float,
        params: SamplingParams | None = None,
        stream_id: StreamId = UNRESUMABLE,
    ) -> StartedCompletions:
        """Start a completion. ``params`` replaces the body's parameters. Outputs are generated when iterated."""
        body.check(self._config)
        check_target(request, self._config)
        head = replace(body.head(request, name, arrival_time, "prompt", self._llm), continues=True)
        params = params or body.params(self._llm.sampling_defaults, self._llm.default_max_tokens, request.key)
        request.expect(len(body.prompt), params.n)
        special = body.add_special_tokens is not False
        prompts = [await tokenized(prompt, body, self._llm, special=special) for prompt in body.prompt]
        started = [stream_id.nth(place, head.nth(place), params) for place in range(len(prompts))]
        reserved = await self._llm.reserve(prompts, params, [nth for nth, _ in started])
        outputs = [
            self._llm.generate(prompt, drawn, nth) for prompt, (nth, drawn) in zip(reserved, started, strict=True)
        ]
        return StartedCompletions(params, prompts, outputs)

    async def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        try:
            return await self._llm.detokenize(prompt)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message.replace("tokens", "prompt", 1), param="prompt") from None


async def _unseen(outputs: Outputs) -> Outputs:
    """The outputs without the drawn token, for requests that only ask for the prompt."""
    async with aclosing(outputs):
        async for output in outputs:
            for place, delta in enumerate(output.deltas):
                reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
                output.deltas[place] = CompletionDelta(delta.index, finish_reason=reason, told=delta.told)
            yield output
