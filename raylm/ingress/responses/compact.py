"""The body of /v1/responses/compact, which replaces a conversation by one item with the model's summary of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from raylm.ingress.openai.chat import CacheRetention, ServiceTier
from raylm.ingress.openai.fields import Body, Model, refuse
from raylm.ingress.responses.body import ResponsesRequest
from raylm.ingress.responses.input import SUMMARIZE, Input


class CompactRequest(Body):
    """``prompt_cache_key``, ``prompt_cache_retention`` and ``service_tier`` have no effect."""

    model: Model = ""
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention = None
    service_tier: ServiceTier = None

    @model_validator(mode="after")
    def _names_a_conversation(self) -> CompactRequest:
        if self.input is None and self.previous_response_id is None:
            raise refuse("expected this field or 'previous_response_id'", at="input")
        return self

    async def as_response(self) -> ResponsesRequest:
        """The request for a summary of the conversation."""
        given: list[Any] = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else []
        given += self.input if isinstance(self.input, list) else []
        asked = {"input": [*given, {"role": "user", "content": SUMMARIZE}], "store": False, "model": self.model}
        asked |= {"instructions": self.instructions, "previous_response_id": self.previous_response_id}
        return await ResponsesRequest.read(asked)
