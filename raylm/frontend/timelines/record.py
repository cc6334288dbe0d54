"""Record: the times of events of one caller's request. Part: the same for one prompt that an engine serves."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from raylm.errors import RayLMError
from raylm.messages import EngineCoreRequest, SequenceEvent

MAX_EVENTS = 1024  # limit for a part; a sequence that is preempted repeatedly reaches it

Clock = Callable[[], float]
Message = MutableMapping[str, Any]
Mark = tuple[str, float]
Trace = tuple[str, str] | None
Score = tuple[str, float, int, int, int, int, float]
"""(engine, predicted seconds, tokens to compute, tokens queued there, sequences of this ingress there, sequences that
wait there, seconds since the engine's report)."""
Routing = tuple[float, str, list[Score]]
"""(time, chosen engine, scores of all engines that could serve the request; empty if only one could)."""


class Part:
    """One prompt of a request. ``marks`` are the phases that began here, ``events`` come from the engine.

    Belongs to the event loop of its AsyncLLM. ``drawn`` has the token ids of each sequence; PromptState writes it.
    """

    __slots__ = (
        "adapter", "cached_tokens", "clock", "drawn", "dropped_events", "ended", "error", "events", "finish_reasons",
        "first_token", "last_token", "marks", "prompt_tokens", "request", "request_id", "routings", "told",
    )  # fmt: skip

    def __init__(self, request_id: str = "", clock: Clock = time.time) -> None:
        self.request_id = request_id
        self.clock = clock
        self.adapter: str | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.request: EngineCoreRequest | None = None
        self.drawn: list[list[int]] = []
        self.told: Sequence[int | None] | None = None
        self.marks: list[Mark] = []
        self.events: list[tuple[int, str, float, int, int, str]] = []
        self.dropped_events = 0
        self.routings: list[Routing] = []
        self.finish_reasons: dict[int, str] = {}
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.ended: float | None = None
        self.error = ""

    def mark(self, phase: str) -> None:
        """Begin a phase of the prompt now."""
        self.marks.append((phase, self.clock()))

    def on_open(self, request: EngineCoreRequest, drawn: list[list[int]]) -> None:
        """Set the request that is sent to the engine. ``drawn`` grows while it is served."""
        self.request, self.drawn = request, drawn
        self.prompt_tokens, self.adapter = len(request.prompt_token_ids), request.adapter

    def charged(self) -> tuple[int, int]:
        """Number of prompt and answer tokens to charge, without the tokens that an earlier connection was ``told``."""
        drawn = [len(ids) for ids in self.drawn]
        if self.told is None:
            return self.prompt_tokens, sum(drawn)
        told = [size if count is None else min(count, size) for count, size in zip(self.told, drawn, strict=False)]
        return 0, sum(drawn) - sum(told)

    def on_sent(self, engine_id: str, scores: tuple[Score, ...]) -> None:
        """Record that the prompt was sent to an engine, the first time or after an engine was lost."""
        now = self.clock()
        self.routings.append((now, engine_id, list(scores)))
        self.marks.append(("replay" if len(self.routings) > 1 else "send", now))

    def note(self, event: SequenceEvent) -> None:
        """Add an event of the engine. Events above MAX_EVENTS are only counted."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(event[1:])
        else:
            self.dropped_events += 1

    def raw(self) -> dict[str, Any]:
        sampling = _sampling(self.request)
        return {
            "request_id": self.request_id,
            "adapter": self.adapter,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "max_tokens": sampling.pop("max_tokens", None),
            "sampling": sampling,
            "drawn_tokens": [len(ids) for ids in self.drawn],
            "marks": self.marks,
            "events": self.events,
            "dropped_events": self.dropped_events,
            "routings": self.routings,
            "finish_reasons": [self.finish_reasons.get(index, "") for index in range(len(self.drawn))],
            "first_token": self.first_token,
            "last_token": self.last_token,
            "ended": self.ended,
            "error": self.error,
        }


_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "n")


def _sampling(request: EngineCoreRequest | None) -> dict[str, Any]:
    """The sampling parameters that are not text; empty for requests for a vector."""
    if request is None or request.pooling is not None:
        return {}
    return {name: getattr(request.params, name) for name in _SAMPLING}


class Record:
    """One request of a caller, from its arrival to the last byte of its answer. Times are seconds since the epoch.

    ``key`` is the name of its API key, ``trace`` the caller's traceparent and tracestate. ``blocked_s`` are the seconds
    in which the client, or the proxy before it, did not accept written bytes. ``cancel`` ends the request with an
    error; it is None offline.
    """

    __slots__ = (
        "blocked_s", "cancel", "clock", "ended", "error", "first_byte", "id", "is_stream", "key", "last_byte", "marks",
        "model", "parts", "path", "received", "status", "trace",
    )  # fmt: skip

    def __init__(self, request_id: str, key: str, path: str, clock: Clock, trace: Trace = None) -> None:
        self.id, self.key, self.path, self.trace = request_id, key, path, trace
        self.clock = clock
        self.model = ""
        self.is_stream = False
        self.received = clock()
        self.ended: float | None = None
        self.status: int | None = None
        self.error = ""
        self.first_byte: float | None = None
        self.last_byte: float | None = None
        self.blocked_s = 0.0
        self.marks: list[Mark] = []
        self.parts: list[Part] = []
        self.cancel: Callable[[RayLMError], None] | None = None

    def mark(self, phase: str) -> None:
        """Begin a phase of the request now."""
        self.marks.append((phase, self.clock()))

    def note_body(self, model: str | None, stream: bool | None) -> None:
        """Set what the body of the request asks for."""
        self.model, self.is_stream = model or "", bool(stream)

    def sending(self, send: Callable[[Message], Awaitable[None]]) -> Callable[[Message], Awaitable[None]]:
        """Wrap an ASGI ``send`` to record the times at which bytes of the answer are accepted."""

        async def send_and_note(message: Message) -> None:
            before = self.clock()
            await send(message)
            if message["type"] == "http.response.start":
                self.status = message["status"]
            else:
                self.wrote(before)

        return send_and_note

    def wrote(self, before: float) -> None:
        """Record that bytes of the answer, written at time ``before``, were accepted."""
        self.last_byte = now = self.clock()
        self.blocked_s += now - before
        if self.first_byte is None:
            self.first_byte = now

    def raw(self, ingress: str) -> dict[str, Any]:
        """All values of the record, as plain data."""
        return {
            "id": self.id,
            "key": self.key,
            "path": self.path,
            "model": self.model,
            "stream": self.is_stream,
            "ingress": ingress,
            "received": self.received,
            "ended": self.ended,
            "status": self.status,
            "error": self.error,
            "first_byte": self.first_byte,
            "last_byte": self.last_byte,
            "blocked_s": self.blocked_s,
            "marks": self.marks,
            "parts": [part.raw() for part in self.parts],
        }


CURRENT: ContextVar[Record | None] = ContextVar("current_record", default=None)
LONGEST_TRACE = 512  # characters of a tracestate; W3C Trace Context guarantees only 512


def trace_of(traceparent: str | None, tracestate: str) -> Trace:
    """The caller's span as in W3C Trace Context. Ignores a traceparent that is too long."""
    if traceparent is None or len(traceparent) > LONGEST_TRACE:
        return None
    return traceparent, tracestate if len(tracestate) <= LONGEST_TRACE else ""


def current_id() -> str:
    """The id of this task's request, "" without one."""
    return "" if (record := CURRENT.get()) is None else record.id


def current_key() -> str:
    """The name of the API key of this task's request, "" without one."""
    return "" if (record := CURRENT.get()) is None else record.key


def mark(phase: str) -> None:
    """As ``Record.mark``, for this task's request. Does nothing without one."""
    if (record := CURRENT.get()) is not None:
        record.mark(phase)
