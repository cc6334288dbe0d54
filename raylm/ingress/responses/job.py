"""ResponseJob: one response of the Responses API while it is made, as an object that grows and as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from raylm.errors import RayLMError
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import as_known_error
from raylm.ingress.openai.fields import renamed
from raylm.ingress.openai.outputs import Usage, check_finished, finish_reason
from raylm.ingress.responses.body import PARAM_NAMES, ResponsesRequest
from raylm.ingress.responses.items import Events, ResponseItems
from raylm.params import SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import RequestOutput
    from raylm.ingress.openai.outputs import Outputs


class ResponseJob:
    """Owns the state of one response; ``response`` is what clients get of it at any time."""

    def __init__(self, response_id: str, body: ResponsesRequest, params: SamplingParams, items: ResponseItems) -> None:
        self.id = response_id
        self.items = items
        self.status = "queued"
        self._body = body
        self._params = params
        self._created_at = int(time.time())
        self._usage: Usage | None = None
        self._error: RayLMError | None = None

    @property
    def done(self) -> bool:
        return self.status in ("completed", "incomplete", "failed")

    def response(self) -> JSONObject:
        shown = self._as_asked() | {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "status": self.status,
            "error": None if self._error is None else {"code": "server_error", "message": self._error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": list(self.items.items),
        }
        return shown | {"usage": _usage(self._usage)} if self._usage is not None and self.done else shown

    async def events(self, outputs: Outputs) -> AsyncGenerator[Events, None]:
        """Read the one sequence to its end; every item is what happened since the last one.

        An error is raised if nothing was generated at all, and becomes an event later on.
        """
        try:
            async with aclosing(outputs):
                with renamed(PARAM_NAMES):
                    output = await anext(outputs)
                yield [*self._begin(output), *self._take(output)]
                async for output in outputs:
                    yield self._take(output)
            check_finished(output.finished)
        except Exception as error:
            if self.status == "queued":
                raise
            self.fail(error)
            yield [{"type": "response.failed", "response": self.response()}]

    def fail(self, error: Exception) -> None:
        self._error, self.status = as_known_error(error, self.id), "failed"
        self.items.finish("incomplete")

    def _begin(self, output: RequestOutput) -> Events:
        self.status = "in_progress"
        self._usage = Usage()
        self._usage.count_prompt(output)
        return [{"type": f"response.{kind}", "response": self.response()} for kind in ("created", "in_progress")]

    def _take(self, output: RequestOutput) -> Events:
        events: Events = []
        assert self._usage is not None
        for delta in output.deltas:
            self._usage.count_delta(delta)
            events += self.items.add(delta)
            reason = finish_reason(delta)
            if reason is not None:
                self.status = "incomplete" if reason == "length" else "completed"
                events += self.items.finish(self.status)
                events.append({"type": f"response.{self.status}", "response": self.response()})
        return events

    def _as_asked(self) -> JSONObject:
        """What clients get back of their own request, with the defaults that held."""
        body, params = self._body, self._params
        optional = ("user", "safety_identifier", "prompt_cache_key")
        return {name: value for name in optional if (value := getattr(body, name)) is not None} | {
            "background": bool(body.background),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None} | tool for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
        }


def _usage(usage: Usage) -> JSONObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
