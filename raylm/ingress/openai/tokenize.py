"""POST /tokenize and /detokenize: convert text or messages to token ids, and ids to text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import orjson
from pydantic import Field

from raylm.errors import InvalidRequestError
from raylm.frontend import ChatRequest, Request
from raylm.ingress.http.answer import Pieces, json_answer
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.fields import Body, TokenIds
from raylm.ingress.openai.generation import check_model, opens_turn
from raylm.ingress.openai.messages import Messages, Tool

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM


class TokenizeRequest(Body):
    """Either ``prompt`` or ``messages`` (with the template's fields).

    ``add_special_tokens`` is true by default with ``prompt``, and false with ``messages``, because templates add
    special tokens.
    """

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Give either 'prompt' or 'messages'.", param="prompt")
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, name) is not None:
                raise InvalidRequestError(f"'{name}' needs 'messages'.", param=name)


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class Tokenize:
    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def __call__(self, body: TokenizeRequest, request: Request) -> list[bytes]:
        body.check()
        if body.model is not None:
            check_model(body.model, self._llm)
        token_ids = await self._token_ids(body)

        def make() -> JSONObject:
            answer = {"count": len(token_ids), "max_model_len": self._llm.max_model_len, "tokens": Pieces(token_ids)}
            strs = Pieces(map(self._llm.token_piece, token_ids)) if body.return_token_strs else None
            answer["token_strs"] = strs
            return answer

        return await json_answer(make, len(token_ids))

    async def _token_ids(self, body: TokenizeRequest) -> list[int]:
        if body.prompt is not None:
            return await self._llm.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        request = ChatRequest(
            messages=cast(list[JSONObject], body.messages),
            tools=cast(list[JSONObject], body.tools) or None,
            add_generation_prompt=opens_turn(body.add_generation_prompt, body.continue_final_message),
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
            template_kwargs=body.chat_template_kwargs,
        )
        return await self._llm.render_chat(request)


class Detokenize:
    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def __call__(self, body: DetokenizeRequest, request: Request) -> bytes:
        if body.model is not None:
            check_model(body.model, self._llm)
        return orjson.dumps({"prompt": await self._llm.detokenize(body.tokens)})
