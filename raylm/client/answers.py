"""Answer: the times, tokens and error of one request, as its client observes them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raylm.client.connection import Connection, ServerError
from raylm.client.deltas import delta_of


@dataclass(slots=True)
class Answer:
    """One answer. ``sent`` is a time of time.perf_counter; other times are seconds since then.

    Tokens are the server's count.

    ``ttft`` is the time of the first event with text, reasoning or a call, ``last`` that of the last such event,
    ``total`` that of the stream's end. ``pause`` is the longest time between two such events. ``error`` is None for a
    good answer. Kinds of errors are those of ServerError, ``usage`` if the server reports no tokens, and ``length`` if
    their number is not the requested one.
    """

    sent: float = 0.0
    ttft: float = 0.0
    last: float = 0.0
    total: float = 0.0
    pause: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    chunks: int = 0
    calls: dict[int, str] = field(default_factory=dict)  # the arguments of each tool call
    functions: dict[int, str] = field(default_factory=dict)  # the name of the function of each tool call
    finish: str = ""
    kind: str = ""
    error: str | None = None

    @property
    def itl(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.last - self.ttft) / max(1, self.tokens - 1)

    @property
    def broken_calls(self) -> int:
        """Number of calls whose arguments are not a JSON object."""
        return sum(not _is_object(arguments) for arguments in self.calls.values())

    def fail(self, kind: str, message: str) -> None:
        self.kind, self.error = kind, message

    def take(self, event: dict[str, Any]) -> None:
        """Process an event that has just arrived.

        Raises:
            ServerError: the event is none of a completion.
        """
        try:
            self._take(event)
        except (AttributeError, TypeError, ValueError) as error:
            raise ServerError("stream", f"an event is none of a completion: {error}") from error

    def _take(self, event: dict[str, Any]) -> None:
        delta, now = delta_of(event), time.perf_counter() - self.sent
        if delta:
            self.pause = max(self.pause, now - self.last) if self.chunks else 0.0
            self.ttft, self.last = self.ttft or now, now
            self.chunks += 1
        for call in delta.calls:
            place, function = int(call.get("index") or 0), call.get("function") or {}
            self.calls[place] = self.calls.get(place, "") + (function.get("arguments") or "")
            self.functions[place] = self.functions.get(place) or function.get("name") or ""
        self.finish = delta.finish or self.finish
        if delta.usage:
            self.prompt_tokens = int(delta.usage.get("prompt_tokens") or 0)
            self.tokens = int(delta.usage.get("completion_tokens") or 0)
            details = delta.usage.get("prompt_tokens_details") or {}
            self.cached_tokens = int(details.get("cached_tokens") or 0)


async def ask(connection: Connection, path: str, body: Mapping[str, Any], exact: int | None = None) -> Answer:
    """Post ``body``, which must stream and include usage, and read the answer. Errors are stored in it.

    ``exact`` is the number of tokens that the answer must have, None for any number.
    """
    answer = Answer(sent=time.perf_counter())
    try:
        async for event in connection.stream(path, body):
            answer.take(event)
    except ServerError as error:
        answer.fail(error.kind, error.message)
    answer.total = time.perf_counter() - answer.sent
    if answer.error is None and not answer.prompt_tokens:
        answer.fail("usage", "the server reported no usage, so tokens cannot be counted")
    elif answer.error is None and exact is not None and answer.tokens != exact:
        answer.fail("length", f"{answer.tokens} tokens instead of {exact}")
    if answer.error is None and not answer.chunks:  # no token had text
        answer.ttft = answer.last = answer.total
    return answer


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
