"""ResponseJob: the state and events of one response during generation."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from raylm.errors import CancelledRequestError, RayLMError
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import as_known_error
from raylm.ingress.openai.fields import renamed
from raylm.ingress.openai.outputs import Usage
from raylm.ingress.responses.body import PARAM_NAMES, ResponsesRequest
from raylm.ingress.responses.items import Events, ResponseItems
from raylm.ingress.responses.tools import shown
from raylm.params import SamplingParams

if TYPE_CHECKING:
    from raylm.frontend import RequestOutput
    from raylm.ingress.openai.outputs import Outputs
    from raylm.ingress.responses.mcp.rounds import Rounds


class ResponseJob:
    """Owns the state of one response. ``response`` returns it as JSON at any time.

    The response is ``stored`` unless its client disables that, or the store failed. ``owner`` is the name of its key.
    ``tokens`` counts the tokens of the answer read so far. Tokens of earlier events are read again without events.
    ``last`` is the number of the newest event of a background response. ``at_checkpoint`` is set when there is a new
    ``checkpoint``, from which another maker can go on.
    """

    def __init__(
        self,
        response_id: str,
        owner: str,
        body: ResponsesRequest,
        params: SamplingParams,
        items: ResponseItems,
        created_at: int,
        rounds: Rounds,
    ) -> None:
        self.id = response_id
        self.owner = owner
        self.items = items
        self.status = "queued"
        self._body = body
        self._params = params
        self.tokens = 0
        self.last = -1
        self.stored = body.store is not False
        self._created_at = created_at
        self._completed_at: int | None = None
        self._usage = Usage()
        self._error: RayLMError | None = None
        self._rounds = rounds
        self._number = 0  # of the round: a sequence, and the calls after it
        self._calls = 0
        self._checkpoint: JSONObject = {"lists": rounds.lists}
        self.at_checkpoint = False

    @property
    def is_streamed(self) -> bool:
        return bool(self._body.stream)

    @property
    def done(self) -> bool:
        return self.status in ("completed", "incomplete", "failed")

    def response(self) -> JSONObject:
        return self._as_asked() | {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": None if self._error is None else {"code": "server_error", "message": self._error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": list(self.items.items),
            "usage": self._usage_json(),
        }

    def _usage_json(self) -> JSONObject:
        """The counts so far. Open Responses requires them at any time, and OpenAI's specification forbids null."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def checkpoint(self) -> JSONObject:
        """Where another maker goes on: after the calls so far, with the tokens that were read until then."""
        return self._checkpoint

    def restore(self, checkpoint: JSONObject) -> None:
        """Go on from the ``checkpoint`` of a job that was lost."""
        self._checkpoint = checkpoint
        self.items.items, self.items.pending = list(checkpoint["items"]), list(checkpoint["pending"])
        self.items.waits = checkpoint["waits"]
        self._number, self._calls = checkpoint["number"], checkpoint["calls"]
        self.tokens = checkpoint["tokens"]
        self._usage = Usage(*checkpoint["usage"])

    async def events(self, outputs: Outputs | None, *, begun: bool = False) -> AsyncGenerator[Events, None]:
        """Read the sequence to its end, and the sequences that follow the calls of MCP servers.

        Each item has the events since the previous item. Without ``outputs`` calls are made before the first sequence.
        For a response that was ``begun`` before, earlier events are not repeated. ``response.created`` is omitted if an
        event was stored before.

        Raises:
            Exception: generation failed before it began. Later errors become an event.
            CancelledRequestError: an operator ended a background response.
        """
        try:
            if outputs is None:
                yield self._open(begun)
            while not self.done:
                if outputs is not None:
                    async with aclosing(self._read(outputs, begun)) as generated:
                        async for events in generated:
                            yield events
                outputs, begun = None, True
                async with aclosing(self._make_calls()) as called:
                    async for events in called:
                        yield events
                if not self.done:
                    _, outputs = await self._rounds.start(
                        self.items.items, self._number, self._calls, self._usage.completion_tokens
                    )
        except Exception as error:
            if self.status == "queued" or (self._body.background and isinstance(error, CancelledRequestError)):
                raise
            self.fail(error)
            yield self.told_as("failed")

    async def _read(self, outputs: Outputs, begun: bool) -> AsyncGenerator[Events, None]:
        async with aclosing(outputs):
            with renamed(PARAM_NAMES):
                output = await anext(outputs)
            opening = self._open(begun)
            yield opening + self._take(output)
            async for output in outputs:
                yield self._take(output)
        self._usage.check_finished()

    async def _make_calls(self) -> AsyncGenerator[Events, None]:
        """Make the calls of MCP servers that the model asked for. Then the response is done, or a round begins."""
        while self.items.pending:
            self._calls += 1
            outcome = await self._rounds.call(self.items.items[self.items.pending[0]], self._calls)
            events = self.items.end_call(outcome.output, outcome.error)
            if not self.items.pending:
                events += self._end_round()
            self._mark()
            yield events

    def _end_round(self) -> Events:
        most = self._body.max_output_tokens
        is_spent = most is not None and self._usage.completion_tokens >= most
        if self.items.waits or is_spent:
            return self._finish("completed" if self.items.waits else "incomplete")
        if self._usage.unfinished == 0:  # else the calls were approved, and the first sequence begins now
            self._number += 1
            self._usage = Usage(1, *self._counts()[1:])
        self.items.waits = False
        return []

    def _counts(self) -> tuple[int, int, int, int, int]:
        """In the order of the fields of Usage."""
        usage = self._usage
        cached, reasoning = usage.cached_tokens, usage.reasoning_tokens
        return usage.unfinished, usage.prompt_tokens, usage.completion_tokens, cached, reasoning

    def _mark(self) -> None:
        """Set the checkpoint here."""
        self._checkpoint = {
            "number": self._number,
            "tokens": self.tokens,
            "calls": self._calls,
            "items": [dict(item) for item in self.items.items],
            "pending": list(self.items.pending),
            "waits": self.items.waits,
            "usage": self._counts(),
            "lists": self._checkpoint["lists"],
        }
        self.at_checkpoint = True

    def _open(self, begun: bool) -> Events:
        """The events with which a response begins, if they are not told yet."""
        kinds = [] if begun else ["in_progress"] if self.last >= 0 else ["created", "in_progress"]
        is_first = self.status == "queued" and not self.items.items
        self.status = "in_progress"
        told, opening = self.told_as(*kinds), []
        if is_first:
            for label, tools in self._checkpoint["lists"]:
                opening += self.items.add_list(label, tools)
            for asked in self._rounds.approved:
                opening += self.items.add_approved(asked)
        return [] if begun else told + opening

    def told_as(self, *kinds: str) -> Events:
        """Events with the whole response in its current state."""
        return [{"type": f"response.{kind}", "response": self.response()} for kind in kinds]

    def fail(self, error: Exception) -> None:
        self._error, self.status = as_known_error(error, self.id), "failed"
        self.items.finish("incomplete", fills=False)

    def check(self) -> None:
        """Raise the error with which the response failed, if it did."""
        if self._error is not None:
            raise self._error

    def _take(self, output: RequestOutput) -> Events:
        events: Events = []
        self._usage.count(output)
        for delta in output.deltas:
            self.tokens += len(delta.token_ids)
            news = self.items.add(delta)
            events += [] if delta.told else news
            if delta.finish_reason is None:
                continue
            if delta.finish_reason == "length":
                events += self._finish("incomplete")
            else:
                closed = self.items.end_round()
                if self.items.pending:
                    events += closed
                    self._mark()
                else:
                    events += closed + self._finish("completed")
        return events

    def _finish(self, status: str) -> Events:
        self.status = status
        self._completed_at = int(time.time()) if status == "completed" else None
        return self.items.finish(status) + self.told_as(status)

    def _as_asked(self) -> JSONObject:
        """The fields of the request, with the defaults that were applied."""
        body, params = self._body, self._params
        named = {} if body.conversation_id is None else {"conversation": {"id": body.conversation_id}}
        return (
            ({} if body.user is None else {"user": body.user})
            | named
            | {
                "background": bool(body.background),
                "frequency_penalty": params.frequency_penalty,
                "instructions": body.instructions,
                "max_output_tokens": body.max_output_tokens,
                "max_tool_calls": body.max_tool_calls,
                "metadata": body.metadata or {},
                "model": body.model,
                "parallel_tool_calls": body.parallel_tool_calls is not False,
                "presence_penalty": params.presence_penalty,
                "previous_response_id": body.previous_response_id,
                "prompt_cache_key": body.prompt_cache_key,
                "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
                "safety_identifier": body.safety_identifier,
                "service_tier": "default",
                "store": self.stored,
                "temperature": params.temperature,
                "text": {"format": (body.text and body.text.format) or {"type": "text"}},
                "tool_choice": body.tool_choice or "auto",
                "tools": shown(body.tools),
                "top_logprobs": body.top_logprobs or 0,
                "top_p": params.top_p,
                "truncation": body.truncation or "disabled",
            }
        )
