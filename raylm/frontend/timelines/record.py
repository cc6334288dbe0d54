"""Record: when what happened to one request of a caller; Part: the same of one prompt of it that an engine serves."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from raylm.errors import RayLMError
from raylm.messages import EngineCoreRequest, SequenceEvent

MAX_EVENTS = 1024  # of a part; a sequence that is preempted over and over again ends up there

Clock = Callable[[], float]
Message = MutableMapping[str, Any]
Mark = tuple[str, float]
Trace = tuple[str, str] | None
Score = tuple[str, float, int, int, int, int, float]
"""(engine, predicted seconds, tokens to compute, tokens queued there, sequences of this ingress there, sequences that
wait there, seconds since the engine told)."""
Routing = tuple[float, str, list[Score]]
"""(time, the engine that was picked, the scores of all that could serve the request; none where there is one)."""


class Part:
    """One prompt on its way through an engine. ``marks`` are the phases that began here, ``events`` the engine's.

    Owned by the event loop of its AsyncLLM. ``drawn`` are the token ids of each sequence, which OutputProcessor owns.
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
        """From now on this is what is done for the prompt."""
        self.marks.append((phase, self.clock()))

    def on_open(self, request: EngineCoreRequest, drawn: list[list[int]]) -> None:
        """What is asked of the engine is known now; ``drawn`` grows while it is served."""
        self.request, self.drawn = request, drawn
        self.prompt_tokens, self.adapter = len(request.prompt_token_ids), request.adapter

    def charged(self) -> tuple[int, int]:
        """Tokens of the prompt and of its answers, without those that an earlier connection was ``told``."""
        drawn = [len(ids) for ids in self.drawn]
        if self.told is None:
            return self.prompt_tokens, sum(drawn)
        told = [size if count is None else min(count, size) for count, size in zip(self.told, drawn, strict=False)]
        return 0, sum(drawn) - sum(told)

    def on_sent(self, engine_id: str, scores: tuple[Score, ...]) -> None:
        """It is on its way to an engine, for the first time or after another one was lost."""
        now = self.clock()
        self.routings.append((now, engine_id, list(scores)))
        self.marks.append(("replay" if len(self.routings) > 1 else "send", now))

    def note(self, event: SequenceEvent) -> None:
        """Take in what the engine tells."""
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
    """How its tokens are drawn, without what is text; empty where none are."""
    if request is None or request.pooling is not None:
        return {}
    return {name: getattr(request.params, name) for name in _SAMPLING}


class Record:
    """One request of a caller, from its arrival to the last byte of its answer. Times are seconds since the epoch.

    ``key`` is the name of its API key, ``trace`` the caller's traceparent and tracestate. ``blocked_s`` were spent
    waiting for the client, or the proxy before it, to take what was written. ``cancel`` ends it with an error, None
    where nothing can. One that is ``kept`` does not end with its connection, but by ``Timelines.end_record``.
    """

    __slots__ = (
        "blocked_s", "cancel", "clock", "ended", "error", "first_byte", "id", "is_stream", "kept", "key", "last_byte",
        "marks", "model", "parts", "path", "received", "status", "trace",
    )  # fmt: skip

    def __init__(self, request_id: str, key: str, path: str, clock: Clock, trace: Trace = None) -> None:
        self.id, self.key, self.path, self.trace = request_id, key, path, trace
        self.clock = clock
        self.model = ""
        self.is_stream = False
        self.kept = False
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
        """From now on this is what is done for the request."""
        self.marks.append((phase, self.clock()))

    def sending(self, send: Callable[[Message], Awaitable[None]]) -> Callable[[Message], Awaitable[None]]:
        """An ASGI ``send`` that notes when the answer's bytes are taken."""

        async def send_and_note(message: Message) -> None:
            before = self.clock()
            await send(message)
            if message["type"] == "http.response.start":
                self.status = message["status"]
            else:
                self.wrote(before)

        return send_and_note

    def wrote(self, before: float) -> None:
        """Bytes of the answer that were handed over at ``before`` are taken."""
        self.last_byte = now = self.clock()
        self.blocked_s += now - before
        if self.first_byte is None:
            self.first_byte = now

    def raw(self, ingress: str) -> dict[str, Any]:
        """All that is known, as plain values."""
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
BY_HANDLE: ContextVar[tuple[str, Trace]] = ContextVar("call_by_handle", default=("handle", None))
LONGEST_TRACE = 512  # characters of a tracestate; what is longer, vendors must not count on


def trace_of(traceparent: str | None, tracestate: str) -> Trace:
    """The span of a caller, as W3C's Trace Context has it; a traceparent that cannot be one is left out."""
    if traceparent is None or len(traceparent) > LONGEST_TRACE:
        return None
    return traceparent, tracestate if len(tracestate) <= LONGEST_TRACE else ""


def note_call(path: str, trace: Trace) -> None:
    """What the call by handle that this task serves asks for: the ``path`` of its record, and its caller's span."""
    BY_HANDLE.set((path, trace))


def serve_record(record: Record | None) -> None:
    """From now on this task, and the tasks that it starts, serve the request of ``record``."""
    CURRENT.set(record)


def current_id() -> str:
    """The id of the request that this task serves, "" without one."""
    return "" if (record := CURRENT.get()) is None else record.id


def mark(phase: str) -> None:
    """As ``Record.mark``, for the request that this task serves, if there is one."""
    if (record := CURRENT.get()) is not None:
        record.mark(phase)


def note_body(model: str | None, stream: bool | None) -> None:
    """What the body of the request that this task serves asks for."""
    if (record := CURRENT.get()) is not None:
        record.model, record.is_stream = model or "", bool(stream)
