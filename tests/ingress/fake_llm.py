"""An AsyncLLM with a byte tokenizer and a scripted reply, for tests of HTTP alone."""

from __future__ import annotations

import asyncio
import codecs
import math
import struct
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from raylm.errors import ContextLengthError, InvalidRequestError
from raylm.frontend import Admission, ChatPrompt, ChatRequest, RequestHead, Timelines
from raylm.frontend.answers.answer_format import AnswerFormat, AnswerReader
from raylm.frontend.answers.reasoning_parsers import REASONING_PARSERS
from raylm.frontend.answers.tool_calls import TOOL_PARSERS
from raylm.frontend.defaults import PoolingDefaults
from raylm.frontend.engines.adapters import AdapterDirectory
from raylm.frontend.outputs import CompletionDelta, PromptLogprobs, RequestOutput, TokenLogprob, TokenLogprobs
from raylm.frontend.text.chat_template import ROLES, prepare_messages
from raylm.messages import ReasoningTokenIds
from raylm.params import PoolingParams, SamplingParams

BOS, EOS = 256, 257
SPECIAL = {BOS: b"<s>", EOS: b"</s>"}
VOCAB = 258
CUSTOM_ROLE = "critic"  # a role besides the usual ones


@dataclass
class Call:
    """One call of ``generate``, and how it ended."""

    prompt: str | list[int]
    params: SamplingParams
    head: RequestHead
    ended: str = "open"  # later "finished", "failed" or "aborted"


