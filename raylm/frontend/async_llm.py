"""AsyncLLM: one ingress replica's whole front end; owns tokenizer, router and the text side of all requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TypeAlias

from prometheus_client.core import Metric

from raylm.checkpoint import resolve
from raylm.config import Config
from raylm.errors import InvalidRequestError, UnsupportedFieldError
from raylm.frontend.admission import Admission, Reservation
from raylm.frontend.answers.answer_format import AnswerFormat
from raylm.frontend.answers.chat_processor import ChatProcessor, ChatPrompt
from raylm.frontend.answers.grammar_compiler import GrammarCompiler
from raylm.frontend.defaults import default_max_tokens, pooling_defaults, sampling_defaults
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.engines.parked import Seen, take_parked
from raylm.frontend.engines.routed_engine import Route
from raylm.frontend.engines.router import Router
from raylm.frontend.input_processor import InputProcessor, Limits, RequestHead
from raylm.frontend.outputs import RequestOutput
from raylm.frontend.prompt_state import PromptState, process
from raylm.frontend.request import Request
from raylm.frontend.telemetry import Telemetry
from raylm.frontend.text.chat_template import ChatRequest, ChatTemplate, content_chars
from raylm.frontend.text.template_process import check_templates
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.frontend.timelines.record import Part
from raylm.frontend.timelines.ring import Timelines
from raylm.messages import EngineCoreRequest, EngineStats, ReasoningTokenIds, TokenIds
from raylm.params import PoolingParams, SamplingParams

Prompt: TypeAlias = "str | TokenIds"


class AsyncLLM:
    """Text in, deltas of text out, on one event loop; long tokenizing runs on threads, templates in a process.

    ``adapters`` are the LoRA adapters that requests may name; ``admission`` bounds what waits for a first token.
    If the engine of a request is lost, another engine continues it. Such requests wait at most ``recovery_timeout_s``;
    so do new ones where there is none and ``wake`` starts one. ``rank`` tells the AsyncLLMs apart that use the same
    engines.

    Raises:
        ConfigError: the checkpoint cannot be served.
    """

    def __init__(
        self,
        config: Config,
        admission: Admission | None = None,
        recovery_timeout_s: float = 0.0,
        wake: Callable[[], None] | None = None,
        rank: int = 0,
    ) -> None:
        checkpoint = resolve(config.model, config.revision)
        self.model_name = config.model_name
        self.admission = admission or Admission()
        self.sampling_defaults = sampling_defaults(checkpoint)
        self.default_max_tokens = default_max_tokens(checkpoint)
        self.pooling_defaults = pooling_defaults(checkpoint)
        self._generates = checkpoint.encodes is None
        self._longest = config.max_model_len or checkpoint.max_position_embeddings
        self._prefix_caching = config.cache.prefix_caching
        self._tokenizer = Tokenizer(checkpoint.path)
        check_templates(self._tokenizer.chat_templates)
        self._template = ChatTemplate(self._tokenizer.chat_templates, self._tokenizer.special_tokens, self.model_name)
        self._grammars = GrammarCompiler(checkpoint.path, checkpoint.eos_token_ids)
        self._chat = ChatProcessor(config, self._tokenizer, self._template, self._grammars)
        self._telemetry = Telemetry(
            self.model_name,
            lambda: self._router.stats(),
            lambda: {client.info.engine_id: client.info.worker for client in self._router.clients},
            config.cache,
        )
        self._input = InputProcessor(self._tokenizer, checkpoint.eos_token_ids, self.default_max_tokens)
        self.timelines = Timelines(on_end=self._telemetry.ended)
        self._router = Router(process, recovery_timeout_s, wake=wake, rank=rank)
        self._starts_engines = wake is not None
        self._drawn_again = Seen()
        self.adapters = self._router.adapters

    def add_engine(self, client: EngineClient) -> None:
        """Take in a ready engine; call it from a task that outlives every request. One that dies leaves by itself."""
        self._router.add(client)

    async def until_engine(self) -> None:
        """Wait, however long, for an engine that is not about to end."""
        await self._router.until_lasting_engine()

    async def until_ready(self) -> None:
        """Wait for an engine where one is expected; EngineUnavailableError if it does not come in time."""
        await self._router.until_engine()

    async def stop(self) -> None:
        """Leave all engines, which ends what is open, and end the threads."""
        await self._router.close()
        self._template.close()
        self._grammars.close()
        self._tokenizer.close()

    @property
    def is_ready(self) -> bool:
        """Whether a request would be answered now, or as soon as an engine has been started for it."""
        return self._router.is_ready or self._starts_engines

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that every ready engine takes; without one, what configuration and model say."""
        if self._router.is_ready or self._longest is None:
            return self._router.limits.max_model_len
        return self._longest

    @property
    def cached_block_size(self) -> int:
        """Tokens of a block of the prefix cache; 0 without a cache or a ready engine."""
        sizes = [engine.info.worker.block_size for engine in self.engines] if self._prefix_caching else []
        return sizes[0] if sizes else 0

    @property
    def engines(self) -> list[EngineClient]:
        """Lines to the ready engines."""
        return self._router.clients

    @property
    def engine_stats(self) -> dict[str, EngineStats]:
        """The newest of each ready engine."""
        return self._router.stats()

    @property
    def fingerprint(self) -> str:
        """Of what all ready engines compute with, as OpenAI's ``system_fingerprint``; "" without any."""
        return self._router.fingerprint

    def metrics(self) -> Iterator[Metric]:
        return self._telemetry.collect()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, head: RequestHead, answer_format: AnswerFormat | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt; nothing happens before the first item is asked for.

        Closing the generator, or cancelling who waits for it, aborts the request. What the caller has not read is
        merged, so reading slowly is safe. With an ``answer_format`` (of ``prepare_chat``) reasoning and tool calls are
        separated from the text.

        Raises:
            InvalidRequestError: a field is wrong; ContextLengthError if prompt and answer do not fit.
            ModelNotFoundError: there is no such adapter.
            OverloadedError: too many wait already.
            EngineUnavailableError: no engine is ready; EngineDiedError if it was lost meanwhile.
        """
        with self._part(head) as part:
            thinking = answer_format.thinking if answer_format else None
            request = await self._request(prompt, params, head, thinking, part)
            await _claim(request, head, params.max_tokens)
            with self._opened(request, head, part, answer_format) as (opened, route):
                if head.told_before is None:
                    self._router.send(opened, route)
                else:
                    await self._go_on(opened, head)
                while True:
                    output = await opened.get()
                    yield output
                    if output.finished:
                        return

    async def reserve(
        self, prompts: Sequence[Prompt], params: SamplingParams | PoolingParams, heads: Iterable[RequestHead]
    ) -> Sequence[Prompt]:
        """Claim the tokens of all prompts of one request together; returns what to generate for in their place.

        Where the key of the request has no limit of tokens nothing happens, else the prompts are tokenized.

        Raises:
            RateLimitError: they do not fit into what is left of this minute.
            InvalidRequestError: they never will, or one of the prompts is wrong.
            EngineUnavailableError: no engine is ready.
        """
        first = next(rest := iter(heads))
        owner = first.request
        if owner is None or not owner.bounds_tokens:
            return prompts
        await self._router.until_engine()
        limits, requests = self._router.limits, []
        tokenized: list[Prompt] = []
        for prompt, head in zip(prompts, chain((first,), rest), strict=True):
            token_ids = await self._token_ids(prompt, limits, head)
            if isinstance(params, PoolingParams):
                request = self._input.build_pooling(token_ids, params, limits, head)
            else:
                request = self._input.build(token_ids, params, limits, head)
            requests.append((request, head.told_before))
            tokenized.append(token_ids)
        max_tokens = params.max_tokens if isinstance(params, SamplingParams) else None
        await owner.claim_tokens(requests, max_tokens, first.param)
        return tokenized

    async def _request(
        self, prompt: Prompt, params: SamplingParams, head: RequestHead, thinking: ReasoningTokenIds | None, part: Part
    ) -> EngineCoreRequest:
        if not self._generates:
            message = (
                "This model is an encoder and generates no text. Use /v1/embeddings, or /score of a cross-encoder."
            )
            raise InvalidRequestError(message, param="model")
        await self._router.until_engine()
        limits, spec = self._router.limits, params.structured_outputs
        if params.thinking_token_budget is not None and thinking is None:
            message = "'thinking_token_budget' needs a conversation with a model that thinks before it answers."
            raise UnsupportedFieldError(message, param="thinking_token_budget")
        grammar = None
        if spec is not None:
            part.mark("compile")
            grammar = await self._grammars.compile(spec)
        part.mark("tokenize")
        token_ids = await self._token_ids(prompt, limits, head)
        bad_words = await self._input.bad_words(params.bad_words, limits)
        request = self._input.build(
            token_ids, params, limits, head, bad_words=bad_words, grammar=grammar, thinking=thinking
        )
        return request if head.request is None else head.request.bounded(request, params.max_tokens, head.param)

    async def embed(
        self, prompt: Prompt, params: PoolingParams, head: RequestHead
    ) -> AsyncGenerator[RequestOutput, None]:
        """Compute one prompt and pool its hidden states; the only output holds the vector. Else as ``generate``."""
        with self._part(head) as part:
            await self._router.until_engine()
            limits = self._router.limits
            self.pooling_defaults.check(params)
            part.mark("tokenize")
            token_ids = await self._token_ids(prompt, limits, head)
            request = self._input.build_pooling(token_ids, params, limits, head)
            await _claim(request, head, None)
            with self._opened(request, head, part) as (opened, route):
                self._router.send(opened, route)
                yield await opened.get()

    def _part(self, head: RequestHead) -> AbstractContextManager[Part]:
        record = None if head.request is None else head.request.record
        return self.timelines.part(record, head.request_id, head.adapter or self.model_name)

    async def _token_ids(self, prompt: Prompt, limits: Limits, head: RequestHead) -> TokenIds:
        if not isinstance(prompt, str):
            return prompt
        self._input.check_chars(len(prompt), limits.max_model_len, head.param)
        if _waiting(head.request) is None:
            self.admission.check(len(prompt))
        return await self._tokenizer.encode(prompt, add_special_tokens=True, param=head.param)

    async def _go_on(self, opened: PromptState, head: RequestHead) -> None:
        """Send a prompt that began on an earlier connection, with the tokens that engines still have of it.

        Tokens that no engine has are drawn again, without a charge only once for each stream and ingress: a client can
        send an id of a stream any number of times.
        """
        request = opened.request
        taken = await take_parked(self.engines, request) if head.is_resumed else None
        if taken is None and head.request is not None and self._drawn_again.add(head.stream):
            await head.request.claim_again(request, head.told_before)
            opened.part.told = None
        if taken is not None:
            await opened.take_over(taken.tokens)
        if not opened.finished:
            self._router.go_on(opened, "" if taken is None else taken.fingerprint)

    @contextmanager
    def _opened(
        self,
        request: EngineCoreRequest,
        head: RequestHead,
        part: Part,
        form: AnswerFormat | None = None,
    ) -> Iterator[tuple[PromptState, Route | None]]:
        """The state of a prompt, with the engine to send it to. It is aborted there unless it has ended by then.

        What was served counts for the limits of its key.
        """
        served, part.told = 0, head.told_before
        part.mark("route")
        try:
            route = self._router.pick(request) if self._router.is_ready else None
            tokens, waiting = (
                len(request.prompt_token_ids),
                head.request.reservation if head.request is not None else None,
            )
            reservation = self.admission.prompt(tokens, request.params.n, waiting)
            opened = PromptState(
                request, self._tokenizer, self._telemetry, form, reservation, head.told, part, continues=head.continues
            )
            try:
                yield opened, route
            finally:  # no await may stand here: a cancelled task must not lose the abort
                reservation.release()
                self._router.leave(opened, abort=opened.close())
                served = sum(part.charged())
        finally:
            if head.request is not None:
                head.request.count_served(served)

    @property
    def calls_tools(self) -> bool:
        """Whether the model's form of tool calls is known here."""
        return self._chat.calls_tools

    @property
    def reasons(self) -> bool:
        """Whether the model reasons before it answers, in a form that is known here."""
        return self._chat.reasons

    @property
    def chat_description(self) -> str:
        """How tool calls and reasoning are found in answers, in words."""
        return self._chat.description

    async def prepare_chat(self, request: ChatRequest, params: SamplingParams) -> ChatPrompt:
        """What ``generate`` takes for the next turn of a conversation: prompt, parameters, and how to read answers.

        Raises:
            InvalidRequestError: there is no template, it refuses the messages or a field asks for what this model
                cannot do; ContextLengthError if it could never fit.
        """
        if not request.any_length:
            self._input.check_chars(content_chars(request.messages), self.max_model_len, "messages")
        return await self._chat.prepare(request, params)

    async def render_chat(self, request: ChatRequest) -> list[int]:
        """Token ids of a conversation by the chat template, which sees the request's fields as they are."""
        text = await self._chat.render(request)
        special = request.add_special_tokens
        return await self._tokenizer.encode(text, add_special_tokens=special, param="messages")

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def tokenize_pair(self, one: str, other: str, param: str) -> tuple[list[int], int]:
        """The prompt of a cross-encoder, and the place where the tokens of the second text begin."""
        return await self._tokenizer.encode_pair(one, other, param)

    async def detokenize(self, ids: list[int]) -> str:
        """The text of ``ids``, special tokens included."""
        return await self._tokenizer.decode(ids)

    def text_of(self, ids: list[int]) -> str:
        """As ``detokenize``, for ids of this model and on the calling thread."""
        return self._tokenizer.decode_now(ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that ``skip_special_tokens`` leaves out of texts."""
        return self._tokenizer.special_token_ids

    def token_piece(self, token_id: int) -> str:
        return self._tokenizer.token_piece(token_id)


async def _claim(request: EngineCoreRequest, head: RequestHead, max_tokens: int | None) -> None:
    """Reserve the tokens of a prompt that came alone."""
    if head.request is not None:
        await head.request.claim_tokens([(request, head.told_before)], max_tokens, head.param)


def _waiting(owner: Request | None) -> Reservation | None:
    """What a request counts for in the queue that it was let into, None if it waits by itself."""
    found = owner.reservation if owner is not None else None
    return None if found is None or found.released else found
