"""POST /v1/chat/completions: takes a conversation, returns an assistant's message, whole or as a stream."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import ChatRequest, Request, RequiredTool
from raylm.frontend import ToolChoice as ChosenTool
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Answer
from raylm.ingress.http.errors import clip
from raylm.ingress.http.stream_ids import UNRESUMABLE, Posted, StreamId, StreamIds
from raylm.ingress.openai.choices import Choices
from raylm.ingress.openai.fields import NumLogprobs, at_most, unsupported, wish, wrong
from raylm.ingress.openai.generation import GenerationBody, check_model, check_target, open_stream, opens_turn
from raylm.ingress.openai.logprobs import TokenTexts, chat_logprobs
from raylm.ingress.openai.messages import MAX_TOOLS, Messages, TextPart, Tool, ToolChoice
from raylm.params import SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM, CompletionDelta, RequestOutput, ToolCallDelta
    from raylm.ingress.openai.outputs import Outputs

_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[_MetadataKey, _MetadataValue], at_most(16)]
CacheRetention = Annotated[
    Literal["in_memory", "in-memory", "24h"] | None, wish("prompt_cache_retention", None, "in_memory", "in-memory")
]
ServiceTier = Annotated[
    Literal["auto", "default", "flex", "scale", "priority", "fast"] | None,
    wish("service_tier", None, "auto", "default"),
]
Verbosity = Literal["low", "medium", "high"]


class ChatCompletionRequest(GenerationBody):
    """The body of a chat completion. Each of OpenAI's fields is served, accepted without effect, or rejected.

    These have no effect on the answer by OpenAI's definition: ``metadata`` (labels of stored answers),
    ``safety_identifier`` and ``user`` (abuse detection), ``prompt_cache_key`` (a hint for routing to caches). These are
    accepted although only one behaviour is served, because they do not change the answer: ``store``, ``verbosity``,
    ``service_tier``, ``prompt_cache_retention``. A header of the answer names them if another value was requested.
    """

    unserved: ClassVar[frozenset[str]] = frozenset({
        "audio", "moderation", "prediction", "prompt_cache_options", "web_search_options",
    })  # fmt: skip
    served_by: ClassVar[dict[str, str]] = GenerationBody.served_by | {
        "best_of": "n",
        "documents": "chat_template_kwargs.documents",
        "enable_thinking": "chat_template_kwargs.enable_thinking",
        "function_call": "tool_choice",
        "functions": "tools",
        "prompt": "messages",
        "thinking_budget": "thinking_token_budget",
    }
    of_tools: ClassVar[tuple[str, ...]] = ("tools", "tool_choice", "parallel_tool_calls")
    of_reasoning: ClassVar[tuple[str, ...]] = ("reasoning_effort", "thinking_token_budget")

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Metadata | None = None
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention = None
    service_tier: ServiceTier = None
    verbosity: Annotated[Verbosity | None, wish("verbosity", None, "medium")] = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    store: Annotated[bool | None, wish("store", None, False)] = None

    def check(self, config: Config) -> None:
        super().check(config)
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities", 'only ["text"] is supported.')
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "'max_tokens' and 'max_completion_tokens' are two names of one limit and must not differ."
            raise InvalidRequestError(message, param="max_completion_tokens")

    def params(self, defaults: JSONObject) -> SamplingParams:
        """SamplingParams of this body. Raises as ``sampling``."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(defaults, max_tokens=limit, logprobs=num_logprobs)

    def chat_request(self, *, any_length: bool, owner: str | None = None) -> ChatRequest:
        """Convert to the front end's ChatRequest, for the key of this name.

        Raises:
            InvalidRequestError: fields contradict each other.
        """
        return ChatRequest(
            messages=cast(list[JSONObject], self.messages),
            tools=cast(list[JSONObject], self.tools) or None,
            tool_choice=self._chosen_tool(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=opens_turn(self.add_generation_prompt, self.continue_final_message),
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
            template_kwargs=self.chat_template_kwargs,
            any_length=any_length,
            owner=None if owner is None else f"{owner}\n{self.cache_salt or ''}",
        )

    @property
    def echoed(self) -> str:
        """The text before an answer with ``echo``: the last message's text, if it has the answer's role."""
        opens = opens_turn(self.add_generation_prompt, self.continue_final_message)
        if not self.echo or (opens and self.messages[-1]["role"] != "assistant"):
            return ""
        content = self.messages[-1].get("content") or ""
        if isinstance(content, str):
            return content
        return "\n".join(part["text"] for part in cast(list[TextPart], content))

    def _chosen_tool(self) -> ChosenTool:
        choice = self.tool_choice or "auto"
        if choice == "auto" or choice == "none":
            return choice
        if not self.tools:
            raise InvalidRequestError("'tool_choice' needs 'tools'.", param="tool_choice")
        if choice == "required":
            return choice
        name = choice["function"]["name"]
        if name not in {tool["function"]["name"] for tool in self.tools}:
            raise wrong("tool_choice.function.name", f"there is no tool '{clip(name, 64)}'")
        return RequiredTool(name)


class ChatChoices(Choices):
    """The choices of a chat completion. A stream's choice begins with the role, then the ``echoed`` text."""

    _text_key = "delta.content"
    _on_top = ("prompt_token_ids",)
    _ending: ClassVar[JSONObject] = {"delta": {}}

    def __init__(
        self,
        head: JSONObject,
        body: ChatCompletionRequest,
        params: SamplingParams,
        tokens: TokenTexts,
        stream_id: StreamId,
        at_once: float,
    ) -> None:
        super().__init__(head, body, params, tokens, stream_id, at_once)
        self._echoed = body.echoed
        self._hides_reasoning = body.include_reasoning is False

    def _shared(self, output: RequestOutput) -> JSONObject:
        return self._prompt(output)

    def _choice(self, index: int, choice: CompletionDelta, output: RequestOutput) -> JSONObject:
        choice.text = self._echoed + choice.text
        return {"message": assistant_message(choice), "logprobs": self._logprobs(choice)}

    def _opening(self, index: int, output: RequestOutput) -> list[JSONObject]:
        opening = {"role": "assistant", "content": "", "refusal": None}
        rest: JSONObject = {"logprobs": None, "finish_reason": None}
        choices = [{"delta": opening} | rest | self._prompt_token_ids(output)]
        return [*choices, {"delta": {"content": self._echoed}} | rest] if self._echoed else choices

    def _news(self, index: int, delta: CompletionDelta) -> JSONObject:
        return {"delta": _delta_message(delta), "logprobs": self._logprobs(delta)}

    def _logprobs(self, delta: CompletionDelta) -> JSONObject | None:
        if self._num_logprobs is None:
            return None
        shown = () if delta.logprobs is None else delta.logprobs[self._num_hidden(delta) :]
        return chat_logprobs(shown, self._shown_as, drawn=bool(self._body.logprob_token_ids))

    def _shown_ids(self, delta: CompletionDelta) -> list[int]:
        return delta.token_ids[self._num_hidden(delta) :]

    def _num_hidden(self, delta: CompletionDelta) -> int:
        return delta.tokens_before_answer if self._hides_reasoning else 0


def assistant_message(choice: CompletionDelta) -> JSONObject:
    """The message of a finished choice. Reasoning is in both fields that clients use."""
    message: JSONObject = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
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
    """New output as the ``delta`` of a chunk's choice."""
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


class ChatCompletions:
    """Sends chat completions, and other APIs' requests converted to them, to an engine. Keeps no state."""

    def __init__(self, llm: AsyncLLM, config: Config, stream_ids: StreamIds | None = None) -> None:
        self._llm = llm
        self._config = config
        self._stream_ids = stream_ids or StreamIds()
        self._tokens = TokenTexts(llm)

    async def __call__(self, body: ChatCompletionRequest, request: Request, posted: Posted) -> Answer:
        name, arrival_time = f"chatcmpl-{body.request_id or request.id}", time.time()
        stream_id = await self.open_stream(body.model, posted, body.n or 1, streamed=body.stream)
        params, outputs = await self.start(body, request, name, arrival_time, stream_id=stream_id)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = {"id": name, "object": kind, "created": int(arrival_time), "model": body.model}
        head["system_fingerprint"] = self._llm.fingerprint
        if body.service_tier:
            head["service_tier"] = "default"
        if body.include_reasoning is False:
            outputs = _without_reasoning(outputs)
        at_once = request.at_once(params.n)
        return await ChatChoices(head, body, params, self._tokens, stream_id, at_once).answer([outputs])

    @property
    def cached_block_size(self) -> int:
        """As AsyncLLM.cached_block_size."""
        return self._llm.cached_block_size

    async def open_stream(self, model: str, posted: Posted, num_choices: int, *, streamed: bool | None) -> StreamId:
        """As ``generation.open_stream``, for any body that is converted to a chat completion."""
        return await open_stream(model, posted, num_choices, self._stream_ids, self._llm, streamed=streamed)

    async def start(
        self,
        body: ChatCompletionRequest,
        request: Request,
        name: str,
        arrival_time: float,
        params: SamplingParams | None = None,
        stream_id: StreamId = UNRESUMABLE,
    ) -> tuple[SamplingParams, Outputs]:
        """Start a chat completion. Returns its parameters and its outputs, which are generated when iterated.

        ``params`` replaces the body's parameters.
        """
        body.check(self._config)
        check_target(request, self._config)
        head = body.head(request, name, arrival_time, "messages", self._llm)
        params = params or body.params(self._llm.sampling_defaults)
        request.expect(1, params.n)
        any_length, owner = body.truncate_prompt_tokens is not None, request.arrival.key_name
        prompt = await self._llm.prepare_chat(body.chat_request(any_length=any_length, owner=owner), params)
        head, drawn = stream_id.nth(0, head, prompt.params)
        (token_ids,) = await self._llm.reserve([body.cut(prompt.token_ids, self._llm.max_model_len)], drawn, [head])
        return params, self._llm.generate(token_ids, drawn, head, prompt.answer_format)

    async def count(self, body: ChatCompletionRequest, owner: str) -> int:
        """The number of tokens of the conversation's prompt, for the key of this name."""
        body.check(self._config)
        check_model(body.model, self._llm)
        asked = body.chat_request(any_length=True, owner=owner)
        prompt = await self._llm.prepare_chat(asked, body.params(self._llm.sampling_defaults))
        return len(prompt.token_ids)

    async def fit(self, body: ChatCompletionRequest, max_new: int, owner: str) -> ChatCompletionRequest:
        """Drop as many of the oldest messages as needed to leave ``max_new`` tokens for an answer.

        Keeps system messages at the beginning, and the last message. What is kept begins with a message of the user, as
        many chat templates demand, unless even the last of these does not fit.
        """
        most = self._llm.max_model_len - max_new
        head = next((at for at, message in enumerate(body.messages) if message["role"] != "system"), 0)
        last = len(body.messages) - 1
        if await self.count(body, owner) <= most:
            return body
        starts = [at for at in range(head, last + 1) if body.messages[at]["role"] == "user"] or [head]
        starts += range(starts[-1] + 1, last + 1)
        low, high = 0, len(starts) - 1
        while low < high:
            middle = (low + high) // 2
            if await self.count(_without(body, head, starts[middle] - head), owner) <= most:
                high = middle
            else:
                low = middle + 1
        return _without(body, head, starts[low] - head)


async def _without_reasoning(outputs: Outputs) -> Outputs:
    """The outputs without reasoning. Its tokens still count."""
    async with aclosing(outputs):
        async for output in outputs:
            for delta in output.deltas:
                delta.reasoning = ""
            yield output


def _without(body: ChatCompletionRequest, head: int, count: int) -> ChatCompletionRequest:
    """Drop the ``count`` oldest messages after ``head``, and answers of tools whose calls were dropped."""
    kept = body.messages[head + count :]
    while len(kept) > 1 and count and kept[0]["role"] == "tool":
        kept = kept[1:]
    return body.model_copy(update={"messages": body.messages[:head] + kept})
