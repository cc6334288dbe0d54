"""Conversations: how a chat completion, or what another API's request comes down to, is handed to an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raylm.config import Config
from raylm.frontend import ChatRequest, offload
from raylm.ingress.openai.chat_body import ChatCompletionRequest
from raylm.ingress.openai.messages import template_messages, template_tools
from raylm.ingress.openai.models import check_model
from raylm.ingress.openai.structured_outputs import tool_choice_of
from raylm.params import SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM, ChatPrompt
    from raylm.ingress.openai.outputs import Outputs


class Conversations:
    """Checks, renders and starts them; keeps nothing of any."""

    def __init__(self, llm: AsyncLLM, config: Config) -> None:
        self._llm = llm
        self._config = config

    async def start(
        self, body: ChatCompletionRequest, name: str, arrival_time: float
    ) -> tuple[SamplingParams, Outputs]:
        """The parameters that hold, and the outputs, which begin to be generated when they are asked for.

        Raises:
            RayLMError: the request is refused.
        """
        head = body.head(name, arrival_time, "messages", self._check(body))
        params, prompt = await self._prepare(body, any_length=body.truncate_prompt_tokens is not None)
        token_ids = prompt.token_ids
        if body.truncate_prompt_tokens:
            token_ids = token_ids[-body.truncate_prompt_tokens :]
        return params, self._llm.generate(token_ids, prompt.params, head, prompt.answer_format)

    async def count(self, body: ChatCompletionRequest) -> int:
        """Tokens of the prompt that a conversation comes to.

        Raises:
            RayLMError: the request is refused.
        """
        self._check(body)
        _, prompt = await self._prepare(body, any_length=True)
        return len(prompt.token_ids)

    async def fit(self, body: ChatCompletionRequest, room: int) -> ChatCompletionRequest:
        """The conversation without as many of its oldest turns as it takes to leave ``room`` tokens for an answer.

        System messages at its head stay, and so does the last message.

        Raises:
            RayLMError: the request is refused.
        """
        most = self._llm.max_model_len - room
        head = next((at for at, message in enumerate(body.messages) if message["role"] != "system"), 0)
        low, high = 0, len(body.messages) - head - 1  # so many turns may be left out
        if await self.count(body) <= most:
            return body
        while low < high:
            middle = (low + high) // 2
            if await self.count(_without(body, head, middle)) <= most:
                high = middle
            else:
                low = middle + 1
        return _without(body, head, low)

    def _check(self, body: ChatCompletionRequest) -> str | None:
        """Refuse what is not served; the LoRA adapter that the body names."""
        body.check(self._config)
        return check_model(body.model, self._llm)

    async def _prepare(self, body: ChatCompletionRequest, *, any_length: bool) -> tuple[SamplingParams, ChatPrompt]:
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = body.sampling(self._llm.sampling_defaults, max_tokens=limit, logprobs=body.num_logprobs)
        params = replace(params, thinking_token_budget=body.thinking_token_budget)
        self._llm.admission.expect(params.n)
        request = await offload(lambda: chat_request(body, any_length=any_length), count_parts(body))
        return params, await self._llm.prepare_chat(request, params)


def _without(body: ChatCompletionRequest, head: int, count: int) -> ChatCompletionRequest:
    """Without the ``count`` oldest messages behind ``head``, nor answers of tools whose calls went with them."""
    kept: list[dict[str, Any]] = body.messages[head + count :]
    while len(kept) > 1 and count and kept[0]["role"] == "tool":
        kept = kept[1:]
    return body.model_copy(update={"messages": body.messages[:head] + kept})


def count_parts(body: ChatCompletionRequest) -> int:
    """Messages, their parts and calls: what is to be walked through."""
    fields = (message.get(name) for message in body.messages for name in ("content", "tool_calls"))
    return len(body.messages) + sum(len(field) for field in fields if isinstance(field, list))


def chat_request(body: ChatCompletionRequest, *, any_length: bool = False) -> ChatRequest:
    """What the body asks of the frontend.

    Raises:
        InvalidRequestError: a message or a tool is wrong.
    """
    tools = template_tools(body.tools)
    return ChatRequest(
        messages=template_messages(body.messages),
        tools=tools,
        tool_choice=tool_choice_of(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        add_generation_prompt=body.generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs,
        any_length=any_length,
    )