@dataclass
class FakeAsyncLLM:
    """Replies ``reply`` with ``step`` tokens in each output. Sequence i > 0 appends its number."""

    reply: str = "Hello wörld"
    step: int = 1
    fail_after: int | None = None  # outputs before ``failure`` is raised
    failure: Exception = field(default_factory=RuntimeError)
    gate: asyncio.Event | None = None  # each output after the first ``open_outputs`` waits for it
    open_outputs: int = 1
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    default_max_tokens: int | None = None
    pooling_defaults: PoolingDefaults = field(default_factory=lambda: PoolingDefaults("last", 4))
    embedded: list[tuple[list[int], PoolingParams]] = field(default_factory=list)
    max_model_len: int = 4096
    cached_block_size: int = 0
    model_name: str = "org/fake-model"
    fingerprint: str = "fp_0123456789abcdef"
    is_ready: bool = True
    calls_tools: bool = True
    reasons: bool = True
    admission: Admission = field(default_factory=Admission)
    answer_format: AnswerFormat | None = None
    adapters: AdapterDirectory = field(default_factory=AdapterDirectory)
    calls: list[Call] = field(default_factory=list)
    owners: list[str | None] = field(default_factory=list)  # the owners of chats
    rendered: list[ChatRequest] = field(default_factory=list)
    timelines: Timelines = field(default_factory=Timelines)
    special_token_ids: frozenset[int] = frozenset(SPECIAL)
    engines: tuple[()] = ()
    engine_stats: dict[str, Any] = field(default_factory=dict)

    def metrics(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("vllm:num_requests_running", "x", 0)

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIAL.get(token_id) or bytes([token_id])

    def token_piece(self, token_id: int) -> str:
        return SPECIAL[token_id].decode() if token_id in SPECIAL else f"<0x{token_id:02X}>"

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    async def detokenize(self, token_ids: list[int]) -> str:
        if any(token_id >= VOCAB for token_id in token_ids):
            raise InvalidRequestError("A token id is not in the vocabulary.", param="tokens")
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    async def render_chat(self, request: ChatRequest) -> list[int]:
        prepared = prepare_messages(request.messages, continue_final_message=request.continue_final_message)
        for place, message in enumerate(prepared):
            if message["role"] not in {*ROLES, CUSTOM_ROLE}:
                raise InvalidRequestError("There is no such role.", param=f"messages[{place}].role")
        request = replace(request, messages=prepared)
        self.rendered.append(request)
        return await self.tokenize("".join(f"{m['role']}:{m['content']}\n" for m in request.messages))

    async def reserve(
        self, prompts: list[str | list[int]], params: SamplingParams | PoolingParams, heads: list[RequestHead]
    ) -> list[str | list[int]]:
        return prompts

    async def embed(
        self,
        prompt: str | list[int],
        params: PoolingParams,
        head: RequestHead,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The first byte is the vector's angle, in 1/256 of a quarter turn, so similar bytes have similar vectors."""
        self.pooling_defaults.check(params)
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        if not ids:
            raise InvalidRequestError(f"{head.param} must not be empty.", param=head.param)
        self.embedded.append((ids, params))
        await asyncio.sleep(0)
        angle = ids[0] / 256 * math.pi / 2
        vector = [math.cos(angle), math.sin(angle), 0.0, 0.0][: params.dimensions]
        yield RequestOutput(head.request_id, ids, [], finished=True, vector=struct.pack(f"{len(vector)}f", *vector))

    async def prepare_chat(self, request: ChatRequest, params: SamplingParams) -> ChatPrompt:
        self.owners.append(request.owner)
        shown = replace(request, tools=request.tools if request.tool_choice != "none" else None)
        token_ids = await self.render_chat(shown)
        return ChatPrompt(token_ids, params, self.answer_format)

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        head: RequestHead,
        answer_format: AnswerFormat | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        call = Call(prompt, params, head)
        self.calls.append(call)
        try:
            form = answer_format or AnswerFormat()
            readers = [AnswerReader(form) for _ in range(params.n)]
            async for output in self._outputs(call):
                output.deltas = [part for delta in output.deltas for part in readers[delta.index].read(delta)]
                yield output
            call.ended = "finished"
        except (GeneratorExit, asyncio.CancelledError):
            call.ended = "aborted"
            raise
        except Exception:
            call.ended = "failed"
            raise

    async def _outputs(self, call: Call) -> AsyncGenerator[RequestOutput, None]:
        params = call.params
        ids = await self.tokenize(call.prompt) if isinstance(call.prompt, str) else call.prompt
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens.", param=call.head.param
            )
        replies = [[*(self.reply + (str(i) if i else "")).encode(), EOS] for i in range(params.n)]
        replies = [tokens[: params.max_tokens] for tokens in replies]
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in replies]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            known = TokenLogprobs(logprob(t, params.prompt_logprobs) for t in ids[1:])
            prompt_logprobs = PromptLogprobs(known, len(ids))
        steps = range(0, max(map(len, replies)), self.step)
        for number, start in enumerate(steps):
            if number == self.fail_after:
                raise self.failure
            if self.gate is not None and number >= self.open_outputs:
                await self.gate.wait()
            await asyncio.sleep(0)
            deltas = []
            for i, tokens in enumerate(replies):
                if new := tokens[start : start + self.step]:
                    last = start + self.step >= len(tokens)
                    text = decoders[i].decode(bytes(t for t in new if t < 256))
                    reason = ("stop" if tokens[-1] == EOS else "length") if last else None
                    logprobs = None
                    if params.logprobs is not None:
                        logprobs = TokenLogprobs(logprob(t, params.logprobs) for t in new)
                    deltas.append(CompletionDelta(i, text, new, logprobs, reason))
            yield RequestOutput(
                call.head.request_id, ids, deltas, len(ids) // 2, prompt_logprobs, finished=start == steps[-1]
            )


def logprob(token_id: int, num_top: int) -> TokenLogprob:
    """The token itself is always the most likely one. The next ids follow at equal distances."""
    top = [((token_id + i) % VOCAB, -0.25 * (i + 1)) for i in range(num_top)]
    return TokenLogprob(token_id, -0.25, 1, top)


def think_and_call(llm: FakeAsyncLLM) -> None:
    """Let the model reason, write a text, and call ``f`` twice."""
    llm.reply = "<think>\nHm.\n</think>\n\nI ask.\n" + "".join(
        f'<tool_call>\n{{"name": "f", "arguments": {{"a": {number}}}}}\n</tool_call>\n' for number in range(2)
    )
    llm.answer_format = AnswerFormat(
        reasoning=REASONING_PARSERS["think"],
        thinking=ReasoningTokenIds(ord("<"), ord("/"), (), begun=False),  # a token of the fake is a byte
        tool_parser=TOOL_PARSERS["hermes"],
        tools={"f": {}},
    )
