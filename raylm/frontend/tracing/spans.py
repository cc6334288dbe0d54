"""The timeline of an ended request as spans: one for the request, and one for each phase.

Names of attributes are from OpenTelemetry's semantic conventions (https://opentelemetry.io/docs/specs/semconv/:
gen-ai/gen-ai-spans, http/http-spans), otherwise from vLLM, otherwise they begin with ``raylm.``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from raylm.frontend.timelines.describe import Raw, timeline

Attributes = dict[str, str | bool | int | float | list[str]]

PROVIDER = "raylm"
# By the end of the path. The operation of other paths is their last part.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "handle/chat": "chat",
    "handle/completions": "text_completion",
}
_CLIENT_LEFT = "client_left"
_REQUEST_FIELDS = ("max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True, slots=True)
class SpanData:
    """A span without an id. Times are seconds since the epoch; ``events`` are (name, time, attributes).

    ``error`` is the kind of error, "" without an error.
    """

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    events: list[tuple[str, float, Attributes]] = field(default_factory=list)
    error: str = ""


def request_spans(raw: Raw) -> tuple[SpanData, list[SpanData]]:
    """The span of an ended request and the spans of its phases, without text of its prompt or answer."""
    found = timeline(raw, raw["ended"])
    operation, model = _operation(raw), raw["model"]
    error = _error(raw)
    root = SpanData(
        name=f"{operation} {model}".rstrip(),
        start=raw["received"],
        end=raw["ended"],
        attributes=_attributes(raw, found, operation) | ({"error.type": error} if error else {}),
        events=sorted(_events(raw), key=lambda event: event[1]),
        error=error if _is_ours(raw, error) else "",
    )
    return root, [_phase(raw, one) for one in found["phases"]]


def _operation(raw: Raw) -> str:
    path = str(raw["path"])
    known = (operation for end, operation in _OPERATIONS.items() if path.endswith(end))
    return next(known, path.rpartition("/")[2])


def _error(raw: Raw) -> str:
    """The code of the first error. An error after a stream's head is recorded only in a part."""
    return next(filter(None, [raw["error"], *(part["error"] for part in raw["parts"])]), "")


def _is_ours(raw: Raw, error: str) -> bool:
    """Whether the server failed. In HTTP's conventions a client's error is not an error of the server's span."""
    if not error or error == _CLIENT_LEFT:
        return False
    return raw["status"] is None or raw["status"] < 400 or raw["status"] >= 500


def _attributes(raw: Raw, found: dict[str, Any], operation: str) -> Attributes:
    parts = raw["parts"]
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": raw["model"] or None,
        "gen_ai.response.model": raw["model"] or None if parts else None,
        "gen_ai.request.id": raw["id"],
        "gen_ai.request.stream": raw["stream"],
        "url.path": raw["path"],
        "http.response.status_code": raw["status"],
        "raylm.key": raw["key"] or None,
        "raylm.ingress": raw["ingress"],
        "gen_ai.latency.e2e": found["wall_s"],
    }
    if parts:
        attributes |= _sampling(parts[0]) | _usage(raw, found)
    return {name: value for name, value in attributes.items() if value is not None}


def _sampling(part: Raw) -> dict[str, Any]:
    given = {"max_tokens": part["max_tokens"], **part["sampling"]}
    attributes = {f"gen_ai.request.{name}": given.get(name) for name in _REQUEST_FIELDS}
    attributes["gen_ai.request.top_k"] = top_k if (top_k := given.get("top_k", 0)) > 0 else None
    attributes["gen_ai.request.choice.count"] = n if (n := given.get("n", 1)) > 1 else None
    return attributes


def _usage(raw: Raw, found: dict[str, Any]) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    for phase in found["phases"]:
        seconds[phase["phase"]] = seconds.get(phase["phase"], 0.0) + phase["seconds"]
    reasons = [reason or "abort" for part in raw["parts"] for reason in part["finish_reasons"]]
    return {
        "gen_ai.usage.input_tokens": found["prompt_tokens"],
        "gen_ai.usage.output_tokens": found["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": found["cached_tokens"],
        "gen_ai.usage.num_sequences": len(reasons),
        "gen_ai.response.finish_reasons": reasons or None,
        "gen_ai.latency.time_in_queue": seconds.get("queue"),
        "gen_ai.latency.time_to_first_token": found["ttft_s"],
        "gen_ai.latency.time_in_model_prefill": seconds.get("prefill"),
        "gen_ai.latency.time_in_model_decode": seconds.get("decode"),
        "raylm.engine": found["engine"] or None,
        "raylm.preemptions": found["preemptions"],
        "raylm.cause": found["causes"][0]["cause"] if found["causes"] else None,
    }


def _events(raw: Raw) -> Iterator[tuple[str, float, Attributes]]:
    for part in raw["parts"]:
        for place, (at, engine, _) in enumerate(part["routings"]):
            yield "replayed" if place else "routed", at, {"raylm.engine": engine}
        if part["first_token"] is not None:
            yield "first token", part["first_token"], {"gen_ai.request.id": part["request_id"]}
        for index, kind, at, step, tokens, by in part["events"]:
            if kind == "preempted":
                about: Attributes = {"raylm.sequence": index, "raylm.step": step, "raylm.tokens": tokens}
                yield kind, at, about | ({"raylm.preempted_for": by} if by else {})


def _phase(raw: Raw, phase: dict[str, Any]) -> SpanData:
    start = raw["received"] + phase["start_s"]
    return SpanData(phase["phase"], start, start + phase["seconds"])
